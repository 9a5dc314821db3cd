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
import sys

from .show import (
    PASSES_ON,  # noqa: F401
    add_measuring_arguments,
    check_sentences,
    format_lengths,
    format_megabytes,
    saves_projections,
)

HELP = "compare the parameters, memory and FLOPs of several models, with a picture"


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


def run(args) -> None:
    """Print the table and draw the picture.

    Raises:
        ValueError: a model does not exist, or cannot be made equal.
    """
    from .configurations import read_entries
    from .cost import measure
    from .cost_picture import draw
    from .equal_sizes import make_equal
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
    from .sizes import COMPONENTS

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
