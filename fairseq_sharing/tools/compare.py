r"""Compare what models cost, side by side: architectures with flags of fairseq-train, checkpoints, or a YAML file.

The YAML file names configurations; each has an arch with flags of fairseq-train, or the path of a checkpoint:

    Vanilla:     {arch: transformer, share_all_embeddings: true}
    CYCLE (REV): {arch: transformer_shared_cycle_rev, encoder_layers: 12, share_all_embeddings: true}
    trained:     {path: checkpoints/checkpoint_best.pt}

--equal depth gives every architecture the N layers of the first model. --equal parameters gives every one the width
whose unique parameters are closest to the first model's, --match-params does so for Universal alone (M = 1) and any
number of parameters. Widths then are multiples of the attention heads, whose number stays, and of 8; the FFN keeps
its ratio to the width, rounded to a whole number.

Examples:
    fairseq-sharing compare transformer transformer_shared_universal transformer_shared_cycle_rev \
        --share-all-embeddings --out compare.png --out compare.svg
    fairseq-sharing compare transformer transformer_shared_universal --share-all-embeddings --match-params transformer
    fairseq-sharing compare models.yaml --equal depth --markdown
"""

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

from .show import (
    PASSES_ON,  # noqa: F401
    add_measuring_arguments,
    check_sentences,
    format_lengths,
    format_megabytes,
    saves_projections,
)

HELP = "compare the parameters, memory and FLOPs of several models, with a picture"
UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
STEP = 8  # widths are multiples of it
WIDEST = 2**17
# Colour and hatch of each component in the stacked bars; hatches tell them apart in grey.
COMPONENTS = {
    "convolutions": ("#56B4E9", ""),
    "embeddings": ("#0072B2", ""),
    "encoder": ("#E69F00", "//"),
    "decoder": ("#D55E00", "\\\\"),
    "norms": ("#000000", ""),
    "head": ("#009E73", ".."),
    "other": ("#999999", ""),
}


def add_arguments(parser) -> None:
    """Add what to compare, how, and where to draw it."""
    from .picture import add_picture_arguments

    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="architectures, checkpoints (.pt) or YAML files of named configurations; flags of fairseq-train may "
        "follow and hold for all architectures",
    )
    equal = parser.add_mutually_exclusive_group()
    equal.add_argument(
        "--equal", choices=["depth", "parameters"], help="give all architectures the depth or size of the first model"
    )
    equal.add_argument(
        "--match-params",
        metavar="P",
        help="widen or narrow Universal to P unique parameters: a number such as 61M, or the name of another model",
    )
    add_measuring_arguments(parser)
    add_picture_arguments(parser, required=False)


@dataclass
class Entry:
    """One configuration to compare.

    Attributes:
        name: what the table calls it.
        arch: its architecture, or None for a checkpoint.
        flags: flags of fairseq-train.
        path: its checkpoint, or None.
        vocab_size: symbols in each dictionary, or None.
        data: a folder with dictionaries, or None.
        subject: the model, once it is built.
        notes: what was changed to make it equal to others.
    """

    name: str
    arch: str | None = None
    flags: list[str] = field(default_factory=list)
    path: str | None = None
    vocab_size: int | None = None
    data: str | None = None
    subject: object = None
    notes: list[str] = field(default_factory=list)

    def build(self, *more: str) -> None:
        """Build the model, with these flags in addition.

        Raises:
            ValueError: with the entry's name, where something is wrong with it.
        """
        from . import model

        try:
            if self.path is not None:
                self.subject = model.read_checkpoint(self.path, self.name)
            else:
                self.flags = [*self.flags, *more]
                self.subject = model.read_architecture(self.arch, self.flags, self.vocab_size, self.data, self.name)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.subject.model.parameters())


def read_entries(args) -> list[Entry]:
    """Return what is to be compared, with names that tell the entries apart.

    Raises:
        ValueError: a file cannot be read, or a configuration has no arch and no path.
    """
    entries = []
    for word in args.models:
        if Path(word).suffix.lower() in (".yaml", ".yml"):
            entries += read_yaml(Path(word))
        elif Path(word).suffix == ".pt" or Path(word).is_file():
            entries.append(Entry(word, path=word))
        else:
            entries.append(Entry(word, arch=word))
    for entry in entries:
        if entry.path is None:
            entry.flags += args.extra
            if args.vocab_size is not None:
                entry.vocab_size, entry.data = args.vocab_size, None
            if args.data is not None:
                entry.vocab_size, entry.data = None, args.data
    if args.extra and all(entry.path is not None for entry in entries):
        raise ValueError(f"{args.extra[0]} is a flag of architectures, and only checkpoints are compared")
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is given twice: give different configurations different names in a YAML file")
    return entries


def read_yaml(path: Path) -> list[Entry]:
    """Read named configurations.

    Raises:
        ValueError: no such file, no YAML, or not of the form that this module describes.
    """
    import yaml

    try:
        named = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(named, dict) or not named or not all(isinstance(each, dict) for each in named.values()):
        raise ValueError(f"{path} must name configurations, such as 'Vanilla: {{arch: transformer}}'")
    entries = []
    for name, values in named.items():
        values = dict(values)
        arch, checkpoint = values.pop("arch", None), values.pop("path", None)
        if (arch is None) == (checkpoint is None):
            raise ValueError(f"{path}: {name} needs either arch or path")
        if checkpoint is not None and values:
            raise ValueError(f"{path}: {name} is a checkpoint and takes no {next(iter(values))}")
        entry = Entry(str(name), arch, path=checkpoint and str(checkpoint))
        entry.vocab_size, entry.data = values.pop("vocab_size", None), values.pop("data", None)
        for key, value in values.items():
            if isinstance(value, dict):
                raise ValueError(f"{path}: {key} of {name} must be one value")
            flag = "--" + str(key).replace("_", "-")
            if value is True:
                entry.flags.append(flag)
            elif value not in (False, None):
                entry.flags += [flag, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
        entries.append(entry)
    return entries


def make_equally_deep(entries: list[Entry]) -> None:
    """Give every other entry the number of layers of the first.

    Raises:
        ValueError: a checkpoint, or an architecture with other stacks, cannot be given them.
    """
    from .model import stacks_of

    depths = {stack: len(layers) for stack, layers in stacks_of(entries[0].subject.model).items()}
    for entry in entries[1:]:
        own = {stack: len(layers) for stack, layers in stacks_of(entry.subject.model).items()}
        if own == depths:
            continue
        if entry.path is not None or own.keys() != depths.keys():
            raise ValueError(f"--equal depth: {entry.name} has layers {own}, {entries[0].name} has {depths}")
        entry.build(*(word for stack, depth in depths.items() for word in (f"--{stack}-layers", str(depth))))
        entry.notes.append(f"{entry.name}: N = {depths} as {entries[0].name}, in place of {own}")


def read_budget(text: str, entries: list[Entry]) -> int:
    """Read --match-params: a number such as 61M, or the name of an entry.

    Raises:
        ValueError: it is neither.
    """
    for entry in entries:
        if entry.name == text:
            return entry.size()
    number, unit = (text[:-1], UNITS[text[-1].lower()]) if text[-1:].lower() in UNITS else (text, 1)
    try:
        budget = round(float(number.replace(",", "").replace("_", "")) * unit)
    except (ValueError, OverflowError):
        budget = 0
    if budget < 1:
        raise ValueError(f"--match-params {text} is neither a number of parameters nor the name of a model here")
    return budget


def is_universal(entry: Entry) -> bool:
    """Whether all layers of each stack use one set."""
    from .model import sharing_of, stacks_of

    sharings = [sharing_of(layers) for layers in stacks_of(entry.subject.model).values()]
    return all(len(set(sharing.assignment)) == 1 for sharing in sharings) and any(each.shares for each in sharings)


def match_width(entry: Entry, budget: int) -> None:
    """Give an architecture the width whose unique parameters are closest to the budget.

    Raises:
        ValueError: it is a checkpoint, its stacks differ in width, or even the narrowest has more parameters.
    """
    if entry.path is not None:
        raise ValueError(f"{entry.name} is a checkpoint and cannot be given another width")
    from .cost import describe_stack
    from .model import stacks_of

    stacks = {stack: describe_stack(layers) for stack, layers in stacks_of(entry.subject.model).items()}
    widths = sorted({each["width"] for each in stacks.values()})
    if len(widths) > 1:
        raise ValueError(f"{entry.name} has stacks of widths {widths[0]} and {widths[1]}: match them by hand")
    step = math.lcm(STEP, *(each["heads"] for each in stacks.values()))
    config, flags, sizes = entry.subject.config, list(entry.flags), {}

    def resize(width: int) -> int:
        more = []
        for stack, each in stacks.items():
            ffn = round(each["ffn"] * width / widths[0])
            more += [f"--{stack}-embed-dim", str(width), f"--{stack}-ffn-embed-dim", str(ffn)]
        if list(stacks) == ["decoder"]:  # a language model's embeddings are as wide as its layers unless factorised
            for name in ("decoder_input_dim", "decoder_output_dim"):
                if getattr(config, name) == widths[0]:
                    more += ["--" + name.replace("_", "-"), str(width)]
        if width not in sizes:
            entry.flags = flags
            entry.build(*more)
            sizes[width] = entry.size()
        return sizes[width]

    narrow, wide = 1, max(2, widths[0] // step)
    while resize(wide * step) < budget:
        if wide * step > WIDEST:
            raise ValueError(f"{entry.name} would have to be wider than {WIDEST} for {budget:,} parameters")
        narrow, wide = wide, wide * 2
    if resize(narrow * step) > budget:
        raise ValueError(
            f"{entry.name} has {sizes[step]:,} parameters at its least width {step} already, and should have {budget:,}"
        )
    while wide - narrow > 1:
        middle = (narrow + wide) // 2
        narrow, wide = (middle, wide) if resize(middle * step) <= budget else (narrow, middle)
    best = min((narrow * step, wide * step), key=lambda width: abs(sizes[width] - budget))
    del sizes[best]  # to build it again
    found = resize(best)
    stack = describe_stack(next(iter(stacks_of(entry.subject.model).values())))
    entry.notes.append(
        f"{entry.name}: width {widths[0]} -> {best} (FFN {stack['ffn']}, {stack['heads']} heads), "
        f"{found:,} parameters for {budget:,} ({(found - budget) / budget:+.1%}); widths are multiples of {step}"
    )


def make_equal(entries: list[Entry], args) -> None:
    """Change the entries as --equal or --match-params asks.

    Raises:
        ValueError: they cannot be.
    """
    from .progress import progress

    if args.equal == "depth":
        make_equally_deep(entries)
    elif args.equal == "parameters":
        budget = entries[0].size()
        for entry in progress([each for each in entries[1:] if each.size() != budget], "matching widths"):
            match_width(entry, budget)
    elif args.match_params is not None:
        budget = read_budget(args.match_params, entries)
        universal = [entry for entry in entries if is_universal(entry) and entry.name != args.match_params]
        if not universal:
            raise ValueError(
                f"--match-params {args.match_params} needs a Universal model (M = 1), and none is compared"
            )
        for entry in progress(universal, "matching widths"):
            match_width(entry, budget)


def run(args) -> None:
    """Print the table and draw the picture.

    Raises:
        ValueError: a model does not exist, or cannot be made equal.
    """
    from .cost import measure
    from .picture import check_pictures
    from .progress import progress

    check_pictures(args.out, args.force)
    check_sentences(args)
    from .files import quiet_log

    with quiet_log():
        entries = read_entries(args)
        for entry in entries:
            entry.build()
        make_equal(entries, args)
        figures = [
            measure(entry.subject, args.source_length, args.target_length, args.activation_memory)
            for entry in progress(entries, "measuring")
        ]
    notes = [note for entry in entries for note in entry.notes]
    if args.json:
        print(json.dumps({"models": [each.as_json() for each in figures], "notes": notes}, indent=2))
    else:
        print("\n".join([format_comparison(figures, args.markdown), *notes]))
    if args.out:
        draw(figures, args.out)
        print(*(f"wrote {out}" for out in args.out), sep="\n", file=sys.stderr if args.json else sys.stdout)


def format_comparison(figures: list, markdown: bool = False) -> str:
    """Return the table: a column for each model, and below it what all have in common."""
    from tabulate import tabulate

    from .picture import wrap_name

    components = [name for name in COMPONENTS if any(each.parameters.get(name, {}).get("unique") for each in figures)]
    rows = []
    for stack in ("encoder", "decoder"):
        if any(stack in each.stacks for each in figures):
            found = [each.stacks.get(stack) for each in figures]
            rows.append([f"{stack}: N / M", *(f"{s['layers']} / {s['parameter_sets']}" if s else "" for s in found)])
            rows.append([f"{stack}: width / FFN", *(f"{s['width']} / {s['ffn']}" if s else "" for s in found)])
    for name in components:
        rows.append([f"{name}", *(f"{each.parameters.get(name, {}).get('unique', 0):,}" for each in figures)])
    rows.append(["unique parameters", *(f"{each.unique:,}" for each in figures)])
    rows.append(["without sharing", *(f"{each.unshared:,}" for each in figures)])
    rows.append(["MFLOPs per token", *("?" if f.flops is None else f"{f.total_flops / 1e6:,.1f}" for f in figures)])
    for precision in ("fp32", "--fp16"):
        memory = (sum(each.memory[precision].values()) for each in figures)
        rows.append([f"training, {precision} (MB)", *map(format_megabytes, memory)])
    rows.append(
        ["of it Adam, fp32 (MB)", *(format_megabytes(each.memory["fp32"]["Adam's moments"]) for each in figures)]
    )
    rows.append(["all-reduced, fp32 (MB)", *(format_megabytes(each.all_reduced["fp32"]) for each in figures)])
    rows.append(["checkpoint, model (MB)", *(format_megabytes(each.checkpoint["model"]) for each in figures)])
    rows.append(["checkpoint, whole (MB)", *(format_megabytes(each.checkpoint["with optimizer"]) for each in figures)])
    if any(each.activations is not None for each in figures):
        name = f"activations, B={figures[0].sentences} (MB)"
        rows.append([name, *(format_megabytes(each.activations) for each in figures)])
    names = [each.name if markdown else wrap_name(each.name, 16) for each in figures]
    vocabularies = {each.vocabulary for each in figures}
    if len(vocabularies) > 1:
        rows.insert(0, ["V", *(" / ".join(f"{size:,}" for size in sorted(set(f.vocabulary))) for f in figures)])
    corner = (
        f"V={figures[0].vocabulary[0]:,}" if len(vocabularies) == 1 and len(set(figures[0].vocabulary)) == 1 else ""
    )
    table = tabulate(
        rows,
        [corner, *names],
        tablefmt="github" if markdown else "simple",
        disable_numparse=True,
        colalign=("left", *["right"] * len(figures)),
    )
    saved = "Sharing saves parameters, and what goes with them; each of N layers is computed all the same"
    if any(map(saves_projections, figures)):
        saved += ", but for\nkeys and values of the encoder output, which are computed once for each parameter set"
    lengths = sorted({format_lengths(each.lengths, "convolutions" in each.parameters) for each in figures})
    return "\n".join(
        [
            table,
            "",
            f"{saved}.",
            f"FLOPs: forward pass of training over {' or '.join(lengths)}, per target token; a multiply-add is two.",
        ]
    )


def draw(figures: list, outs: list[str]) -> None:
    """Draw bars of unique parameters by component, and unique parameters against FLOPs."""
    from .picture import STYLES, drawing, wrap_name, write_pictures

    largest = max(each.unique for each in figures) / 1e6
    known = any(each.flops is not None for each in figures)
    with drawing() as pyplot:
        height = max(3.4, 1.2 + 0.52 * len(figures))
        panels = 2 if known else 1
        widths = [1.45, 1][:panels]
        figure, axes = pyplot.subplots(
            1,
            panels,
            figsize=(6.2 + 3.9 * (panels - 1), height),
            layout="constrained",
            squeeze=False,
            width_ratios=widths,
        )
        bars = axes[0][0]
        ends = [0.0] * len(figures)
        names = [wrap_name(each.name, 24) for each in figures]
        for component, (color, hatch) in COMPONENTS.items():
            sizes = [each.parameters.get(component, {}).get("unique", 0) / 1e6 for each in figures]
            if sum(sizes) < 0.002 * largest:
                continue  # would not be seen, as LayerNorms never are
            bars.barh(
                range(len(figures)),
                sizes,
                left=ends,
                height=0.62,
                color=color,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.8,
                label=component,
            )
            ends = [end + size for end, size in zip(ends, sizes, strict=True)]
        for place, each in enumerate(figures):
            bars.annotate(
                f"{each.unique / 1e6:,.1f}",
                (ends[place], place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
            )
        bars.set_yticks(range(len(figures)), names)
        bars.invert_yaxis()
        bars.set_xlim(0, 1.13 * largest)
        bars.set_xlabel("unique parameters (millions)")
        bars.grid(axis="y", visible=False)
        bars.spines["right"].set_visible(False)
        bars.legend(frameon=False, ncols=6, loc="lower left", bbox_to_anchor=(-0.02, 1), handlelength=1.6)
        if known:
            draw_points(axes[0][1], bars, figures, STYLES)
            figure.get_layout_engine().set(wspace=0.06)
        write_pictures(figure, outs)


def draw_points(axis, bars, figures: list, styles: list) -> None:
    """Draw unique parameters against FLOPs; the marker of each model also stands behind its bar.

    Models that cost the same lie on each other: the first ones are larger.
    """
    known = [each for each in figures if each.flops is not None]
    for place, each in enumerate(figures):
        if each.flops is None:
            continue
        color, _, marker = styles[place % len(styles)]
        style = {"color": color, "marker": marker, "markeredgecolor": "white", "linestyle": "none"}
        x, y = each.unique / 1e6, each.total_flops / 1e6
        axis.plot(x, y, markersize=14 - 7 * place / len(figures), clip_on=False, **style)
        bars.plot(1.03, place, markersize=10, clip_on=False, transform=bars.get_yaxis_transform(), **style)
    axis.set_xlim(0, 1.15 * max(each.unique for each in known) / 1e6)
    axis.set_ylim(0, 1.15 * max(each.total_flops for each in known) / 1e6)
    axis.set_xlabel("unique parameters (millions)")
    axis.set_ylabel("forward MFLOPs per token")
    axis.spines["right"].set_visible(False)
