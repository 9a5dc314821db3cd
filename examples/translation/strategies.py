"""Make the table of `strategies.sh` from what it leaves: logs and translations.

Systems of the same normalisation are compared with Vanilla, seed by seed, by sacrebleu's paired bootstrap.

Example:
    cd examples/translation
    python strategies.py strategies --picture strategies
"""

import argparse
import logging
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from trainings import Run, main, read_lines, spread  # noqa: E402

SAMPLES = 1000  # of the bootstrap
ENDING = "de.xz"


def score(translations: list[list[str]], reference: list[str]) -> tuple[list[float], list[float]]:
    """Return BLEU and chrF2 of each translation."""
    from sacrebleu.metrics import BLEU, CHRF

    bleu, chrf = (
        [metric.corpus_score(lines, [reference]).score for lines in translations] for metric in (BLEU(), CHRF())
    )
    return bleu, chrf


def bootstrap(baseline: list[str], other: list[str], reference: list[str]) -> float:
    """Return the p-value of the difference in BLEU of two translations."""
    from sacrebleu.metrics import BLEU
    from sacrebleu.significance import PairedTest

    logging.getLogger("sacrebleu").setLevel(logging.WARNING)  # it tells each of its steps
    if baseline == other:
        return 1.0  # sacrebleu finds no sample that differs more than not at all, and gives its smallest value
    named = [("Baseline", baseline), ("other", other)]
    _, scores = PairedTest(named, {"BLEU": BLEU()}, [reference], test_type="bs", n_samples=SAMPLES)()
    return scores["BLEU"][1].p_value


def results(runs: list[Run], when: str, baselines: dict[int, Run], args) -> dict[str, str]:
    """Return the columns of one system's translations: BLEU, at the end chrF2, and the p-value of each seed."""
    found = [run.result(when, ENDING) for run in runs]
    if any(lines is None for lines in found):
        return {}
    reference = read_lines(args.reference)
    for run, lines in zip(runs, found, strict=True):
        if len(lines) != len(reference):
            raise ValueError(f"{run.path} has {len(lines)} translations, {args.reference} has {len(reference)} lines")
    bleu, chrf = score(found, reference)
    columns = {"BLEU": spread(bleu, 2)} | ({"chrF2": spread(chrf, 2)} if when == "end" else {})
    others = [baselines[run.seed].result("end", ENDING) if run.seed in baselines else None for run in runs]
    if runs[0].system != "vanilla" and None not in others:
        values = [bootstrap(other, lines, reference) for other, lines in zip(others, found, strict=True)]
        columns["p"] = " ".join(f"{value:.3f}" for value in values)
    return columns


def mean_bleu(runs: list[Run], args) -> float:
    """Return the mean BLEU at the end of training."""
    return statistics.fmean(score([run.result("end", ENDING) for run in runs], read_lines(args.reference))[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, default=HERE / "data" / "test.de.xz", metavar="FILE")
    sys.exit(main(parser, "bleu", mean_bleu, results))
