"""The flags of sharing, and how they become an assignment. The only place where flags are spelled.

An architecture names its strategy and M as presets; what the user types comes first. `resolve_sharing` runs inside
the architecture function, that is while fairseq parses the command line and before it makes --save-dir, and again
whenever a model is rebuilt from its checkpoint: it leaves its result in the arguments and is idempotent.
"""

import logging
import os
from argparse import Namespace
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Optional

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from omegaconf import DictConfig, OmegaConf

from .sharing import ALL_PARTS, Sharing
from .strategies import STRATEGIES, build_assignment, parse_assignment, picture

logger = logging.getLogger(__name__)


@dataclass
class StackSharingConfig(FairseqDataclass):
    """Sharing of one stack; the flags carry the stack's name in front (``--encoder-sharing``)."""

    sharing: Optional[ChoiceEnum(list(STRATEGIES))] = field(
        default=None, metadata={"help": "strategy that assigns M parameter sets to N layers"}
    )
    unique_layers: Optional[int] = field(
        default=None, metadata={"help": "M, the number of parameter sets, from 1 to the number of layers N"}
    )
    assignment: Optional[str] = field(
        default=None,
        metadata={"help": "parameter set of each layer, such as 0,1,2,2,1,0; takes the place of strategy and M"},
    )


@dataclass
class SharingPartsConfig(FairseqDataclass):
    """What all stacks of a model have in common: what is shared, and what is logged about it."""

    sharing_parts: str = field(
        default=",".join(ALL_PARTS),
        metadata={
            "help": "parts of a layer that are shared: any of attention, ffn, norm. With attention or ffn alone, "
            "the LayerNorms of that sublayer are shared with it"
        },
    )
    log_layer_gradient_norms: bool = field(
        default=False,
        metadata={
            "help": "log the gradient norm that each layer contributes, shared or not, every --log-interval updates; "
            "costs one more forward and backward pass of an unshared copy each time"
        },
    )


@dataclass
class FactorizedEmbeddingConfig(FairseqDataclass):
    """The factorised embedding; its default is the architecture's."""

    factorized_embed_dim: Optional[int] = field(
        default=None,
        metadata={
            "help": "E, the width of the embeddings; a linear layer E -> H takes them to the width of the layers"
        },
    )


@dataclass
class LayerNormConfig(FairseqDataclass):
    """The number that every LayerNorm adds to the variance; its default is the architecture's."""

    layernorm_eps: Optional[float] = field(
        default=None, metadata={"help": "epsilon of every LayerNorm of the model (ALBERT: 1e-12, RoBERTa: 1e-05)"}
    )


@dataclass
class ResidualScalingConfig(FairseqDataclass):
    """How residual connections are scaled."""

    residual_scaling: ChoiceEnum(["none", "admin", "admin-static"]) = field(
        default="none",
        metadata={
            "help": "scale the residual connections of Post-LN layers: admin measures the scalings on the first "
            "training batch, admin-static takes them from the number of layers"
        },
    )


def add_residual_args(parser) -> None:
    """Add the flag of residual scaling to a fairseq parser."""
    gen_parser_from_dataclass(parser, ResidualScalingConfig(), delete_default=True)


def add_factorized_args(parser) -> None:
    """Add the flag of the factorised embedding to a fairseq parser."""
    gen_parser_from_dataclass(parser, FactorizedEmbeddingConfig(), delete_default=True)


def add_layernorm_args(parser) -> None:
    """Add the flag of the LayerNorms to a fairseq parser."""
    gen_parser_from_dataclass(parser, LayerNormConfig(), delete_default=True)


def add_sharing_args(parser, stacks) -> None:
    """Add the flags of each stack (``encoder``, ``decoder``) and the common ones to a fairseq parser."""
    for stack in stacks:
        gen_parser_from_dataclass(parser, StackSharingConfig(), delete_default=True, with_prefix=f"--{stack}")
    gen_parser_from_dataclass(parser, SharingPartsConfig(), delete_default=True)


def extend_config(base: type, name: str, stacks, **defaults) -> type:
    """Return fairseq's configuration dataclass of a model with the fields of sharing added and other defaults.

    fairseq ignores the preset function of an architecture whose model has a dataclass, so each such architecture is
    a model with a dataclass of its own.

    Args:
        base: the dataclass of fairseq's model.
        name: the new class's name.
        stacks: ``encoder``, ``decoder`` or both.
        defaults: values in place of the base's; names that are no field are ignored.
    """
    added = [(f"{stack}_{each.name}", each) for stack in stacks for each in fields(StackSharingConfig)]
    added += [
        (each.name, each)
        for config in (SharingPartsConfig, FactorizedEmbeddingConfig, ResidualScalingConfig)
        for each in fields(config)
    ]
    known = {each.name: each for each in fields(base)} | dict(added)
    specified = []
    for each in sorted({each for each, _ in added} | (defaults.keys() & known.keys())):
        default = defaults.get(each, known[each].default)
        if isinstance(default, bool) and "int" in str(known[each].type):  # as fairseq's presets have it here and there
            default = int(default)
        specified.append((each, known[each].type, field(default=default, metadata=known[each].metadata)))
    return make_dataclass(name, specified, bases=(base,))


def as_namespace(args) -> Namespace:
    """Return the arguments as a flat Namespace; fairseq-hydra-train gives legacy models a DictConfig."""
    return Namespace(**OmegaConf.to_container(args, resolve=True)) if isinstance(args, DictConfig) else args


def refuse(sentence: str) -> None:
    """Log what is wrong with the flags, then raise it."""
    logger.error(sentence)
    raise ValueError(sentence)


def resolve_sharing(args, stack: str, strategy: str, num_unique: int) -> None:
    """Check the flags of one stack and leave strategy, M and parts in ``args``.

    What is left describes the model completely: strategy and M, or an assignment with its M and no strategy.

    Args:
        args: arguments after the architecture's other defaults (``{stack}_layers`` is there).
        stack: ``encoder`` or ``decoder``.
        strategy: the architecture's strategy, used when none was given.
        num_unique: the architecture's M, used when none was given.

    Raises:
        ValueError: the flags contradict each other or cannot be right together with sharing.
    """
    num_layers = getattr(args, f"{stack}_layers")
    given = {name: getattr(args, f"{stack}_{name}", None) for name in ("sharing", "unique_layers", "assignment")}
    unique = given["unique_layers"]
    given["assignment"] = as_text(given["assignment"])
    if isinstance(args, DictConfig):
        # A structured configuration holds the architecture's presets as if they had been given.
        given["sharing"] = None if given["sharing"] is None else str(given["sharing"])
        if given["assignment"] is not None and given["sharing"] == strategy:
            given["sharing"] = None
        if unique == num_unique and (given["assignment"] is not None or given["sharing"] == "none"):
            given["unique_layers"] = unique = None
    args.sharing_parts = ",".join(parse_parts(getattr(args, "sharing_parts", None)))

    if given["assignment"] is not None:
        assignment = check_assignment(stack, num_layers, **given)
        given["sharing"], unique = None, len(set(assignment))
    else:
        given["sharing"] = given["sharing"] or strategy
        if given["sharing"] == "none":
            if unique not in (None, num_layers):
                refuse(
                    f"--{stack}-unique-layers {unique} contradicts --{stack}-sharing none, "
                    f"which gives each of --{stack}-layers {num_layers} its own parameters"
                )
            unique = None
        else:
            preset = unique is None
            unique = num_unique if preset else unique
            if not 1 <= unique <= num_layers:
                refuse(
                    f"--{stack}-unique-layers {unique}{' (the default of this architecture)' if preset else ''} "
                    f"must be between 1 and --{stack}-layers {num_layers}"
                )
            if unique == num_layers and num_layers > 1:
                logger.warning(
                    f"--{stack}-unique-layers {unique}{' (the default of this architecture)' if preset else ''} "
                    f"equals --{stack}-layers {num_layers}: nothing is shared in the {stack}"
                )
    setattr(args, f"{stack}_sharing", given["sharing"])
    setattr(args, f"{stack}_unique_layers", unique)
    setattr(args, f"{stack}_assignment", given["assignment"])
    parsing = not hasattr(args, "_name")  # a checkpoint is loaded on another machine than it was trained on
    if parsing:
        check_precision(args)
    if get_sharing(args, stack).shares:
        check_neighbours(args, stack)
        if parsing:
            check_training(args, stack)
    else:  # nothing is shared, whatever it was called
        setattr(args, f"{stack}_sharing", "none")
        setattr(args, f"{stack}_unique_layers", None)
        setattr(args, f"{stack}_assignment", None)


def resolve_residual_scaling(args, *stacks: str) -> None:
    """Leave how residual connections are scaled in ``args``.

    Raises:
        ValueError: a stack is Pre-LN.
    """
    args.residual_scaling = method = str(getattr(args, "residual_scaling", "none"))
    for stack in stacks:
        if method != "none" and getattr(args, f"{stack}_normalize_before", False):
            refuse(
                f"--residual-scaling {method} is for Post-LN layers and cannot be combined with "
                f"--{stack}-normalize-before"
            )


def as_text(value) -> str | None:
    """Return a list, as YAML and fairseq's own flags have it, as the text that is typed."""
    return value if value is None or isinstance(value, str) else ",".join(map(str, value))


def check_assignment(
    stack: str, num_layers: int, sharing: str | None, unique_layers: int | None, assignment: str
) -> list[int]:
    """Read ``--{stack}-assignment`` and hold it against the other flags of the stack."""
    flag = f"--{stack}-assignment {assignment}"
    try:
        numbers = parse_assignment(assignment)
    except ValueError as error:
        refuse(f"--{stack}-assignment {error}")
    if len(numbers) != num_layers:
        refuse(f"{flag} has {len(numbers)} entries and must have one for each of --{stack}-layers {num_layers}")
    num_unique = len(set(numbers))
    if unique_layers not in (None, num_unique):
        refuse(f"{flag} uses {num_unique} parameter sets, which contradicts --{stack}-unique-layers {unique_layers}")
    if sharing is not None:
        expected = list(range(num_layers)) if sharing == "none" else build_assignment(sharing, num_layers, num_unique)
        if Sharing(tuple(expected)).owners != Sharing(tuple(numbers)).owners:
            refuse(f"{flag} contradicts --{stack}-sharing {sharing}, which is {picture(expected)}")
    return numbers


def check_neighbours(args, stack: str) -> None:
    """Refuse fairseq's options that cannot be right when layers share parameters."""
    keep = getattr(args, f"{stack}_layers_to_keep", None)
    if keep:
        refuse(
            f"--{stack}-layers-to-keep {as_text(keep)} cannot prune layers that share parameters "
            f"({stack}: {get_sharing(args, stack)})"
        )
    for name, problem in (
        ("quant_noise_pq", "would disturb a parameter set once for each layer that uses it"),
        ("quant_noise_scalar", "would quantise only the first layer of each parameter set"),
        ("quantization_config_path", "would quantise only the first layer of each parameter set"),
    ):
        if getattr(args, name, None):
            refuse(
                f"--{name.replace('_', '-')} {getattr(args, name)} {problem} "
                f"({stack}: {get_sharing(args, stack)}) and cannot be combined with sharing"
            )
    if getattr(args, "base_layers", 0):
        refuse(
            f"--base-layers {args.base_layers} cannot be combined with --{stack}-sharing "
            f"{getattr(args, f'{stack}_sharing')}: BASE layers are no part of the assignment"
        )


def check_training(args, stack: str) -> None:
    """Refuse ways to train that cannot be right when layers share parameters, and name the option to use instead."""
    sharing = f"({stack}: {get_sharing(args, stack)})"
    backend = getattr(args, "ddp_backend", None)
    if backend in ("fully_sharded", "slowmo"):
        reason = {
            "fully_sharded": "wraps each layer by itself and cannot share parameters across layers",
            "slowmo": "has never been tried with layers that share parameters",
        }[backend]
        refuse(f"--ddp-backend {backend} {reason} {sharing}: use --ddp-backend legacy_ddp")
    if getattr(args, "pipeline_model_parallel", False):
        refuse(
            "--pipeline-model-parallel puts layers on different devices, where they cannot share parameters "
            f"{sharing}: use --ddp-backend legacy_ddp"
        )
    parallel = getattr(args, "model_parallel_size", 1)
    if parallel > 1:
        refuse(
            f"--model-parallel-size {parallel} needs Megatron's layers, which do not share parameters {sharing}: "
            "use --ddp-backend legacy_ddp and leave it at 1"
        )
    processes = max(getattr(args, "distributed_world_size", 1), int(os.environ.get("WORLD_SIZE", 1)))  # or torchrun's
    if processes == 1 or backend not in ("pytorch_ddp", "c10d") or getattr(args, "use_bmuf", False):
        return
    if getattr(args, "checkpoint_activations", False) or getattr(args, "offload_activations", False):
        refuse(
            f"--ddp-backend {backend} stops with 'marked ready twice' when {processes} processes train "
            f"layers that share parameters {sharing} with --checkpoint-activations: use --ddp-backend legacy_ddp"
        )
    if getattr(args, "find_unused_parameters", False):
        return
    for name in (f"{stack}_layerdrop", "encoder_freezing_updates"):
        if getattr(args, name, None):
            refuse(
                f"--ddp-backend {backend} stops when one of {processes} processes has no gradient for a parameter set "
                f"{sharing}, which --{name.replace('_', '-')} {getattr(args, name)} brings about: "
                "use --ddp-backend legacy_ddp, or add --find-unused-parameters"
            )


def check_precision(args, training: bool = False) -> None:
    """Refuse fp16 without a GPU, whatever is shared: fairseq's optimizer and its trainer, at an overflow, need one.

    Args:
        args: settings ``fp16``, ``memory_efficient_fp16``, ``cpu`` and ``tpu``.
        training: whether this machine shall train now; otherwise only the flags are held against each other.

    Raises:
        ValueError: with the precision to use instead.
    """
    for name in ("memory_efficient_fp16", "fp16"):  # the first implies the second
        if not getattr(args, name, False):
            continue
        flag = f"--{name.replace('_', '-')}"
        if getattr(args, "cpu", False):
            refuse(f"{flag} needs a GPU and cannot be combined with --cpu: use {flag.replace('fp16', 'bf16')}")
        if training and not torch.cuda.is_available() and not getattr(args, "tpu", False):
            refuse(f"{flag} needs a GPU, and torch sees none on this machine: use {flag.replace('fp16', 'bf16')}")


def whole_configuration(cfg) -> DictConfig:
    """Return what a command line would show an architecture of fairseq's configuration, in one level.

    Args:
        cfg: fairseq's configuration; its ``model`` came from YAML or from a dataclass.
    """
    whole = OmegaConf.create({}, flags={"allow_objects": True})
    for part in (cfg.common, cfg.distributed_training, cfg.optimization, cfg.model):
        whole.update(OmegaConf.to_container(part, resolve=True, enum_to_str=True))
    whole.pop("_name")  # by which architectures know a model that is rebuilt
    return whole


def parse_parts(text: str | None) -> list[str]:
    """Read ``--sharing-parts``: the parts in their fixed order."""
    parts = [part.strip() for part in (as_text(text) if text is not None else ",".join(ALL_PARTS)).split(",")]
    unknown = [part for part in parts if part not in ALL_PARTS]
    if unknown:
        refuse(f"--sharing-parts {text}: {unknown[0]!r} is none of {', '.join(ALL_PARTS)}")
    return [part for part in ALL_PARTS if part in parts]


def get_sharing(args, stack: str) -> Sharing:
    """Return the sharing of a stack from arguments that went through `resolve_sharing`."""
    num_layers = getattr(args, f"{stack}_layers")
    if getattr(args, f"{stack}_assignment") is not None:
        assignment = parse_assignment(getattr(args, f"{stack}_assignment"))
    elif getattr(args, f"{stack}_sharing") == "none":
        assignment = list(range(num_layers))
    else:
        assignment = build_assignment(
            getattr(args, f"{stack}_sharing"), num_layers, getattr(args, f"{stack}_unique_layers")
        )
    return Sharing(tuple(assignment), tuple(parse_parts(args.sharing_parts)))
