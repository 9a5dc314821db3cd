"""Print the table of `sharing.sh`: what is shared, E, parameters, masked-LM loss, accuracy after fine-tuning.

Example:
    cd examples/masked_lm
    python sharing.py sharing --watts 5 --picture sharing.png
"""

import argparse
import re
import statistics
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from runs import best_rate, finished_logs, mean_and_spread, read_runs
from tabulate import tabulate

from fairseq_sharing.tools.curves import SCORES, Result, draw
from fairseq_sharing.tools.logs import Validation, interval_median, read_lines, read_validations, unique_parameters

SHARED = {"all": "all", "attention": "attention", "ffn": "FFN", "none": "nothing"}
SETS = ("novels", "reviews")


@dataclass
class Cell:
    """One call of run.sh.

    Attributes:
        folder: its RUN, or the packed logs of it.
        shared: a key of SHARED.
        width: E.
    """

    folder: Path
    shared: str
    width: int

    @cached_property
    def log(self) -> Path | None:
        """The log of pretraining; None where it has not ended."""
        return finished_logs(self.folder, "pretrain").get("pretrain")

    @cached_property
    def lines(self) -> list[str]:
        """What that log says."""
        return read_lines(self.log)

    @cached_property
    def validations(self) -> list[Validation]:
        """Those of pretraining, on running text, in bits per masked piece."""
        return read_validations(self.log)

    @property
    def parameters(self) -> int:
        """The unique parameters, with those of the masked-LM head."""
        return unique_parameters(self.lines)

    def median(self, name: str) -> float:
        """Return the median of what fairseq has logged after each interval of pretraining."""
        return interval_median(self.lines, name)

    @property
    def minutes(self) -> float:
        """The time of pretraining at its median speed, so that what else the machine did for a while does not count."""
        return self.validations[-1].updates / self.median("ups") / 60

    def accuracies(self, name: str) -> list[float]:
        """Return the accuracy on the test part of a set by seed, at the learning rate that is best on validation."""
        runs = read_runs(self.folder, name, "pretrained")
        return [test for _, (_, test) in sorted(runs[best_rate(runs)].items())] if runs else []

    def row(self, watts: float | None) -> dict[str, str]:
        """Return the row of the table."""
        row = {
            "shared": SHARED[self.shared],
            "E": str(self.width),
            "parameters": f"{self.parameters:,}",
            "pieces/s": f"{self.median('wps'):,.0f}",
            "minutes": f"{self.minutes:.0f}",
            **({} if watts is None else {"Wh": f"{self.minutes / 60 * watts:.1f}"}),
            "masked-LM loss (bits)": f"{self.validations[-1].loss:.3f}",
        }
        for name in SETS:
            if tests := self.accuracies(name):
                row |= {f"{name}, accuracy (%)": mean_and_spread(tests), f"{name}, by seed": " ".join(map(str, tests))}
        return row


def read_cells(folder: Path) -> list[Cell]:
    """Return those whose pretraining has ended, wide embeddings first, in the order of ALBERT's table."""
    names = [(re.fullmatch(r"(all|attention|ffn|none)-(\d+)", path.name), path) for path in folder.glob("*")]
    cells = [Cell(path, name[1], int(name[2])) for name, path in names if name]
    return sorted((cell for cell in cells if cell.log), key=lambda cell: (-cell.width, list(SHARED).index(cell.shared)))


def draw_cells(cells: list[Cell], out: str) -> None:
    """Draw the loss of pretraining against updates and minutes at median speed, and accuracy against its cost."""
    curves = {
        f"{SHARED[cell.shared]}, E={cell.width}": [
            replace(each, minutes=each.updates / cell.median("ups") / 60) for each in cell.validations
        ]
        for cell in cells
    }
    points = [
        Result(SHARED[cell.shared], statistics.fmean(tests), cell.parameters, cell.median("wps"))
        for cell in cells
        if (tests := cell.accuracies(SETS[0]))
    ]
    draw(curves, (points, SCORES["accuracy"], "pieces per second in pretraining") if points else None, [out])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="RUN of sharing.sh, or the packed logs of it")
    parser.add_argument(
        "--watts", type=float, metavar="W", help="of a busy core, to estimate the energy of pretraining"
    )
    parser.add_argument(
        "--picture", metavar="FILE", help="draw the curves, and the accuracy on novels against its cost"
    )
    args = parser.parse_args()
    try:
        cells = read_cells(args.run)
        if not cells:
            raise ValueError(f"{args.run} holds no finished pretraining of sharing.sh")
        rows = [cell.row(args.watts) for cell in cells]
        columns = dict.fromkeys(name for row in rows for name in row)
        rows = [{name: row.get(name, "") for name in columns} for row in rows]
        print(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True))
        if args.picture:
            draw_cells(cells, args.picture)
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
