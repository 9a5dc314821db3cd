"""What the pictures of `curves` and `compare` have in common: colours, how they are checked for and written."""

import contextlib
import logging
from pathlib import Path

# Okabe and Ito's colours without yellow, which is faint on paper. Dashes and markers tell the curves apart in grey.
STYLES = [
    ("#0072B2", "-", "o"),
    ("#D55E00", "--", "s"),
    ("#009E73", "-.", "^"),
    ("#CC79A7", ":", "D"),
    ("#000000", (0, (5, 1, 1, 1, 1, 1)), "v"),
    ("#56B4E9", (0, (8, 2)), "P"),
    ("#E69F00", (0, (1, 2)), "X"),
    ("#7F7F7F", (0, (3, 1, 1, 1)), "<"),
]
FORMATS = (".png", ".svg")
SETTINGS = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "hatch.linewidth": 0.8,
    "svg.hashsalt": "fairseq_sharing",  # the same picture is the same file
}


def add_picture_arguments(parser, required: bool) -> None:
    """Add --out, which may be given twice, and --force."""
    parser.add_argument(
        "--out",
        action="append",
        required=required,
        default=None if required else [],
        metavar="FILE",
        help="picture to write, ending in .png or .svg; may be given several times",
    )
    parser.add_argument("--force", action="store_true", help="overwrite --out")


def check_pictures(outs: list[str], force: bool) -> None:
    """Refuse pictures that could not be written, before any work is done.

    Raises:
        ValueError: a name has another ending, is there already, or has no folder.
    """
    from .files import check_output

    for out in map(str, outs):
        if Path(out).suffix.lower() not in FORMATS:
            raise ValueError(f"--out {out} must end in {' or '.join(FORMATS)}")
        check_output(out, force, "--out")


@contextlib.contextmanager
def drawing():
    """Give pyplot without a window, in this package's style."""
    # Importing fairseq opens the root logger, and matplotlib tells it about every font it looks at.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(SETTINGS):
        try:
            yield pyplot
        finally:
            pyplot.close("all")


def write_pictures(figure, outs: list[str]) -> None:
    """Write a figure in the format that each name ends in.

    Raises:
        ValueError: a file could not be written; nothing is left behind of it.
    """
    from .files import write_atomically

    for out in map(str, outs):
        kind = Path(out).suffix.lower()[1:]
        metadata = {"Date": None} if kind == "svg" else None
        write_atomically(
            out,
            lambda to, kind=kind, metadata=metadata: figure.savefig(to, dpi=150, format=kind, metadata=metadata),
        )


def wrap_name(name: str, width: int) -> str:
    """Break a name at its underscores, slashes and blanks into lines of at most so many characters, where it can be."""
    lines = [""]
    for part in name.replace("_", "_\0").replace("/", "/\0").replace(" ", " \0").split("\0"):
        if lines[-1] and len(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip(" ") for line in lines)
