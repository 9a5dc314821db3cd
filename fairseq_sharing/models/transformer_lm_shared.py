"""Language modelling: fairseq's decoder-only Transformer whose layers share parameters.

Source: Takase & Kiyono, "Lessons on Parameter Sharing across Layers in Transformers", arXiv 2104.06022, section on
language modelling: Pre-LN, adaptive inputs and softmax, N=12, M=6 on WikiText-103.
"""

from argparse import Namespace
from dataclasses import fields
from typing import ClassVar

from fairseq.models import ARCH_CONFIG_REGISTRY, register_model
from fairseq.models.transformer_lm import (
    TransformerLanguageModel,
    TransformerLanguageModelConfig,
    base_lm_architecture,
    transformer_lm_baevski_wiki103,
)

from ..architecture import (
    check_adaptive_softmax,
    check_heads,
    check_quant_noise,
    resolve_factorized_embedding,
    set_defaults,
)
from ..arguments import resolve_residual_scaling, resolve_sharing
from ..options import extend_config
from ..refusals import as_text, refuse
from ..shared_model import SharedLayers
from ..upstream.data_folder import check_data


class SharedLanguageModel(SharedLayers, TransformerLanguageModel):
    """fairseq's Transformer language model with N layers from M parameter sets.

    Attributes:
        PRESET: strategy and M of the architecture.
    """

    STACKS: ClassVar[dict[str, str]] = {"decoder": "decoder.layers"}
    PRESET: ClassVar[tuple[str, int]]

    @classmethod
    def add_args(cls, parser):
        """Add fairseq's flags and those of sharing, each of which switches on what it names.

        fairseq makes a flag switch off what the dataclass has on: --adaptive-input would undo ``_wiki103``'s.
        """
        super().add_args(parser)
        on = {each.name for each in fields(getattr(cls, "__dataclass")) if each.default is True}
        for action in parser._actions:
            if action.dest in on and action.const is False:
                action.const = True

    @classmethod
    def build_model(cls, args, task):
        """Resolve the flags again, for configurations that came from YAML, then build and tie."""
        cls.resolve_args(cls.__name__, args)
        return super().build_model(args, task)

    @classmethod
    def resolve_args(cls, name, args):
        """Resolve a complete configuration, which YAML gives; the architecture function resolves a command line's."""
        if args.factorized_embed_dim is not None:  # YAML leaves fairseq's options at the dataclass's defaults
            args.decoder_input_dim = args.decoder_output_dim = args.factorized_embed_dim
        resolve_factorized_embedding(args, "decoder_input_dim", "decoder_output_dim")
        check(args)
        if str(getattr(args, "residual_scaling", "none")) != "none":
            args.decoder_normalize_before = False  # YAML cannot tell upstream's default from what was asked for
        resolve_sharing(args, "decoder", *cls.PRESET)


def check(args) -> None:
    """Refuse widths that do not fit together while parsing, and an embedding tied across widths.

    Raises:
        ValueError: with the flags and their values.
    """
    check_heads(args, "decoder")
    check_quant_noise(args, "decoder")
    check_adaptive_softmax(args)
    if args.share_decoder_input_output_embed and args.decoder_input_dim != args.decoder_output_dim:
        refuse(
            "--share-decoder-input-output-embed needs one width, but --decoder-input-dim is "
            f"{args.decoder_input_dim} and --decoder-output-dim is {args.decoder_output_dim}"
        )
    check_adaptive_input(args)


def check_adaptive_input(args) -> None:
    """Refuse what an adaptive input cannot be combined with, where fairseq stops with a bare assertion.

    Raises:
        ValueError: with the flags and their values.
    """
    if args.adaptive_input:
        if args.adaptive_input_cutoff is None:
            refuse("--adaptive-input needs --adaptive-input-cutoff")
        if args.share_decoder_input_output_embed:
            refuse("--adaptive-input cannot be tied by --share-decoder-input-output-embed: use --tie-adaptive-weights")
        least = args.adaptive_input_factor ** (as_text(args.adaptive_input_cutoff).count(",") + 1)
        if args.decoder_input_dim < least:  # the last band would have no width
            refuse(
                f"--adaptive-input-cutoff {as_text(args.adaptive_input_cutoff)} divides --decoder-input-dim "
                f"{args.decoder_input_dim} by --adaptive-input-factor {args.adaptive_input_factor:g} once for each "
                f"cutoff: it must be at least {least:g}"
            )
    if not args.tie_adaptive_weights:
        return
    if not args.adaptive_input:
        refuse("--tie-adaptive-weights needs --adaptive-input")
    for ours, theirs in (
        ("adaptive_input_cutoff", "adaptive_softmax_cutoff"),
        ("adaptive_input_factor", "adaptive_softmax_factor"),
        ("decoder_input_dim", "decoder_output_dim"),
    ):
        one, other = getattr(args, ours), getattr(args, theirs)
        if str(one) != str(other):
            refuse(
                f"--tie-adaptive-weights needs --{ours.replace('_', '-')} {one} and "
                f"--{theirs.replace('_', '-')} {other} to be the same"
            )


# Name -> (strategy, N, M). With M=1 all strategies are one.
PRESETS = {
    "sequence": ("sequence", 12, 6),
    "cycle": ("cycle", 12, 6),
    "cycle_rev": ("cycle_rev", 12, 6),
    "universal": ("cycle", 6, 1),
}
UNIVERSAL = {"decoder_embed_dim": 1024, "decoder_ffn_embed_dim": 4096, "decoder_attention_heads": 16}


def register_architecture(name: str, preset: str, upstream_architecture, **widths) -> None:
    """Register an architecture as a model with a dataclass of its own.

    Args:
        name: what users type after ``--arch``.
        preset: a key of `PRESETS`.
        upstream_architecture: fairseq's function that fills in the other defaults.
        widths: defaults in place of fairseq's.
    """
    strategy, num_layers, num_unique = PRESETS[preset]
    given = {"decoder_layers": num_layers, **widths}
    filled = Namespace(**given)
    upstream_architecture(filled)
    sharing = {"decoder_sharing": strategy, "decoder_unique_layers": num_unique}
    config = extend_config(
        TransformerLanguageModelConfig, f"{name}_config", SharedLanguageModel.STACKS, **vars(filled), **sharing
    )
    model = type(
        name, (SharedLanguageModel,), {"PRESET": (strategy, num_unique), "__doc__": SharedLanguageModel.__doc__}
    )
    model.__module__ = __name__
    globals()[name] = register_model(name, dataclass=config)(model)  # by its name, so that it can be pickled

    def architecture(args):
        set_defaults(args, **given)
        resolve_factorized_embedding(args, "decoder_input_dim", "decoder_output_dim")
        resolve_residual_scaling(args, "decoder")
        upstream_architecture(args)  # makes it Pre-LN, whatever the flags say
        if args.residual_scaling != "none":
            args.decoder_normalize_before = False
        check_data(args)
        check(args)
        resolve_sharing(args, "decoder", strategy, num_unique)

    ARCH_CONFIG_REGISTRY[name] = architecture  # runs while parsing; fairseq put a function without effect there


for preset in PRESETS:
    register_architecture(
        f"transformer_lm_shared_{preset}",
        preset,
        base_lm_architecture,
        **(UNIVERSAL if preset == "universal" else {}),
    )
    if preset != "universal":
        register_architecture(f"transformer_lm_shared_{preset}_wiki103", preset, transformer_lm_baevski_wiki103)
