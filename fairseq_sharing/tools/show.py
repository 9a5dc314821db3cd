"""Show which layer uses which parameter set, and exact parameter counts, without data and without training.

Sharing saves parameters, and with them memory for gradients and optimizer; the computation is that of N layers.

Examples:
    fairseq-sharing show --arch transformer_shared_cycle_rev --share-all-embeddings
    fairseq-sharing show --arch transformer_shared_cycle --encoder-layers 9 --encoder-unique-layers 3 --vocab-size 8000
    fairseq-sharing show --arch transformer_lm_shared_sequence_wiki103 --vocab-size 267744
    fairseq-sharing show --arch s2t_transformer_shared_sequence_librispeech --vocab-size 10000
    fairseq-sharing show --arch albert_encoder_base --vocab-size 30000 --sharing-parts attention
    fairseq-sharing show --path checkpoints/checkpoint_best.pt
"""

import logging
import re
import warnings

HELP = "show the assignment and parameter counts of an architecture or a checkpoint"
CANNOT_SHOW = (
    "only Transformers for translation, language modelling and speech to text, and this plugin's models, can be shown"
)
# Parts of parameters' names; lm_head is the head of masked language models.
EMBEDDINGS = (
    "embed_tokens",
    "embed_positions",
    "project_in_dim",
    "project_out_dim",
    "output_projection",
    "adaptive_softmax",
    "lm_head",
)
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
    """Return the model's configuration that fairseq-train would train with.

    Raises:
        ValueError: there is no such architecture, or the flags contradict each other.
    """
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.models.speech_to_text import S2TTransformerModel
    from fairseq.models.transformer_lm import TransformerLanguageModel

    if arch not in ARCH_MODEL_REGISTRY:
        known = ", ".join(sorted(name for name, model in ARCH_MODEL_REGISTRY.items() if hasattr(model, "STACKS")))
        raise ValueError(f"--arch {arch} is not known to fairseq or to this plugin, which adds {known}")
    if not can_show(arch):
        raise ValueError(f"--arch {arch}: {CANNOT_SHOW}")
    if flags and not flags[0].startswith("-"):
        raise ValueError(
            f"leave out the data folder {flags[0]}: of fairseq-train's arguments only the flags are wanted"
        )
    tasks = {TransformerLanguageModel: "language_modeling", S2TTransformerModel: "speech_to_text"}
    task = [
        word
        for model, name in tasks.items()
        if issubclass(ARCH_MODEL_REGISTRY[arch], model)
        for word in ("--task", name)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hydra's, about its own future
        parser = options.get_training_parser()
        args, unknown = options.parse_args_and_arch(parser, ["", *task, "--arch", arch, *flags], parse_known=True)
        if unknown:
            raise ValueError(f"--arch {arch} has no {unknown[0]} among fairseq-train's flags")
        if "speech_to_text" in task:
            args.input_feat_per_channel = 80  # as the task sets it from the data, fairseq's default
        return convert_namespace_to_omegaconf(args).model


def can_show(arch: str) -> bool:
    """Whether the architecture is a Transformer of a family that this plugin adds to, ours or fairseq's."""
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.models.speech_to_text import S2TTransformerModel
    from fairseq.models.transformer import TransformerModel
    from fairseq.models.transformer_lm import TransformerLanguageModel

    families = (TransformerModel, TransformerLanguageModel, S2TTransformerModel)
    model = ARCH_MODEL_REGISTRY.get(arch, type)
    return hasattr(model, "STACKS") or issubclass(model, families)


def build_without_memory(config, source_size: int, target_size: int):
    """Build the model of fake tensors: shapes and ties, but no numbers.

    RoBERTa's initialisation copies every tensor to the CPU, which tensors on the meta device refuse.
    """
    from types import SimpleNamespace

    from fairseq.models import build_model
    from torch._subclasses.fake_tensor import FakeTensorMode

    source = filler_dictionary(source_size)
    target = source if source_size == target_size else filler_dictionary(target_size)
    with FakeTensorMode():  # of the task, building a model needs only the dictionaries
        return build_model(config, SimpleNamespace(source_dictionary=source, target_dictionary=target), True)


def register_heads(model, state: dict) -> None:
    """Add the classification heads that a checkpoint holds: fairseq's tasks register them after building the model.

    Args:
        model: built without memory.
        state: the checkpoint's tensors by name.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        for key, bias in state.items():
            match = re.fullmatch(r"classification_heads\.([^.]+)\.out_proj\.bias", key)
            if match:
                width = len(state[f"classification_heads.{match[1]}.dense.bias"])
                model.register_classification_head(match[1], num_classes=len(bias), inner_dim=width)


def paths_of(model) -> dict[str, str]:
    """Return where the model keeps the layers of each stack: its STACKS, or what they would be for fairseq's models."""
    paths = getattr(model, "STACKS", None)
    if paths is None:
        speech = hasattr(getattr(model, "encoder", None), "transformer_layers")
        paths = {"encoder": "encoder.transformer_layers" if speech else "encoder.layers", "decoder": "decoder.layers"}
    return {stack: path for stack, path in paths.items() if hasattr(model, stack)}


def stacks_of(model) -> dict:
    """Return the model's stacks of layers by name."""
    return {stack: model.get_submodule(path) for stack, path in paths_of(model).items()}


def count_components(model) -> list[tuple[str, int, int]]:
    """Return (component, unique parameters, parameters without sharing); they add up to the model."""
    from ..sharing import count_saved

    counts = []
    for name, layers in stacks_of(model).items():
        unique = sum(parameter.numel() for parameter in layers.parameters())
        counts.append((f"{name} layers", unique, unique + count_saved(layers)))
    in_embeddings = {
        id(parameter): parameter.numel()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if any(word in name for word in EMBEDDINGS)
    }
    embeddings = sum(in_embeddings.values())
    counts.insert(0, ("embeddings and output", embeddings, embeddings))
    if hasattr(getattr(model, "encoder", None), "subsample"):
        convolutions = sum(parameter.numel() for parameter in model.encoder.subsample.parameters())
        counts.insert(0, ("convolutions", convolutions, convolutions))
    if getattr(model, "classification_heads", None):
        heads = sum(parameter.numel() for parameter in model.classification_heads.parameters())
        counts.append(("classification heads", heads, heads))
    rest = sum(parameter.numel() for parameter in model.parameters()) - sum(unique for _, unique, _ in counts)
    return [*counts, ("other", rest, rest)] if rest else counts


def format_report(title: str, model, source_size: int, target_size: int) -> str:
    """Return the picture of each stack and the table of counts."""
    from tabulate import tabulate

    from ..sharing import Sharing

    lines = [title, ""]
    for stack, layers in stacks_of(model).items():
        num_layers = len(layers)
        sharing = getattr(layers, "sharing", Sharing(tuple(range(num_layers))))
        if not sharing.shares:
            lines.append(f"{stack}: {sharing.depth}, each with its own parameters")
            continue
        parts = "" if sharing.parts == ("attention", "ffn", "norm") else f", sharing only {', '.join(sharing.parts)}"
        lines.append(f"{stack}: {sharing.depth}{parts}")
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
    """Build the model of a checkpoint without memory.

    Returns:
        The model, the architecture's name and the sizes of both dictionaries.

    Raises:
        ValueError: the checkpoint is of no family that can be shown, or its record of sharing is not what its
            configuration says.
    """
    from omegaconf import OmegaConf

    from ..checkpoint import RECORD, decode_sharing
    from .files import load_checkpoint

    state = load_checkpoint(path)
    config = state["cfg"]["model"] if state.get("cfg") else state.get("args")
    if isinstance(config, dict):
        config = OmegaConf.create({"model": config}).model
    rows = {"encoder": 0, "decoder": 0}
    for key, value in state["model"].items():
        match = re.fullmatch(
            r"(encoder|decoder)(?:\.sentence_encoder)?\.embed_tokens(\.embedding|\.embeddings\.\d+\.0)?\.weight", key
        )
        if match:  # an adaptive input has one embedding for each band of words
            rows[match[1]] += len(value)
    arch = getattr(config, "_name", None) or getattr(config, "arch", None)
    if not can_show(arch) or not any(rows.values()):
        raise ValueError(f"{path} is of architecture {arch}: {CANNOT_SHOW}")
    sizes = rows["encoder"] or rows["decoder"], rows["decoder"] or rows["encoder"]
    model = build_without_memory(config, *sizes)
    register_heads(model, state["model"])
    for path_of_stack in paths_of(model).values():
        layers = model.get_submodule(path_of_stack)
        record = state["model"].get(f"{path_of_stack}.{RECORD}")
        if record is not None and not decode_sharing(record).same_as(layers.sharing):
            raise ValueError(
                f"{path} contradicts itself: {path_of_stack} were saved shared as {decode_sharing(record)}, "
                f"its configuration says {layers.sharing}"
            )
    return model, arch, sizes


def run(args) -> None:
    """Print the report."""
    logger = logging.getLogger("fairseq_sharing")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # an error's sentence comes once, from `main`
    try:
        print(report(args))
    finally:
        logger.setLevel(level)


def report(args) -> str:
    """Return the report that the flags ask for."""
    if args.path is not None:
        if args.extra or args.vocab_size is not None:
            raise ValueError(f"--path takes no further flags: {' '.join(args.extra) or '--vocab-size'}")
        model, arch, sizes = read_checkpoint(args.path)
        title = f"{arch}, from {args.path}"
    else:
        if args.vocab_size is not None and args.vocab_size < 5:
            raise ValueError(f"--vocab-size {args.vocab_size} must be at least 5: four symbols are fairseq's own")
        sizes = [args.vocab_size or 32768] * 2
        model = build_without_memory(parse_architecture(args.arch, args.extra), *sizes)
        title = args.arch
    return format_report(title, model, *sizes)
