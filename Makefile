# Targets: quickstart, test, test-all, benchmark, check, format, clean. Each one first makes the environment in .venv when it is not there.
SHELL := /bin/bash
export OMP_NUM_THREADS := 1
VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest -n $(or $(JOBS),2) --dist loadscope

# The first of these that runs and is CPython 3.11 or 3.12. Override with `make PYTHON=/path/to/python …`.
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' >/dev/null 2>&1 && echo $$p && break; done)

.PHONY: quickstart test test-all benchmark check format clean

quickstart: $(VENV)/.installed
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/translation/quickstart.sh

test: $(VENV)/.installed
	$(PYTEST) -m "not slow"

test-all: $(VENV)/.installed
	$(PYTEST)

benchmark: $(VENV)/.installed
	$(BIN)/python scripts/benchmark.py --short

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# ve-fairseq goes in without its declared dependencies (torchaudio among them); setup.py's extra "dev" lists those it uses.
$(VENV)/.installed: setup.py constraints.txt
	@if [ -z "$(PYTHON)" ] || ! $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then \
		echo "fairseq_sharing needs CPython 3.11 or 3.12 and found neither: install one, or name it with make PYTHON=/path/to/python3.11" >&2; exit 2; fi
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) comes without the modules venv and ensurepip: install them (Debian: apt-get install python3-venv), or name another Python with make PYTHON=…" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps ve-fairseq
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
