"""The flags of sharing. The only place where flags are spelled; `arguments` makes an assignment of them."""

from dataclasses import dataclass, field, fields, make_dataclass
from typing import Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass

from .sharing import ALL_PARTS
from .strategies import STRATEGIES


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
