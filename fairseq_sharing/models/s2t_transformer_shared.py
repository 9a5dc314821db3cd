"""Speech to text: fairseq's S2T Transformer whose encoder and decoder layers share parameters.

Source: Takase & Kiyono, "Lessons on Parameter Sharing across Layers in Transformers", arXiv 2104.06022, section on
speech recognition: Pre-LN, encoder N=16, M=8, decoder N=8, M=4 on LibriSpeech, here ``_librispeech``. The other sizes
take these N and M, which is our choice. So is Universal's width: M=1, N=6 in both stacks as there, and twice as wide as
the others of its size, which has about their parameters, as in the paper's translation models.
"""

import re
from argparse import Namespace
from pathlib import Path
from typing import ClassVar

from fairseq.checkpoint_utils import load_pretrained_component_from_model
from fairseq.models import register_model, register_model_architecture
from fairseq.models.speech_to_text.s2t_transformer import (
    Embedding,
    S2TTransformerModel,
    base_architecture,
    logger,
    s2t_transformer_l,
    s2t_transformer_m,
    s2t_transformer_s,
)

from ..architecture import check_heads, resolve_factorized_embedding, set_defaults
from ..arguments import resolve_sharing
from ..checkpoint import check_before_loading
from ..options import add_factorized_args
from ..refusals import refuse
from ..shared_model import SharedLayers, share_stack


@register_model("s2t_transformer_shared")
class SharedS2TTransformerModel(SharedLayers, S2TTransformerModel):
    """fairseq's speech-to-text Transformer with N layers from M parameter sets in each stack."""

    STACKS: ClassVar[dict[str, str]] = {"encoder": "encoder.transformer_layers", "decoder": "decoder.layers"}

    @classmethod
    def add_args(cls, parser):
        """Add the flag of the factorised embedding too."""
        super().add_args(parser)
        add_factorized_args(parser)

    @classmethod
    def build_decoder(cls, args, task, embed_tokens):
        """Build fairseq's decoder, over a table of width E where that is given; it projects by itself."""
        width = getattr(args, "factorized_embed_dim", None) or embed_tokens.embedding_dim
        if width != embed_tokens.embedding_dim:
            embed_tokens = Embedding(embed_tokens.num_embeddings, width, embed_tokens.padding_idx)
        return super().build_decoder(args, task, embed_tokens)

    @classmethod
    def build_encoder(cls, args):
        """Build fairseq's encoder, tie it, and only then load ``--load-pretrained-encoder-from``.

        fairseq loads while building: into layers not tied yet, a shared checkpoint does not fit, and what an unshared
        one brings would be lost when they are.

        Raises:
            ValueError: the checkpoint's encoder was saved with another sharing.
        """
        path = getattr(args, "load_pretrained_encoder_from", None)
        encoder = super().build_encoder(Namespace(**{**vars(args), "load_pretrained_encoder_from": None}))
        share_stack(encoder.transformer_layers, args, "encoder")
        check_before_loading(encoder)
        if path is None:
            return encoder
        if not Path(path).exists():  # as upstream: a trained model is decoded where that file need not be
            logger.warning(f"skipped pretraining because {path} does not exist")
            return encoder
        load_pretrained_component_from_model(component=encoder, checkpoint=path)
        logger.info(f"loaded pretrained encoder from: {path}")
        return encoder


# Size -> (fairseq's architecture, what Universal widens: width, FFN width, heads; about the parameters of M=8 and M=4).
SIZES = {
    "": (base_architecture, (1024, 4096, 16)),
    "_s": (s2t_transformer_s, (512, 4096, 8)),
    "_m": (s2t_transformer_m, (1024, 4096, 16)),
    "_l": (s2t_transformer_l, (2048, 8192, 32)),
}
# Name -> (strategy, N and M of the encoder, N and M of the decoder). With M=1 all strategies are one.
PRESETS = {
    "sequence": ("sequence", (16, 8), (8, 4)),
    "cycle": ("cycle", (16, 8), (8, 4)),
    "cycle_rev": ("cycle_rev", (16, 8), (8, 4)),
    "universal": ("cycle", (6, 1), (6, 1)),
}


def librispeech(args) -> None:
    """Set the sizes of the paper's LibriSpeech experiment, whatever fairseq's defaults are: Pre-LN, 512/2048, tied."""
    set_defaults(
        args,
        encoder_embed_dim=512,
        encoder_ffn_embed_dim=2048,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_normalize_before=True,
        decoder_normalize_before=True,
        share_decoder_input_output_embed=True,
    )
    base_architecture(args)


def check(args) -> None:
    """Refuse sizes that cannot be right while parsing: fairseq would only notice after it has made --save-dir."""
    check_heads(args, "encoder", "decoder")
    output_dim = int(args.decoder_output_dim)  # text, when it came from the command line
    if args.share_decoder_input_output_embed and output_dim != (args.factorized_embed_dim or args.decoder_embed_dim):
        refuse(
            f"--share-decoder-input-output-embed needs one width, but --decoder-output-dim is {output_dim} and "
            f"--decoder-embed-dim is {args.decoder_embed_dim}: --factorized-embed-dim makes both narrower"
        )
    if args.conv_version != "s2t_transformer":
        return
    kernels = str(args.conv_kernel_sizes)
    if not re.fullmatch(r"\d+(,\d+)*", kernels) or any(int(size) % 2 == 0 for size in kernels.split(",")):
        # With an even size the convolutions return another number of frames than fairseq's padding mask counts.
        refuse(f"--conv-kernel-sizes {kernels} must be odd whole numbers, such as 5,5")
    if args.conv_channels < 2 or args.conv_channels % 2:
        refuse(f"--conv-channels {args.conv_channels} must be even: the gated convolutions halve it")


def check_pretrained(args) -> None:
    """Refuse a pretrained encoder that is not there; fairseq would train without it after a warning."""
    path = getattr(args, "load_pretrained_encoder_from", None)
    if path is not None and not Path(path).is_file():
        refuse(f"--load-pretrained-encoder-from {path}: there is no such file")


def register_architecture(preset: str, size: str, upstream_architecture, universal=None) -> None:
    """Register ``s2t_transformer_shared_{preset}{size}``.

    Args:
        preset: a key of `PRESETS`.
        size: the end of the name.
        upstream_architecture: the function that fills in the other defaults.
        universal: width, FFN width and heads in place of that function's, or None.
    """
    strategy, *depths = PRESETS[preset]
    depths = dict(zip(("encoder", "decoder"), depths, strict=True))

    def architecture(args):
        for stack, (num_layers, _) in depths.items():
            set_defaults(args, **{f"{stack}_layers": num_layers})
        if universal is not None:  # fairseq's functions give the decoder the encoder's widths
            width, ffn, heads = universal
            set_defaults(args, encoder_embed_dim=width, encoder_ffn_embed_dim=ffn)
            set_defaults(args, encoder_attention_heads=heads, decoder_attention_heads=heads)
        resolve_factorized_embedding(args, "decoder_output_dim")
        upstream_architecture(args)
        check(args)
        if not hasattr(args, "_name"):  # parsing a command line, not rebuilding a model
            check_pretrained(args)
        for stack, (_, num_unique) in depths.items():
            resolve_sharing(args, stack, strategy, num_unique)

    architecture.__doc__ = ", ".join(f"{stack}: N={n}, M={m}" for stack, (n, m) in depths.items()) + f" ({strategy})."
    register_model_architecture("s2t_transformer_shared", f"s2t_transformer_shared_{preset}{size}")(architecture)


for preset in PRESETS:
    for size, (upstream_architecture, universal) in SIZES.items():
        register_architecture(preset, size, upstream_architecture, universal if preset == "universal" else None)
    if preset != "universal":
        register_architecture(preset, "_librispeech", librispeech)
