"""Show which layer uses which parameter set, and exact parameter counts, without data and without training.

Sharing saves parameters, and with them memory for gradients and optimizer; the computation is that of N layers.

Examples:
    fairseq-sharing show --arch transformer_shared_cycle_rev --share-all-embeddings
    fairseq-sharing show --arch transformer_shared_cycle --encoder-layers 9 --encoder-unique-layers 3 --vocab-size 8000
    fairseq-sharing show --path checkpoints/checkpoint_best.pt
"""

import logging

HELP = "show the assignment and parameter counts of an architecture or a checkpoint"
PASSES_ON = True  # whatever the command does not know is a flag of fairseq-train


def add_arguments(parser) -> None:
    """Add the two ways to name a model."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--arch", metavar="ARCH", help="an architecture; flags of fairseq-train may follow")
    what.add_argument("--path", metavar="FILE", help="a checkpoint")
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="V",
        help="symbols in each dictionary, special symbols included (with --arch; default: 32768, as in the paper)",
    )


def filler_dictionary(size: int):
    """Return a dictionary of ``size`` symbols; fairseq's four special ones are among them."""
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    for number in range(size - len(dictionary)):
        dictionary.add_symbol(f"symbol{number}")
    return dictionary


def parse_architecture(arch: str, flags: list[str]):
    """Return the arguments that fairseq-train would train with.

    Raises:
        ValueError: there is no such architecture, or the flags contradict each other.
    """
    from fairseq import options
    from fairseq.models import ARCH_MODEL_REGISTRY

    if arch not in ARCH_MODEL_REGISTRY:
        known = ", ".join(sorted(name for name in ARCH_MODEL_REGISTRY if "_shared_" in name))
        raise ValueError(f"--arch {arch} is not known to fairseq or to this plugin, which adds {known}")
    if not ARCH_MODEL_REGISTRY[arch].__module__.endswith((".transformer_legacy", ".transformer_shared")):
        raise ValueError(f"--arch {arch}: only Transformers for translation can be shown")
    return options.parse_args_and_arch(options.get_training_parser(), ["", "--arch", arch, *flags])


def build_without_memory(args, source_size: int, target_size: int):
    """Build the model on torch's meta device: shapes and ties, but no numbers."""
    import torch
    from fairseq.models import build_model
    from fairseq.tasks.translation import TranslationTask

    source = filler_dictionary(source_size)
    target = source if source_size == target_size else filler_dictionary(target_size)
    with torch.device("meta"):
        return build_model(args, TranslationTask(args, source, target))


def count_components(model) -> list[tuple[str, int, int]]:
    """Return (component, unique parameters, parameters without sharing); they add up to the model."""
    from ..sharing import count_saved

    counts = []
    for name in ("encoder", "decoder"):
        layers = getattr(model, name).layers
        unique = sum(parameter.numel() for parameter in layers.parameters())
        counts.append((f"{name} layers", unique, unique + count_saved(layers)))
    in_embeddings = {
        id(parameter): parameter.numel()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if any(word in name for word in ("embed_tokens", "embed_positions", "output_projection", "adaptive_softmax"))
    }
    embeddings = sum(in_embeddings.values())
    counts.insert(0, ("embeddings and output", embeddings, embeddings))
    rest = sum(parameter.numel() for parameter in model.parameters()) - sum(unique for _, unique, _ in counts)
    return [*counts, ("other", rest, rest)] if rest else counts


def format_report(title: str, model, source_size: int, target_size: int) -> str:
    """Return the picture of each stack and the table of counts."""
    from tabulate import tabulate

    lines = [title, ""]
    for stack in ("encoder", "decoder"):
        sharing = getattr(getattr(model, stack).layers, "sharing", None)
        num_layers = len(getattr(model, stack).layers)
        if sharing is None or not sharing.shares:
            lines.append(f"{stack}: {num_layers} layers, each with its own parameters")
            continue
        parts = "" if sharing.parts == ("attention", "ffn", "norm") else f", sharing only {', '.join(sharing.parts)}"
        lines.append(f"{stack}: {num_layers} layers from {len(set(sharing.assignment))} parameter sets{parts}")
        width = len(str(num_layers - 1))
        lines.append("  layer " + " ".join(f"{index:>{width}}" for index in range(num_layers)))
        lines.append("  set   " + " ".join(f"{number:>{width}}" for number in sharing.assignment))
    counts = count_components(model)
    counts.append(("total", sum(row[1] for row in counts), sum(row[2] for row in counts)))
    vocabulary = f"V={source_size:,}" if source_size == target_size else f"V={source_size:,} and {target_size:,}"
    headers = (f"parameters ({vocabulary})", "unique", "without sharing")
    lines += ["", tabulate(counts, headers, intfmt=",", tablefmt="simple")]
    _, unique, unshared = counts[-1]
    lines += [
        "",
        f"{unique / unshared:.1%} of the parameters of the same depth without sharing; the computation is the same.",
    ]
    return "\n".join(lines)


def read_checkpoint(path: str):
    """Return the arguments and dictionary sizes that a checkpoint was trained with.

    Raises:
        ValueError: the checkpoint is not one of a Transformer for translation.
    """
    from omegaconf import OmegaConf

    from .files import load_checkpoint

    state = load_checkpoint(path)
    config = state.get("cfg")
    args = config["model"] if config else state.get("args")
    if isinstance(args, dict):
        args = OmegaConf.create(args)
    sizes = [state["model"].get(f"{stack}.embed_tokens.weight") for stack in ("encoder", "decoder")]
    if args is None or None in sizes:
        raise ValueError(f"{path}: only checkpoints of Transformers for translation can be shown")
    return args, len(sizes[0]), len(sizes[1])


def run(args) -> None:
    """Print the report."""
    logging.getLogger("fairseq_sharing").setLevel(logging.CRITICAL)  # the sentence comes once, from `main`
    if args.path is not None:
        if args.extra or args.vocab_size is not None:
            raise ValueError(f"--path takes no further flags: {' '.join(args.extra) or '--vocab-size'}")
        model_args, *sizes = read_checkpoint(args.path)
        title = f"{getattr(model_args, 'arch', None) or model_args._name}, from {args.path}"
    else:
        if args.vocab_size is not None and args.vocab_size < 5:
            raise ValueError(f"--vocab-size {args.vocab_size} must be at least 5: four symbols are fairseq's own")
        model_args = parse_architecture(args.arch, args.extra)
        sizes = [args.vocab_size or 32768] * 2
        title = args.arch
    print(format_report(title, build_without_memory(model_args, *sizes), *sizes))
