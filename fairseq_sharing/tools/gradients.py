"""Draw how large a gradient each layer contributes, from the log of a training with --log-layer-gradient-norms.

One panel for each stack: the median over the logged updates against the layer, and the range from the tenth to the
ninetieth percentile. Layers that share parameters carry the number of their set.

Example:
    fairseq-sharing gradients train.log --out gradients.png
"""

import json
import logging
import re
import statistics
from pathlib import Path

from .logs import JSON_LINE, read_lines

HELP = "draw the gradient norm of each layer, from a log with --log-layer-gradient-norms"

SIMPLE = re.compile(r"\bgnorm_(\w+)_(\d+)=([-+.\deE]+)")
JSON_NAME = re.compile(r"^gnorm_(\w+)_(\d+)$")
PICTURE = re.compile(r"(\w+): \d+ layers? from \d+ parameter sets? \([^)]*\): (\d+(?: \d+)*)")
COLOR = "#0072B2"  # of Okabe and Ito's palette


def read_norms(path: Path) -> tuple[dict[str, dict[int, list[float]]], dict[str, list[str]]]:
    """Read a log of either format, plain or .xz.

    Returns:
        stack -> layer -> norms in the order of updates, and stack -> the parameter set of each layer where it says so.

    Raises:
        ValueError: no such file, or no layer's gradient norm in it.
    """
    norms, sets = {}, {}
    for line in read_lines(path):
        if picture := PICTURE.search(line):
            sets[picture[1]] = picture[2].split()
        for stack, layer, value in read_line(line):
            norms.setdefault(stack, {}).setdefault(int(layer), []).append(float(value))
    if not norms:
        raise ValueError(f"{path} has no gradient norm of a layer: train with --log-layer-gradient-norms")
    return norms, sets


def read_line(line: str) -> list[tuple[str, str, str]]:
    """Return stack, layer and norm of every entry in a line of training; summaries and validations have none."""
    record = JSON_LINE.search(line)
    if not record:
        return SIMPLE.findall(line)
    try:
        values = json.loads(record[0])
    except ValueError:
        return []
    return [(*match.groups(), value) for key, value in values.items() if (match := JSON_NAME.match(key))]


def draw(norms: dict, sets: dict, out: str, format: str) -> None:
    """Draw one panel for each stack."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells importing programs about every font
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    widest = max(map(len, norms.values()))
    with pyplot.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(
            1, len(norms), figsize=(max(3.6, 1.6 + 0.3 * widest) * len(norms), 3.6), layout="constrained", squeeze=False
        )
        for axis, (stack, layers) in zip(axes[0], norms.items(), strict=True):
            numbers = sorted(layers)
            middle = [statistics.median(layers[number]) for number in numbers]
            low, high = zip(*(percentiles(layers[number]) for number in numbers), strict=True)
            positions = [number + 1 for number in numbers]
            axis.fill_between(positions, low, high, color=COLOR, alpha=0.2, linewidth=0)
            axis.plot(positions, middle, color=COLOR, marker="o", markersize=5)
            axis.set_ylim(bottom=0)
            named = sets.get(stack, [])
            axis.set_xticks(positions, [label(number, named) for number in numbers])
            axis.set_xlabel("layer, and its parameter set" if named else "layer")
            axis.set_title(stack)
            axis.grid(axis="y", color="#dddddd")
        axes[0][0].set_ylabel("gradient norm")
        figure.savefig(out, dpi=150, format=format)
        pyplot.close(figure)


def label(number: int, sets: list[str]) -> str:
    return f"{number + 1}\n{sets[number]}" if number < len(sets) else str(number + 1)


def percentiles(values: list[float]) -> tuple[float, float]:
    """Return the tenth and the ninetieth percentile."""
    if len(values) == 1:
        return values[0], values[0]
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def add_arguments(parser) -> None:
    """Add the options of this subcommand."""
    parser.add_argument("log", type=Path, metavar="LOG", help="log of fairseq-train, simple or json")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="picture to write, .png or .svg")
    parser.add_argument("--force", action="store_true", help="overwrite --out")


def run(args) -> int:
    """Draw the norms.

    Raises:
        ValueError: the log cannot be read or holds no norms, or the picture cannot be written.
    """
    from .files import check_output, write_atomically

    format = args.out.suffix.lower().lstrip(".")
    if format not in ("png", "svg"):
        raise ValueError(f"--out {args.out} must end in .png or .svg")
    check_output(str(args.out), args.force)
    norms, sets = read_norms(args.log)
    write_atomically(str(args.out), lambda temporary: draw(norms, sets, temporary, format))
    print(f"wrote {args.out}")
    return 0
