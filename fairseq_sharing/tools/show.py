"""Show which layer uses which parameter set and what the model costs, without data and without training.

Sharing saves parameters, and with them memory for weights, gradients and the optimizer, the size of checkpoints and
what workers exchange. The computation is that of N layers, but for keys and values of the encoder output. fairseq's own
Transformers can be shown beside.

Examples:
    fairseq-sharing show --arch transformer_shared_cycle_rev --share-all-embeddings
    fairseq-sharing show --arch transformer_shared_cycle --encoder-layers 9 --encoder-unique-layers 3 --vocab-size 8000
    fairseq-sharing show --arch transformer_lm_shared_sequence_wiki103 --vocab-size 267744 --target-length 2048
    fairseq-sharing show --arch s2t_transformer_shared_sequence_librispeech --data data-s2t --activation-memory 8
    fairseq-sharing show --arch albert_encoder_base --vocab-size 30000 --sharing-parts attention --markdown
    fairseq-sharing show --path checkpoints/checkpoint_best.pt --json
"""

import json

HELP = "show the assignment, parameters, memory and FLOPs of an architecture or a checkpoint"
PASSES_ON = True  # whatever the command does not know is a flag of fairseq-train
MEGABYTE = 10**6


def add_arguments(parser) -> None:
    """Add the two ways to name a model, and what to show of it."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--arch", metavar="ARCH", help="an architecture; flags of fairseq-train may follow")
    what.add_argument("--path", metavar="FILE", help="a checkpoint")
    add_measuring_arguments(parser)


def add_measuring_arguments(parser) -> None:
    """Add the flags that `show` and `compare` have in common."""
    vocabulary = parser.add_mutually_exclusive_group()
    vocabulary.add_argument(
        "--vocab-size",
        type=int,
        metavar="V",
        help="symbols in each dictionary, special symbols included (with --arch; default: 32768, as in the paper)",
    )
    vocabulary.add_argument("--data", metavar="DIR", help="take the dictionaries of this data folder (with --arch)")
    parser.add_argument(
        "--source-length",
        type=int,
        metavar="S",
        help="tokens of the source, or frames of audio, for FLOPs and activations (default: 32; speech: 1000)",
    )
    parser.add_argument(
        "--target-length",
        type=int,
        metavar="T",
        help="tokens of the target, or of the only text (default: 32; language models: 512)",
    )
    parser.add_argument(
        "--activation-memory",
        type=int,
        metavar="B",
        help="also follow one training step of B sentences and tell the peak of the activations: fp32, unfused "
        "attention, without weights and their gradients, as shapes only",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print everything as JSON; bytes and FLOPs are not rounded")
    how.add_argument("--markdown", action="store_true", help="print tables in Markdown")


def run(args) -> None:
    """Print the report.

    Raises:
        ValueError: what was asked for does not exist or contradicts itself.
    """
    from . import model
    from .cost import measure
    from .files import quiet_log

    with quiet_log():
        check_sentences(args)
        if args.path is not None:
            for flag, given in (("--vocab-size", args.vocab_size), ("--data", args.data)):
                args.extra += [flag] if given is not None else []
            if args.extra:
                raise ValueError(f"--path takes no further flags: {' '.join(args.extra)}")
            subject = model.read_checkpoint(args.path)
        else:
            subject = model.read_architecture(args.arch, args.extra, args.vocab_size, args.data)
        figures = measure(subject, args.source_length, args.target_length, args.activation_memory)
    print(json.dumps(figures.as_json(), indent=2) if args.json else format_report(figures, args.markdown))


def check_sentences(args) -> None:
    """Refuse an empty batch."""
    if args.activation_memory is not None and args.activation_memory < 1:
        raise ValueError(f"--activation-memory {args.activation_memory} must be at least 1 sentence")


def format_stacks(stacks: dict[str, dict]) -> list[str]:
    """Return the picture of each stack."""
    from ..sharing import Sharing

    lines = []
    for stack, each in stacks.items():
        sharing = Sharing(tuple(each["assignment"]), tuple(each["parts"]))
        if not sharing.shares:
            lines.append(f"{stack}: {sharing.depth}, each with its own parameters")
            continue
        parts = "" if sharing.parts == ("attention", "ffn", "norm") else f", sharing only {', '.join(sharing.parts)}"
        lines.append(f"{stack}: {sharing.depth}{parts}")
        width = len(str(each["layers"] - 1))
        lines.append("  layer " + " ".join(f"{index:>{width}}" for index in range(each["layers"])))
        lines.append("  set   " + " ".join(f"{number:>{width}}" for number in sharing.assignment))
    return lines


def format_lengths(lengths: tuple[int, int], speech: bool) -> str:
    """Return what FLOPs are for."""
    source, target = lengths
    if source and target:
        return f"{source:,} {'frames of audio' if speech else 'tokens of source'} and {target:,} tokens of target"
    return f"{source or target:,} tokens"


def format_report(figures, markdown: bool = False) -> str:
    """Return the picture of each stack, the tables, and in words what sharing saves."""
    from tabulate import tabulate

    style = {"tablefmt": "github" if markdown else "simple", "disable_numparse": True}
    source, target = figures.vocabulary
    vocabulary = f"V={source:,}" if source == target else f"V={source:,} and {target:,}"
    picture = format_stacks(figures.stacks)
    lines = [f"### {figures.name}" if markdown else figures.name, ""]
    lines += ["```", *picture, "```"] if markdown else picture

    flops = figures.flops or {}
    rows = [
        [
            label(component, row),
            f"{row['unique']:,}",
            f"{row['without sharing']:,}",
            f"{flops.get(component, 0) / 1e6:,.1f}",
        ]
        for component, row in figures.parameters.items()
    ]
    total = figures.total_flops
    rows.append(["total", f"{figures.unique:,}", f"{figures.unshared:,}", f"{(total or 0) / 1e6:,.1f}"])
    headers = [f"parameters ({vocabulary})", "unique", "without sharing", "MFLOPs per token"]
    if total is None:
        rows, headers = [row[:3] for row in rows], headers[:3]
    lines += ["", tabulate(rows, headers, colalign=("left", *["right"] * (len(headers) - 1)), **style)]

    precisions = list(figures.memory)
    rows = [
        [kind, *(format_megabytes(figures.memory[precision][kind]) for precision in precisions)]
        for kind in figures.memory["fp32"]
    ]
    rows.append(["together", *(format_megabytes(sum(figures.memory[each].values())) for each in precisions)])
    rows.append(["all-reduced per update", *(format_megabytes(figures.all_reduced[each]) for each in precisions)])
    for kind, size in figures.checkpoint.items():
        name = "checkpoint, model only" if kind == "model" else f"checkpoint {kind}"
        rows.append([name, *[format_megabytes(size)] * len(precisions)])
    if figures.activations is not None:
        rows.append(
            [
                f"peak of activations, B={figures.sentences}",
                format_megabytes(figures.activations),
                *[""] * (len(precisions) - 1),
            ]
        )
    headers = ["memory in training (MB)", *precisions]
    lines += ["", tabulate(rows, headers, colalign=("left", *["right"] * len(precisions)), **style), ""]
    return "\n".join([*lines, *explain(figures)])


def label(component: str, row: dict[str, int]) -> str:
    """Return a component's name in the table."""
    return "head (tied to embeddings)" if component == "head" and not row["unique"] else component


def format_megabytes(size: int) -> str:
    """Return bytes in units of a million."""
    return f"{size / MEGABYTE:,.1f}" if size else "-"


def saves_projections(figures) -> bool:
    """Whether some layers take keys and values of the encoder output from others."""
    return any(0 < each["source_projections"] < each["layers"] for each in figures.stacks.values())


def explain(figures) -> list[str]:
    """Return in words what the tables say."""
    lines = []
    if figures.unique < figures.unshared:
        lines += [
            f"{figures.unique / figures.unshared:.1%} of the parameters of the same depth without sharing.",
            "Sharing saves parameters, and with them memory, checkpoint size and traffic between workers.",
        ]
        if saves_projections(figures):
            lines += [
                "Each of the N layers is computed, and keeps its activations; only keys and values of the encoder",
                "output are computed and kept once for each parameter set.",
            ]
        else:
            lines.append(
                "In training it saves no computation: each of the N layers is computed, and keeps its activations."
            )
    else:
        lines.append("Nothing is shared: each layer has its own parameters.")
    if figures.flops is None:
        lines.append(f"FLOPs are not known: {figures.why_no_flops}.")
    else:
        lengths = format_lengths(figures.lengths, "convolutions" in figures.parameters)
        lines.append(f"FLOPs: forward pass of training over {lengths}, per target token; a multiply-add is two.")
    if figures.activations is not None:
        lines.append("Activations: most bytes alive in one training step, in fp32 and with unfused attention.")
    return lines
