"""Draw the learning curves of one or several runs, and what came of them against its cost.

Curves are read from what fairseq-train prints with --log-format simple or json, on the terminal or to --log-file, or
from its --tensorboard-logdir. A resumed run is one curve; the time between stop and resumption is left out.

--results is a table of scores, one row for each model: CSV or TSV with a line of headings, or YAML, a list of
mappings with the same keys. Columns: name; a score (bleu, chrf, wer, perplexity or accuracy); parameters, as a number
such as 60915712 or 61M; speed, in any unit, which may stand behind the word. One of the last two may be missing. Rows
of the same name are joined by a line.

    name,bleu,parameters,speed (relative)
    Vanilla,27.13,61M,1.00
    Universal,27.65,63M,0.48

Examples:
    fairseq-sharing curves quickstart-run/train.log quickstart-run-transformer/train.log --out curves.png
    fairseq-sharing curves quickstart-run/tensorboard --out curves.png --out curves.svg
    fairseq-sharing curves --results scores.csv --out scores.png
"""

import csv
from dataclasses import dataclass
from pathlib import Path

HELP = "draw validation loss and perplexity against updates and time, and scores against parameters and speed"
SCORES = {
    "bleu": "BLEU",
    "chrf": "chrF",
    "wer": "WER (lower is better)",
    "perplexity": "perplexity (lower is better)",
    "accuracy": "accuracy",
}
UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}


@dataclass
class Result:
    """One model's score and cost.

    Attributes:
        name: the model's name; several results of one name are joined by a line.
        score: its score.
        parameters: its unique parameters, or None.
        speed: its speed, or None.
    """

    name: str
    score: float
    parameters: float | None
    speed: float | None


def read_results(path: Path) -> tuple[list[Result], str, str]:
    """Read a table of scores.

    Returns:
        The results, the name of the score and the name of the speed.

    Raises:
        ValueError: no such file, or not of the form that this module describes.
    """
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read --results {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--results {path} is no text in UTF-8") from None
    rows = parse_rows(path, text)
    found = {}
    for column in rows[0] if rows else ():
        words = column.lower().split()
        found.setdefault(words[0] if words else "", column)
    score = next((name for name in SCORES if name in found), None)
    if "name" not in found or score is None or not {"parameters", "speed"} & found.keys():
        raise ValueError(
            f"--results {path} needs columns name, one of {', '.join(SCORES)}, and parameters or speed; "
            f"it has {', '.join(rows[0]) if rows else 'no rows'}"
        )

    def number(row: dict, kind: str) -> float | None:
        if kind not in found:
            return None
        written = str(row.get(found[kind])).strip().replace("_", "")
        digits, unit = (written[:-1], UNITS[written[-1].lower()]) if written[-1:].lower() in UNITS else (written, 1)
        try:
            return float(digits) * unit
        except ValueError:
            raise ValueError(f"--results {path}: {found[kind]} of {row.get(found['name'])} is {written}") from None

    results = [
        Result(str(row[found["name"]]), number(row, score), number(row, "parameters"), number(row, "speed"))
        for row in rows
    ]
    return results, SCORES[score], found.get("speed", "speed")


def parse_rows(path: Path, text: str) -> list[dict]:
    """Return the rows of a CSV, TSV or YAML file.

    Raises:
        ValueError: the file has another ending or is not what its ending says.
    """
    kind = path.suffix.lower()
    if kind in (".yaml", ".yml"):
        import yaml

        try:
            rows = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"--results {path} is no YAML: {' '.join(str(error).split())}") from None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"--results {path} must be a list of mappings, one for each model")
        return [{str(key): value for key, value in row.items()} for row in rows]
    if kind not in (".csv", ".tsv"):
        raise ValueError(f"--results {path} must end in .csv, .tsv, .yaml or .yml")
    rows = list(csv.DictReader(text.splitlines(), delimiter="," if kind == ".csv" else "\t", skipinitialspace=True))
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise ValueError(f"--results {path}: line {number} has not as many fields as the headings")
    return rows


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


def draw(runs: dict, results: tuple | None, outs: list[str]) -> None:
    """Draw curves above, scores below; either may be missing."""
    from .picture import drawing, write_pictures

    timed = any(validation.minutes is not None for run in runs.values() for validation in run)
    costs = [kind for kind in ("parameters", "speed") if results and getattr(results[0][0], kind) is not None]
    rows = bool(runs) + bool(costs)
    columns = max(1 + timed if runs else 0, len(costs))
    with drawing() as pyplot:
        size = (5.6 if columns == 1 else 10, 4.2 * rows)
        figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, sharey="row")
        if runs:
            draw_curves(axes[0][: 1 + timed], runs)
        if costs:
            draw_results(axes[-1][: len(costs)], costs, *results)
        for row, used in ((0, 1 + timed if runs else len(costs)), (rows - 1, len(costs) or 1 + timed)):
            for axis in axes[row][used:]:
                axis.remove()
        write_pictures(figure, outs)


def draw_curves(axes, runs: dict) -> None:
    """Draw the runs: loss on the left axis, the same curve's perplexity on the right one."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    from .picture import STYLES

    in_bits = all(validation.in_bits for run in runs.values() for validation in run)
    for axis, quantity in zip(axes, ("updates", "minutes"), strict=False):
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
                axis.annotate(value, points[-1], xytext=(0, 24), textcoords="offset points", ha="right", color=color)
        axis.set_xlim(left=0)
        axis.set_xlabel("updates" if quantity == "updates" else "training time (minutes)")
    first, last = axes[0], axes[-1]
    first.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, steps=[1, 2, 5, 10]))
    first.set_ylabel("validation loss (bits per token)" if in_bits else "validation loss")
    for axis in axes if not in_bits else axes[:-1]:
        axis.spines["right"].set_visible(False)
    if in_bits:
        # The same scale, written as perplexity: ticks stay where the loss has them.
        perplexity = last.secondary_yaxis("right")
        perplexity.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{2**loss:.3g}"))
        perplexity.set_ylabel("validation perplexity")
    if len(runs) > 1:
        first.legend(frameon=False, handlelength=3.5)


def draw_results(axes, costs: list[str], results: list[Result], score: str, speed: str) -> None:
    """Draw the score against each cost; results of one name have one style."""
    from .picture import STYLES

    names = list(dict.fromkeys(result.name for result in results))
    for axis, cost in zip(axes, costs, strict=True):
        for number, name in enumerate(names):
            color, dashes, marker = STYLES[number % len(STYLES)]
            points = [
                (getattr(result, cost) / (1e6 if cost == "parameters" else 1), result.score)
                for result in results
                if result.name == name
            ]
            axis.plot(
                *zip(*points, strict=True),
                color=color,
                linestyle=dashes,
                marker=marker,
                markersize=8,
                markeredgecolor="white",
                linewidth=1.2,
                label=name,
            )
        axis.set_xlabel("unique parameters (millions)" if cost == "parameters" else speed)
        axis.margins(0.12)
        low, high = axis.dataLim.intervalx
        if high - low < 0.1 * high:  # what is nearly equal looks so
            axis.set_xlim(0, 1.2 * high)
        axis.spines["right"].set_visible(False)
    axes[0].set_ylabel(score)
    axes[-1].legend(frameon=False, handlelength=3, loc="best")


def add_arguments(parser) -> None:
    """Add the options of this subcommand."""
    from .picture import add_picture_arguments

    parser.add_argument(
        "logs", nargs="*", type=Path, metavar="LOG", help="log of fairseq-train or folder of TensorBoard, one per run"
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="table of scores to draw against parameters and speed: .csv, .tsv, .yaml",
    )
    add_picture_arguments(parser, required=True)


def run(args) -> None:
    """Draw the curves and the results.

    Raises:
        ValueError: a log or the table cannot be read or has nothing to draw, or the picture cannot be written.
    """
    from .logs import read_validations
    from .picture import check_pictures

    check_pictures(args.out, args.force)
    if not args.logs and args.results is None:
        raise ValueError("there is nothing to draw: give logs, or --results")
    results = None if args.results is None else read_results(args.results)
    names = name_runs(args.logs) if args.logs else []
    runs = dict(zip(names, map(read_validations, args.logs), strict=True))
    draw(runs, results, args.out)
    print(*(f"wrote {out}" for out in args.out), sep="\n")
