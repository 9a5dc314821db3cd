"""Draw the learning curves of one or several runs from the logs of fairseq-train.

Reads what ``--log-format simple`` and ``--log-format json`` print, from the terminal's output or from ``--log-file``.
The log of a resumed run is read as one run: an update that was validated twice counts once, with its last value, and
the time between stop and resumption is left out. fairseq's own ``wall`` tells the time up to the first resumption, the
time stamps of the log do from there on: after a resumption ``wall`` stands still or starts again.

Example:
    fairseq-sharing curves quickstart-run/train.log quickstart-run-transformer/train.log --out curves.png
"""

import json
import logging
import math
import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

HELP = "draw validation loss and perplexity against updates and time, from logs of fairseq-train"

STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) \| ")
SIMPLE_VALID = re.compile(r"epoch \d+ \| valid on '([^']+)' subset \| (.*)")
SIMPLE_WALL = re.compile(r"num_updates=(\d+).*\bwall=(\d+)")
JSON_LINE = re.compile(r'\{"epoch": .*\}\s*$')
RESUMED = re.compile(r"Loaded checkpoint .* @ (\d+) updates")

# Okabe and Ito's colours without yellow, which is faint on paper. Dashes and markers tell the curves apart in grey.
STYLES = [
    ("#0072B2", "-", "o"),
    ("#D55E00", "--", "s"),
    ("#009E73", "-.", "^"),
    ("#CC79A7", ":", "D"),
    ("#000000", (0, (5, 1, 1, 1, 1, 1)), "v"),
    ("#56B4E9", (0, (8, 2)), "P"),
    ("#E69F00", (0, (1, 2)), "X"),
]


@dataclass
class Validation:
    """One validation.

    Attributes:
        updates: updates done before it.
        loss: negative log-likelihood, in bits per token where the log has a perplexity, else the criterion's loss.
        in_bits: whether ``loss`` is in bits, so that perplexity is 2^loss.
        minutes: training time before it; None when the log does not tell.
    """

    updates: int
    loss: float
    in_bits: bool
    minutes: float | None


class Clock:
    """Training time while a log is read, over stops and resumptions.

    Attributes:
        stamp: the time stamp of the line being read; None when it has none.
    """

    def __init__(self):
        self.stamp: datetime | None = None
        self.start: datetime | None = None  # when training would have begun, had it never stopped
        self.wall: float | None = None  # fairseq's last word, until the first resumption; seconds
        self.known = {0: 0.0}  # seconds at an update
        self.resumed = False

    def tick(self, updates: int, wall: float) -> None:
        """Take in a line of training."""
        if not self.resumed:
            self.wall = wall
            if self.stamp:
                self.start = self.stamp - timedelta(seconds=wall)
        seconds = self.seconds()
        if seconds is not None:
            self.known[updates] = seconds

    def resume(self, updates: int) -> None:
        """Set the clock to what it showed at the last update before the one that is resumed from."""
        self.resumed, self.wall = True, None
        before = self.known[max(update for update in self.known if update <= updates)]
        self.start = self.stamp - timedelta(seconds=before) if self.stamp else None

    def seconds(self) -> float | None:
        """Return the seconds of training until the line being read."""
        if self.stamp and self.start:
            return (self.stamp - self.start).total_seconds()
        return self.wall

    def minutes(self, updates: int) -> float | None:
        """Return the minutes of training until the line being read, and remember them for this update."""
        seconds = self.seconds()
        if seconds is None:
            return None
        self.known[updates] = seconds
        return seconds / 60


def read_validations(path: Path) -> list[Validation]:
    """Read the validations of a log, in the order of updates; the first subset in it counts.

    Raises:
        ValueError: no such file, or no validation in it.
    """
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    found, subset = {}, None
    clock = Clock()
    for line in lines:
        stamp = STAMP.match(line)
        clock.stamp = datetime.fromisoformat(stamp[1]) if stamp else None
        if resumed := RESUMED.search(line):
            clock.resume(int(resumed[1]))
            continue
        record = JSON_LINE.search(line)
        record = parse_json(record[0]) if record else None
        if simple := SIMPLE_WALL.search(line):
            clock.tick(int(simple[1]), float(simple[2]))
            continue
        if record and {"wall", "num_updates"} <= record.keys():
            clock.tick(int(record["num_updates"]), float(record["wall"]))
            continue
        name, values = parse_json_validation(record) if record else parse_simple_validation(line)
        if values is None or name != (subset or name):
            continue
        subset = name
        updates = int(float(values["num_updates"]))
        found[updates] = Validation(
            updates=updates,
            loss=float(values.get("nll_loss", values["loss"])),
            in_bits="ppl" in values,
            minutes=clock.minutes(updates),
        )
    if not found:
        raise ValueError(f"{path} has no validation line of fairseq-train (simple or json log format)")
    return [found[updates] for updates in sorted(found)]


def parse_json(text: str) -> dict | None:
    try:
        return json.loads(text)
    except ValueError:
        return None


def parse_simple_validation(line: str) -> tuple[str | None, dict | None]:
    """Return subset and values of a line of ``--log-format simple``, or (None, None)."""
    match = SIMPLE_VALID.search(line)
    if not match:
        return None, None
    fields = (field.strip().rpartition(" ") for field in match[2].split("|"))
    return check_values(match[1], {key: value for key, _, value in fields})


def parse_json_validation(record: dict) -> tuple[str | None, dict | None]:
    """Return subset and values of a line of ``--log-format json``, or (None, None)."""
    for key in record:
        if key.startswith("valid") and key.endswith("_num_updates"):
            subset = key.removesuffix("_num_updates")
            prefix = f"{subset}_"
            values = {key.removeprefix(prefix): value for key, value in record.items() if key.startswith(prefix)}
            return check_values(subset, values)
    return None, None


def check_values(subset: str, values: dict) -> tuple[str | None, dict | None]:
    """Pass only a whole line with finite numbers: the last line of a stopped run may be cut off."""
    try:
        numbers = [float(values["num_updates"]), float(values.get("nll_loss", values["loss"]))]
    except (KeyError, TypeError, ValueError):
        return None, None
    return (subset, values) if all(map(math.isfinite, numbers)) else (None, None)


def name_runs(paths: list[Path]) -> list[str]:
    """Name each log by the parts of its path that tell the logs apart: the file, or the folder when files are alike."""
    parts = [path.absolute().with_suffix("").parts for path in paths]
    if len(set(parts)) < len(parts):  # such as train.log.1 and train.log.2
        parts = [path.absolute().parts for path in paths]
    while min(map(len, parts)) > 1 and len(parts) > 1 and len({part[-1] for part in parts}) == 1:
        parts = [part[:-1] for part in parts]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"the same log is given twice: {' '.join(map(str, paths))}")


def draw(runs: dict[str, list[Validation]], out: Path) -> None:
    """Draw the runs into a PNG: loss on the left axis, the same curve's perplexity on the right one."""
    # Importing fairseq opens the root logger, and matplotlib tells it about every font it looks at.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    in_bits = all(validation.in_bits for run in runs.values() for validation in run)
    timed = any(validation.minutes is not None for run in runs.values() for validation in run)
    with pyplot.rc_context({"font.size": 10, "axes.spines.top": False, "axes.grid": True, "grid.color": "#dddddd"}):
        figure, axes = pyplot.subplots(
            1, 2 if timed else 1, sharey=True, figsize=(10 if timed else 5.6, 4.2), layout="constrained", squeeze=False
        )
        for axis, quantity in zip(axes[0], ("updates", "minutes"), strict=False):
            for number, (name, run) in enumerate(runs.items()):
                color, dashes, marker = STYLES[number % len(STYLES)]
                points = [(getattr(v, quantity), v.loss) for v in run if getattr(v, quantity) is not None]
                axis.plot(
                    [x for x, _ in points],
                    [y for _, y in points],
                    color=color,
                    linestyle=dashes,
                    marker=marker,
                    markersize=4.5,
                    linewidth=1.6,
                    label=name,
                )
                if points and len(runs) == 1:
                    loss = points[-1][1]
                    value = f"perplexity {2**loss:.1f}" if in_bits else f"{loss:.2f}"
                    axis.annotate(
                        value, points[-1], xytext=(0, 24), textcoords="offset points", ha="right", color=color
                    )
            axis.set_xlim(left=0)
            axis.set_xlabel("updates" if quantity == "updates" else "training time (minutes)")
        first, last = axes[0][0], axes[0][-1]
        first.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, steps=[1, 2, 5, 10]))
        first.set_ylabel("validation loss (bits per token)" if in_bits else "validation loss")
        if in_bits:
            # The same scale, written as perplexity: ticks stay where the loss has them.
            perplexity = last.secondary_yaxis("right")
            perplexity.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{2**loss:.3g}"))
            perplexity.set_ylabel("validation perplexity")
        else:
            last.spines["right"].set_visible(False)
        for axis in axes[0][:-1]:
            axis.spines["right"].set_visible(False)
        if len(runs) > 1:
            first.legend(frameon=False, handlelength=3.5)
        figure.savefig(out, dpi=150, format="png")
        pyplot.close(figure)


def add_arguments(parser) -> None:
    """Add the options of this subcommand."""
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="log of fairseq-train, one for each run")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png", help="picture to write")
    parser.add_argument("--force", action="store_true", help="overwrite --out")


def run(args) -> int:
    """Draw the curves.

    Raises:
        ValueError: a log cannot be read or has no validation, or the picture cannot be written.
    """
    if args.out.suffix.lower() != ".png":
        raise ValueError(f"--out {args.out} must end in .png")
    if args.out.exists() and not args.force:
        raise ValueError(f"--out {args.out} exists: use --force to overwrite it")
    runs = dict(zip(name_runs(args.logs), map(read_validations, args.logs), strict=True))
    partial = args.out.with_name(f".{args.out.name}.partial")
    try:
        try:
            draw(runs, partial)
            partial.replace(args.out)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write --out {args.out}: {error.strerror or error}") from error
    print(f"wrote {args.out}")
    return 0
