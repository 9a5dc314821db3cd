"""What the tables of the comparisons of strategies have in common: trainings by their logs, the rate that was chosen.

Imported by the strategies.py of the examples; the logs are those that `pack` in steps.sh leaves.
"""

import argparse
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fairseq_sharing.tools.curves import SCORES, Result, draw
from fairseq_sharing.tools.logs import Validation, interval_median, read_lines, read_validations, unique_parameters

NAME = re.compile(r"(?P<norm>pre-ln|admin)-(?P<system>[a-z_]+)-lr(?P<lr>[\d.e-]+)-seed(?P<seed>\d+)\.log(\.xz)?")
NORMS = {"pre-ln": "Pre-LN", "admin": "Post-LN, Admin"}
SYSTEMS = {
    "vanilla": "Vanilla",
    "universal": "Universal",
    "sequence": "SEQUENCE",
    "cycle": "CYCLE",
    "cycle_rev": "CYCLE (REV)",
    "unshared": "nothing shared",
}
TIMES = {"end": "", "same-time": " in Vanilla's time"}  # when a model was tried -> what its columns are called


@dataclass(frozen=True)
class Run:
    """What one training has left.

    Attributes:
        path: its log.
        norm: a key of NORMS.
        system: a key of SYSTEMS.
        lr: the highest learning rate, as it was written.
        seed: of fairseq-train.
    """

    path: Path
    norm: str
    system: str
    lr: str
    seed: int

    @cached_property
    def validations(self) -> list[Validation]:
        """The validations, in the order of updates."""
        return read_validations(self.path)

    @property
    def loss(self) -> float:
        """The last validation loss, in bits per token, without smoothing."""
        return self.validations[-1].loss

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the log."""
        return read_lines(self.path)

    @property
    def parameters(self) -> int:
        """The unique parameters."""
        return unique_parameters(self.lines)

    @property
    def layers(self) -> tuple[int, int]:
        """N and M of the decoder."""
        found = self.find(r"decoder: (\d+) layers?(?: from (\d+) parameter sets?)?")
        return int(found[1]), int(found[2] or found[1])

    @property
    def tokens_per_second(self) -> float:
        """The median over the intervals of the log."""
        return self.median("wps")

    @property
    def minutes_per_update(self) -> float:
        """By the median speed, so that what else the machine did for a while does not count."""
        return 1 / self.median("ups") / 60

    @property
    def minutes(self) -> float:
        """The time of the whole training at its median speed."""
        return self.validations[-1].updates * self.minutes_per_update

    def median(self, name: str) -> float:
        """Return the median of what fairseq has logged after each interval."""
        return interval_median(self.lines, name)

    def find(self, pattern: str) -> re.Match:
        """Return the first match in the log.

        Raises:
            ValueError: there is none.
        """
        for line in self.lines:
            if found := re.search(pattern, line):
                return found
        raise ValueError(f"{self.path} has no line with {pattern}")

    @property
    def tried(self) -> bool:
        """Whether the end of the training was decoded or evaluated."""
        return any(self.path.parent.glob(f"{self.path.name.partition('.log')[0]}.end.*"))

    def result(self, when: str, ending: str) -> list[str] | None:
        """Return the lines of what was made of the model: NAME.WHEN.ENDING beside the log; None where there is none.

        Vanilla's own time is the end of its training.
        """
        when = "end" if self.system == "vanilla" else when
        path = self.path.with_name(f"{self.path.name.partition('.log')[0]}.{when}.{ending}")
        return read_lines(path) if path.exists() else None


def read_runs(folder: Path) -> list[Run]:
    """Return the finished trainings of a folder.

    Raises:
        ValueError: it holds none.
    """
    found = []
    for path in sorted(folder.glob("*.log.xz")):
        name = NAME.fullmatch(path.name)
        if name and name["system"] in SYSTEMS:
            found.append(Run(path, name["norm"], name["system"], name["lr"], int(name["seed"])))
    if not found:
        raise ValueError(f"{folder} holds no log of a finished training")
    return found


def best_rate(runs: list[Run]) -> str:
    """Return the learning rate with the best validation loss for the seed that was trained with most of them."""
    seeds = {run.seed for run in runs}
    first = max(sorted(seeds), key=lambda seed: len({run.lr for run in runs if run.seed == seed}))
    return min((run for run in runs if run.seed == first), key=lambda run: (run.loss, float(run.lr))).lr


def group(runs: list[Run], norm: str, system: str) -> list[Run]:
    """Return the trainings of a system, by seed, at the learning rate that was chosen for it."""
    own = [run for run in runs if (run.norm, run.system) == (norm, system)]
    rate = best_rate(own) if own else None
    return sorted((run for run in own if run.lr == rate), key=lambda run: run.seed)


def when_vanilla_ended(runs: list[Run], name: str, every: int) -> int | None:
    """Return the last saved update that a training reaches in the time that Vanilla takes, at their median speeds.

    None where Vanilla was not trained with this normalisation. Seeds and rates do not differ in speed, and what else
    the machine did only slows: of several the fastest counts.
    """
    (run,) = (run for run in runs if run.path.name == f"{name}.log.xz")
    same = [each for each in runs if each.norm == run.norm]
    baseline = min((each.minutes for each in same if each.system == "vanilla"), default=None)
    if baseline is None:
        return None
    reached = baseline / min(each.minutes_per_update for each in same if each.system == run.system)
    saved = (each.updates for each in run.validations if each.updates % every == 0)
    return max((updates for updates in saved if updates <= reached), default=None)


def spread(values: list[float], digits: int) -> str:
    """Return the mean and, of several, the standard deviation."""
    mean = f"{statistics.fmean(values):,.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def tabulate_runs(runs: list[Run], results: Callable, watts: float | None = None) -> list[dict]:
    """Return a row for each system: means over the seeds at the learning rate that was chosen.

    Seeds do not differ in speed, and what else the machine did only slows: times and speeds are those of the fastest.

    Args:
        runs: all trainings.
        results: takes the trainings of a system, when they were tried ("end" or "same-time"), and those of Vanilla by
            seed; returns columns, or nothing where there is nothing to tell.
        watts: what the one busy core of a training draws, for a column with the energy of each.
    """
    rows = []
    for norm in NORMS:
        baselines = {run.seed: run for run in group(runs, norm, "vanilla")}
        for system, title in SYSTEMS.items():
            own = group(runs, norm, system)
            if not own:
                continue
            depth, sets = own[0].layers
            row = {
                "norm": NORMS[norm],
                "system": title,
                "N": depth,
                "M": sets,
                "parameters": f"{own[0].parameters:,}",
                "rate": own[0].lr,
                "seeds": len(own),
                "tokens/s": f"{max(run.tokens_per_second for run in own):,.0f}",
                "minutes": f"{(minutes := min(run.minutes for run in own)):.0f}",
                **({} if watts is None else {"Wh": f"{minutes / 60 * watts:.1f}"}),
                "validation perplexity": spread([2**run.loss for run in own], 2),
            }
            for when, label in TIMES.items():
                columns = results(own, when, baselines)
                row.update({f"{name}{label}": value for name, value in columns.items()})
            rows.append(row)
    columns = dict.fromkeys(name for row in sorted(rows, key=len, reverse=True) for name in row)
    return [{name: row.get(name, "") for name in columns} for row in rows]


def tabulate_rates(runs: list[Run]) -> list[dict]:
    """Return a row for each system: the last validation perplexity at each learning rate, with the first seed."""
    rates = sorted({run.lr for run in runs}, key=float)
    rows = []
    for norm in NORMS:
        for system, title in SYSTEMS.items():
            own = [run for run in runs if (run.norm, run.system) == (norm, system)]
            if own:
                first = min(run.seed for run in own)
                found = {run.lr: f"{2**run.loss:.2f}" for run in own if run.seed == first}
                rows.append({"norm": NORMS[norm], "system": title, **{rate: found.get(rate, "") for rate in rates}})
    return rows


def mean_curve(runs: list[Run]) -> list[Validation]:
    """Return the mean validation loss of several seeds after the updates that all have, and minutes of the fastest."""
    losses = [{each.updates: each.loss for each in run.validations} for run in runs]
    pace = min(run.minutes_per_update for run in runs)
    return [
        replace(each, loss=statistics.fmean(loss[each.updates] for loss in losses), minutes=each.updates * pace)
        for each in runs[0].validations
        if all(each.updates in loss for loss in losses)
    ]


def draw_runs(runs: list[Run], score_name: str, mean_score: Callable, prefix: str) -> None:
    """Draw PREFIX-NORM.png: validation loss against updates and minutes, scores against their cost; means over seeds.

    Args:
        runs: all trainings.
        score_name: as `fairseq_sharing.tools.curves` knows it.
        mean_score: takes the trainings of a system and returns their mean score.
        prefix: of the files.
    """
    for norm in NORMS:
        chosen = {title: own for system, title in SYSTEMS.items() if (own := group(runs, norm, system))}
        curves = {title: mean_curve(own) for title, own in chosen.items()}
        scores = [
            Result(title, mean_score(own), own[0].parameters, max(run.tokens_per_second for run in own))
            for title, trained in chosen.items()
            if (own := [run for run in trained if run.tried])
        ]
        if scores:
            draw(curves, (scores, SCORES[score_name], "tokens per second in training"), [f"{prefix}-{norm}.png"])


def main(parser: argparse.ArgumentParser, score_name: str, mean_score: Callable, results: Callable) -> int:
    """Run a strategies.py: print the tables, or answer strategies.sh.

    Args:
        parser: with the description and the family's own options.
        score_name: for `draw_runs`.
        mean_score: for `draw_runs`; gets the arguments too.
        results: for `tabulate_runs`; gets the arguments too.
    """
    parser.add_argument(
        "folder", type=Path, help="with what strategies.sh left: its RUN, or *.log.xz and results of it"
    )
    parser.add_argument(
        "--best-rate", metavar="NORM-SYSTEM", help="print the learning rate with the best validation loss"
    )
    parser.add_argument("--when-vanilla-ended", metavar="NAME", help="print the update it was at then")
    parser.add_argument("--every", type=int, default=1, metavar="U", help="of updates that were saved")
    parser.add_argument("--watts", type=float, metavar="W", help="of a busy core, to estimate the energy of trainings")
    parser.add_argument("--picture", metavar="PREFIX", help="draw PREFIX-pre-ln.png and PREFIX-admin.png")
    args = parser.parse_args()
    try:
        runs = read_runs(args.folder)
        if args.best_rate:
            print(best_rate([run for run in runs if f"{run.norm}-{run.system}" == args.best_rate]))
        elif args.when_vanilla_ended:
            print(when_vanilla_ended(runs, args.when_vanilla_ended, args.every) or "")
        else:
            from tabulate import tabulate

            for rows in (
                tabulate_runs(runs, lambda *known: results(*known, args), args.watts),
                tabulate_rates(runs),
            ):
                print(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True), end="\n\n")
            if args.picture:
                draw_runs(runs, score_name, lambda own: mean_score(own, args), args.picture)
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0
