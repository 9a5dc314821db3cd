"""What fine-tuning left in its logs: scores, and which learning rate is best on the validation part.

Imported by compare.py, sharing.py and albert.py, not run.
"""

import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fairseq_sharing.tools.logs import read_lines

BOTH = ("valid", "test")


def finished_logs(run: Path, pattern: str) -> dict[str, Path]:
    """Return the log of each finished step by its name: NAME.log beside NAME.done, or the packed NAME.log.xz alone."""
    logs = {done.stem: done.with_suffix(".log") for done in sorted(run.glob(f"{pattern}.done"))}
    for packed in sorted(run.glob(f"{pattern}.log.xz")):
        if not packed.with_suffix("").exists():
            logs[packed.name.removesuffix(".log.xz")] = packed
    return logs


def read_scores(log: Path, metric: str = "accuracy", parts: tuple[str, ...] = BOTH) -> tuple[float, ...] | None:
    """Return the scores of the epoch with the best validation score, as fairseq-train logged them.

    An epoch that a resumed run repeated counts once. None where no epoch is complete.

    Args:
        log: of fairseq-train.
        metric: its name there; more is better.
        parts: the subsets whose scores are asked for, validation first.
    """
    line = re.compile(rf"epoch (\d+) \| valid on '({'|'.join(parts)})' subset .*\| {metric} (-?[\d.]+)")
    epochs: dict[int, dict[str, float]] = {}
    for epoch, part, score in line.findall("\n".join(read_lines(log))):
        epochs.setdefault(int(epoch), {})[part] = float(score)
    complete = [tuple(found[part] for part in parts) for found in epochs.values() if len(found) == len(parts)]
    return max(complete, key=lambda scores: scores[0], default=None)


def read_runs(run: Path, name: str, start: str, **what) -> dict[str, dict[int, tuple[float, ...]]]:
    """Return the scores of each finished run of one set and start, by learning rate and seed.

    Args:
        run: folder of logs called ``tune-NAME-START-RATE-seedSEED.log``, or the same with ``.xz``.
        name: the set.
        start: pretrained or not.
        what: metric and parts, as for `read_scores`.
    """
    runs: dict[str, dict[int, tuple[float, ...]]] = {}
    for step, log in finished_logs(run, f"tune-{name}-{start}-*-seed*").items():
        rate, seed = re.fullmatch(f"tune-{name}-{start}-(.+)-seed(.+)", step).groups()
        scores = read_scores(log, **what)
        if scores is not None:
            runs.setdefault(rate, {})[int(seed)] = scores
    return runs


def best_rate(runs: dict[str, dict[int, tuple[float, ...]]]) -> str:
    """Return the learning rate with the best validation score for the seed that all rates were tried with.

    Raises:
        ValueError: no seed was run with every rate.
    """
    common = set.intersection(*(set(seeds) for seeds in runs.values())) if runs else set()
    if not common:
        raise ValueError("no seed was run with every learning rate")
    return max(runs, key=lambda rate: (runs[rate][min(common)][0], -float(rate)))


def mean_and_spread(values) -> str:
    """Return the mean and, over more than one seed, the standard deviation."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"
