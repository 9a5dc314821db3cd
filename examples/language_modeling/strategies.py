"""Make the table of `strategies.sh` from what it leaves: logs and perplexities of the test part.

Example:
    cd examples/language_modeling
    python strategies.py strategies --picture strategies
"""

import argparse
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trainings import Run, main, spread


def perplexity(run: Run, when: str) -> float | None:
    """Return the perplexity of the test part, or None where it was not measured."""
    lines = run.result(when, "txt")
    return None if lines is None else float(re.search(r"Perplexity: ([\d.]+)", lines[0])[1])


def results(runs: list[Run], when: str, baselines: dict[int, Run], args) -> dict[str, str]:
    """Return the column of one system: test perplexity."""
    found = [perplexity(run, when) for run in runs]
    return {} if None in found else {"test perplexity": spread(found, 2)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sys.exit(
        main(parser, "perplexity", lambda runs, _: statistics.fmean(perplexity(run, "end") for run in runs), results)
    )
