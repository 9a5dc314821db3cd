"""Make the table and the pictures of `deep.sh` from its logs.

Example:
    python examples/translation/deep.py examples/translation/deep/*.log.xz --out examples/translation/deep.png
"""

import argparse
import json
import lzma
import re
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

NAME = re.compile(r"(?P<system>.+)-layers(?P<layers>\d+)-lr(?P<lr>[\d.e-]+)-seed(?P<seed>\d+)\.log(\.xz)?")
RECORD = re.compile(r'\{"epoch": .*\}\s*$')
# System -> what the table calls it, colour (Okabe and Ito's) and dashes.
SYSTEMS = {
    "none": ("Post-LN", "#D55E00", "-"),
    "admin": ("Post-LN, admin", "#0072B2", "-"),
    "admin-static": ("Post-LN, admin-static", "#56B4E9", "--"),
    "pre-ln": ("Pre-LN", "#000000", ":"),
}


@dataclass
class Run:
    """What one log holds.

    Attributes:
        system: a key of SYSTEMS.
        layers: N of each stack.
        lr: the highest learning rate.
        seed: of fairseq-train.
        training: (updates, loss, gradient norm) of each log interval; loss in bits per token, without smoothing.
        valid: (updates, loss) of each validation, in bits per token.
    """

    system: str
    layers: int
    lr: float
    seed: int
    training: list[tuple[int, float, float]] = field(default_factory=list)
    valid: list[tuple[int, float]] = field(default_factory=list)


def read_run(path: Path) -> Run:
    """Read a log.

    Raises:
        ValueError: its name says not what it is of, it cannot be read, or it has no validation.
    """
    name = NAME.fullmatch(path.name)
    if not name or name["system"] not in SYSTEMS:
        raise ValueError(f"{path} is not named as deep.sh names its logs")
    run = Run(name["system"], int(name["layers"]), float(name["lr"]), int(name["seed"]))
    try:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
            lines = file.readlines()
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    training, valid = {}, {}  # by updates: what was done again after a stop counts once
    for line in lines:
        record = RECORD.search(line)
        values = json.loads(record[0]) if record else {}
        if "gnorm" in values:
            training[int(values["num_updates"])] = float(values["nll_loss"]), float(values["gnorm"])
        elif "valid_nll_loss" in values:
            valid[int(values["valid_num_updates"])] = float(values["valid_nll_loss"])
    if not valid:
        raise ValueError(f"{path} has no validation")
    run.training = [(updates, *values) for updates, values in sorted(training.items())]
    run.valid = sorted(valid.items())
    return run


def format_table(runs: list[Run]) -> str:
    """Return the end of each training as Markdown: mean and range over seeds."""
    groups = {}
    for run in sorted(runs, key=lambda run: (run.layers, run.lr, list(SYSTEMS).index(run.system))):
        groups.setdefault((run.layers, run.lr, run.system), []).append(run)
    lines = [
        "| layers | learning rate | system | seeds | updates | training loss | validation loss | perplexity "
        "| gradient norm: median | highest |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (layers, lr, system), group in groups.items():
        valid = [run.valid[-1][1] for run in group]
        norms = [[norm for _, _, norm in run.training] for run in group]
        cells = [
            f"{layers} + {layers}",
            f"{lr:g}",
            SYSTEMS[system][0],
            str(len(group)),
            ", ".join(sorted({str(run.valid[-1][0]) for run in group})),
            spread([run.training[-1][1] for run in group]),
            spread(valid),
            spread([2**loss for loss in valid], 0),
            spread([statistics.median(values) for values in norms]),
            spread([max(values) for values in norms]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float], digits: int = 2) -> str:
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def draw(runs: list[Run], out: Path) -> None:
    """Draw training loss above gradient norm, one column for each depth and learning rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    columns = sorted({(run.layers, run.lr) for run in runs})
    with pyplot.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(
            2,
            len(columns),
            figsize=(1 + 2.6 * len(columns), 5),
            layout="constrained",
            sharex=True,
            sharey="row",
            squeeze=False,
        )
        for (above, below), (layers, lr) in zip(axes.T, columns, strict=True):
            for run in runs:
                if (run.layers, run.lr) != (layers, lr):
                    continue
                label, color, dashes = SYSTEMS[run.system]
                updates, losses, norms = zip(*run.training, strict=True)
                for axis, values in ((above, losses), (below, norms)):
                    axis.plot(updates, values, color=color, linestyle=dashes, linewidth=1.4, label=label)
            above.set_title(f"{layers} + {layers} layers, lr {lr:g}", fontsize=9)
            below.set_yscale("log")
            below.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            below.yaxis.set_minor_locator(NullLocator())
            below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            below.set_xlabel("updates")
            below.set_xlim(left=0)
        axes[0][0].set_ylabel("training loss (bits per token)")
        axes[1][0].set_ylabel("gradient norm")
        handles = dict(zip(*reversed(axes[0][0].get_legend_handles_labels()), strict=True))
        order = [label for label, _, _ in SYSTEMS.values() if label in handles]
        figure.legend(
            [handles[label] for label in order], order, loc="outside upper center", ncols=len(order), frameon=False
        )
        figure.savefig(out, dpi=130)
        pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="SYSTEM-layersN-lrLR-seedS.log, or .log.xz")
    parser.add_argument("--out", type=Path, metavar="FILE", help="picture to write; without it, only the table")
    args = parser.parse_args()
    try:
        runs = [read_run(path) for path in args.logs]
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    print(format_table(runs))
    if args.out:
        draw(runs, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
