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

NAME = re.compile(
    r"(?P<system>.+)-layers(?P<layers>\d+)-lr(?P<lr>[\d.e-]+)-updates(?P<length>\d+)-tokens(?P<tokens>\d+)"
    r"-seed(?P<seed>\d+)\.log(\.xz)?"
)
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
        length: updates that were asked for.
        tokens: in an update, at most.
        seed: of fairseq-train.
        training: (updates, loss, gradient norm) of each log interval; loss in bits per token, without smoothing.
        valid: (updates, loss) of each validation, in bits per token.
        ends: gradient norms of the first and of the last decoder layer, at each log interval.
    """

    system: str
    layers: int
    lr: float
    length: int
    tokens: int
    seed: int
    training: list[tuple[int, float, float]] = field(default_factory=list)
    valid: list[tuple[int, float]] = field(default_factory=list)
    ends: list[tuple[float, float]] = field(default_factory=list)

    @property
    def setting(self) -> tuple[int, int, float, int]:
        """What all systems have in common: layers, tokens, learning rate, updates."""
        return self.layers, self.tokens, self.lr, self.length


def read_run(path: Path) -> Run:
    """Read a log.

    Raises:
        ValueError: its name says not what it is of, it cannot be read, or it has no validation.
    """
    name = NAME.fullmatch(path.name)
    if not name or name["system"] not in SYSTEMS:
        raise ValueError(f"{path} is not named as deep.sh names its logs")
    numbers = {key: int(name[key]) for key in ("layers", "length", "tokens", "seed")}
    run = Run(name["system"], lr=float(name["lr"]), **numbers)
    try:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
            lines = file.readlines()
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    training, valid, ends = {}, {}, {}  # by updates: what was done again after a stop counts once
    for line in lines:
        record = RECORD.search(line)
        values = json.loads(record[0]) if record else {}
        if "gnorm" in values:
            updates = int(float(values["num_updates"]))
            training[updates] = float(values["nll_loss"]), float(values["gnorm"])
            ends[updates] = tuple(float(values[f"gnorm_decoder_{layer}"]) for layer in (0, run.layers - 1))
        elif "valid_nll_loss" in values:
            valid[int(float(values["valid_num_updates"]))] = float(values["valid_nll_loss"])
    if max(valid, default=0) != run.length:
        raise ValueError(f"{path} does not reach the end of its training, {run.length} updates")
    run.training = [(updates, *values) for updates, values in sorted(training.items())]
    run.valid = sorted(valid.items())
    run.ends = list(ends.values())
    return run


def format_table(runs: list[Run]) -> str:
    """Return the end of each training, and its median gradient norms, as Markdown: mean and range over seeds."""
    groups = {}
    for run in sorted(runs, key=lambda run: (*run.setting, list(SYSTEMS).index(run.system))):
        groups.setdefault((*run.setting, run.system), []).append(run)
    lines = [
        "| layers | tokens | learning rate | updates | system | seeds | training loss | validation loss | perplexity "
        "| gradient norm | of the first decoder layer | of the last |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (layers, tokens, lr, length, system), group in groups.items():
        valid = [run.valid[-1][1] for run in group]
        first, last = ([statistics.median(norms[end] for norms in run.ends) for run in group] for end in (0, 1))
        cells = [
            f"{layers} + {layers}",
            f"{tokens:,}",
            f"{lr:g}",
            f"{length:,}",
            SYSTEMS[system][0],
            str(len(group)),
            spread([run.training[-1][1] for run in group]),
            spread(valid),
            spread([2**loss for loss in valid], 0),
            spread([statistics.median(norm for _, _, norm in run.training) for run in group]),
            spread(first, 4),
            spread(last, 4),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float], digits: int = 2) -> str:
    """Return the mean and, of several, the range; what rounds to nothing is said to be below the last digit."""

    def show(value: float) -> str:
        return f"{value:.{digits}f}" if round(value, digits) else f"< {10**-digits:.{digits}f}"

    mean = show(statistics.fmean(values))
    return mean if len(values) == 1 else f"{mean} ({show(min(values))} to {show(max(values))})"


def draw(runs: list[Run], out: Path) -> None:
    """Draw training loss above gradient norm, one column for each depth and learning rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    columns = sorted({run.setting for run in runs})
    with pyplot.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(
            2,
            len(columns),
            figsize=(1 + 2.3 * len(columns), 5),
            layout="constrained",
            sharex="col",
            sharey="row",
            squeeze=False,
        )
        for (above, below), setting in zip(axes.T, columns, strict=True):
            for run in runs:
                if run.setting != setting:
                    continue
                label, color, dashes = SYSTEMS[run.system]
                updates, losses, norms = zip(*run.training, strict=True)
                for axis, values in ((above, losses), (below, norms)):
                    axis.plot(updates, values, color=color, linestyle=dashes, linewidth=1.4, label=label)
            layers, tokens, lr, length = setting
            above.set_title(f"{layers} + {layers} layers, lr {lr:g},\n{length:,} x {tokens:,} tokens", fontsize=9)
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
    parser.add_argument(
        "logs", nargs="+", type=Path, metavar="LOG", help="SYSTEM-layersN-lrLR-updatesU-tokensT-seedS.log, or .log.xz"
    )
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
