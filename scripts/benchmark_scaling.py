"""Measure and draw how time and memory grow with N at the same M, with M at the same N, with width and with length.

Each point is a model that shares layers (CYCLE (REV)) and fairseq's Transformer of the same depth, in processes of
their own that take turns (see benchmark.py): the median of a training step, the bytes of parameters, gradients and
Adam, and the median of a beam search. Seconds are those of the processor, on a GPU of the clock. One picture for each.

    python scripts/benchmark_scaling.py --out results      results.json, results-N.png, -M.png, -width.png, -length.png
    python scripts/benchmark_scaling.py --grow N --values 6 12 18 24 --sets 6 --out results
"""

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path

import benchmark

VALUES = {  # what grows -> its values, and how the axis calls it
    "N": ((3, 6, 9, 12), "layers of each stack, N"),
    "M": ((1, 2, 3, 6), "parameter sets of each stack, M"),
    "width": ((128, 256, 384, 512), "width"),
    "length": ((10, 20, 40, 80), "length of source and target"),
}
MODELS = {"cycle_rev": "CYCLE (REV)", "stock": "fairseq, nothing shared"}
PANELS = {"step": "training step (s)", "memory": "parameters, gradients, Adam (MB)", "decoding": "decoding (s)"}


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grow", nargs="+", choices=VALUES, default=list(VALUES), help="only these")
    parser.add_argument("--values", nargs="+", type=int, metavar="X", help="of the one that --grow names")
    parser.add_argument("--layers", type=int, default=6, metavar="N", help="where N does not grow (default: 6)")
    parser.add_argument("--sets", type=int, default=3, metavar="M", help="where M does not grow (default: 3)")
    parser.add_argument("--width", type=int, default=512, metavar="C", help="where it does not grow (default: 512)")
    parser.add_argument("--length", type=int, default=30, metavar="T", help="where it does not grow (default: 30)")
    parser.add_argument("--sentences", type=int, default=8, metavar="B", help="in a batch (default: 8)")
    parser.add_argument("--vocab-size", type=int, default=8000, metavar="V", help="symbols (default: 8,000)")
    parser.add_argument("--turns", type=int, default=5, help="of each model (default: 5)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", required=True, metavar="NAME", help="write NAME.json and NAME-*.png")
    args = parser.parse_args(arguments)
    if args.values and len(args.grow) != 1:
        parser.error(f"--values goes with one --grow, not with {' '.join(args.grow)}")
    for name in args.grow:
        for value in args.values or VALUES[name][0]:
            try:
                benchmark.parse_arguments(words_of(name, value, args))
            except SystemExit:
                parser.error(f"--grow {name} cannot be {value}")
    return args


def words_of(name: str, value: int, args) -> list[str]:
    """Return the arguments of benchmark.py for one point."""
    now = {"N": args.layers, "M": args.sets, "width": args.width, "length": args.length, name: value}
    batch = f"{args.sentences}x{now['length']}"
    return [
        *("--layers", str(now["N"]), "--sets", str(now["M"]), "--width", str(now["width"]), "--batch", batch),
        *("--decode", batch, "--vocab-size", str(args.vocab_size), "--turns", str(args.turns)),
        *("--device", args.device),
    ]


def measure(name: str, value: int, args) -> dict[str, dict[str, float]]:
    """Return what a point has for each model: seconds of a training step and of decoding, megabytes."""
    point = benchmark.parse_arguments(words_of(name, value, args))
    found = {model: {} for model in MODELS}

    def time(method: str, what: str, processes: dict) -> None:
        tasks = {model: partial(process.time, method, args.device) for model, process in processes.items()}
        for model, turns in benchmark.take_turns(tasks, args.turns).items():
            found[model][what] = statistics.median(turn["cpu" if args.device == "cpu" else "wall"] for turn in turns)

    arguments = {model: (model, point) for model in MODELS}
    with benchmark.in_processes(benchmark.Training, arguments) as processes:
        time("run", "step", processes)
        for model, process in processes.items():
            found[model]["memory"] = process.call("state_bytes") / 1e6
    with benchmark.in_processes(benchmark.Decoding, arguments) as processes:
        for process in processes.values():
            process.call("prepare", *benchmark.sizes(point.decode[0]))
        time("translate", "decoding", processes)
    return found


def draw(name: str, points: dict[int, dict], path: Path) -> None:
    """Draw time and memory of both models against what grows."""
    from fairseq_sharing.tools.picture import STYLES, drawing, write_pictures

    with drawing() as pyplot:
        figure, axes = pyplot.subplots(1, len(PANELS), figsize=(10, 3.4), layout="constrained")
        for axis, (what, label) in zip(axes, PANELS.items(), strict=True):
            for (model, title), (color, dashes, marker) in zip(MODELS.items(), STYLES, strict=False):
                values = [point[model][what] for point in points.values()]
                axis.plot(list(points), values, color=color, linestyle=dashes, marker=marker, label=title)
            axis.set_xlabel(VALUES[name][1])
            axis.set_title(label, fontsize=10)
            axis.set_xticks(list(points))
            axis.set_ylim(bottom=0)
        axes[0].legend(frameon=False, handlelength=3)
        write_pictures(figure, [str(path)])


def main(arguments=None) -> None:
    args = parse_arguments(arguments)
    found = {}
    for name in args.grow:
        found[name] = {}
        for value in args.values or VALUES[name][0]:
            found[name][value] = measure(name, value, args)
            print(name, value, json.dumps(found[name][value]), file=sys.stderr, flush=True)
        draw(name, found[name], Path(f"{args.out}-{name}.png"))
    text = json.dumps({"settings": benchmark.describe_settings(args), "points": found}, indent=1)
    Path(f"{args.out}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
