"""Make the table of `strategies.sh` from what it leaves: logs and word error rates of the test part.

Example:
    cd examples/speech_to_text
    python strategies.py strategies --picture strategies
"""

import argparse
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trainings import Run, main, spread


def word_error_rates(run: Run, when: str) -> dict[str, float] | None:
    """Return the rate of each source of speech and of "all", in percent, or None where nothing was decoded."""
    lines = run.result(when, "txt")
    found = (re.match(r"(.*): ([\d.]+) \(", line) for line in lines or ())
    return {match[1]: float(match[2]) for match in found if match} or None


def results(runs: list[Run], when: str, baselines: dict[int, Run], args) -> dict[str, str]:
    """Return the columns of one system: word error rates of all clips and, at the end, of each source."""
    found = [word_error_rates(run, when) for run in runs]
    if None in found:
        return {}
    sources = [] if when != "end" or len(found[0]) < 3 else sorted(found[0].keys() - {"all"})
    return {"WER": spread([rates["all"] for rates in found], 1)} | {
        f"WER, {source}": spread([rates[source] for rates in found], 1) for source in sources
    }


def mean_rate(runs: list[Run], args) -> float:
    """Return the mean word error rate at the end of training."""
    return statistics.fmean(word_error_rates(run, "end")["all"] for run in runs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sys.exit(main(parser, "wer", mean_rate, results))
