"""The run.sh of the examples: from data to scores, stopped and resumed, so small that the scores say nothing."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY, read_corpus

pytestmark = pytest.mark.slow
SIZES = {"UPDATES": "60", "SAVES": "2", "EMBED": "16", "FFN": "32", "WARMUP": "2"}
LAST = {"language_modeling": "unigram perplexity", "speech_to_text": "all: "}


@pytest.fixture(params=LAST)
def example(request, tmp_path):
    """Return a script and its environment."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, **SIZES, "PATH": path, "RUN": str(tmp_path / "run"), "VOCAB": "300"}
    if request.param == "language_modeling":
        environment["DATA"] = str(tmp_path)
        for split in ("train", "valid", "test"):
            (tmp_path / f"{split}.txt").write_text("\n".join(read_corpus(split, "en")[:300]) + "\n", "utf-8")
    return request.param, REPOSITORY / "examples" / request.param / "run.sh", environment


def command_lines() -> list[bytes]:
    """Return those of all processes that are there."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes())
    return lines


def call(script, environment, **changes) -> subprocess.CompletedProcess:
    return subprocess.run([script], env={**environment, **changes}, capture_output=True, text=True)


def test_stop_resume_finish_and_repeat(example, tmp_path):
    name, script, environment = example
    run = Path(environment["RUN"])
    with subprocess.Popen([script], env={**environment, "UPDATES": "6000"}, stdout=subprocess.PIPE, text=True) as first:
        deadline = time.monotonic() + 600
        while not (run / "checkpoints" / "checkpoint_last.pt").exists():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        first.send_signal(signal.SIGTERM)
        assert first.wait() == 143
    assert (run / "prepare.done").exists() and not (run / "train.done").exists()
    assert not any(os.fsencode(run) in line for line in command_lines())
    refused = call(script, environment)
    assert refused.returncode == 2 and "was made with UPDATES=6000, and now UPDATES=60 is asked for" in refused.stderr
    settings = (run / "settings.txt").read_text("utf-8")
    (run / "settings.txt").write_text(settings.replace("UPDATES=6000", "UPDATES=60"), "utf-8")

    finished = call(script, environment)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    assert "Loaded checkpoint" in (run / "train.log").read_text("utf-8")
    assert LAST[name] in finished.stdout and (run / "curve.png").stat().st_size > 1000
    repeated = call(script, environment)
    steps = len(list(run.glob("*.done")))
    assert repeated.returncode == 0 and repeated.stdout.count("already done") == steps >= 5

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    refused = call(script, environment, RUN=str(tmp_path / "other"))
    assert refused.returncode == 2 and "is a folder with other contents" in refused.stderr
