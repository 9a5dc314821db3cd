"""Translation: fairseq's Transformer whose encoder and decoder layers share parameters.

Source: Takase & Kiyono, "Lessons on Parameter Sharing across Layers in Transformers", arXiv 2104.06022; defaults are
those of its table 1 (N=12, M=6; Universal: M=1, N=6, widened until its parameter count matches).
"""

from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer.transformer_legacy import (
    base_architecture,
    transformer_iwslt_de_en,
    transformer_wmt_en_de,
    transformer_wmt_en_de_big,
)

from ..architecture import (
    check_adaptive_softmax,
    check_heads,
    check_quant_noise,
    resolve_factorized_embedding,
    set_defaults,
)
from ..arguments import resolve_residual_scaling, resolve_sharing
from ..embedding import ProjectedEmbedding
from ..options import add_factorized_args, add_residual_args
from ..refusals import refuse
from ..shared_model import SharedLayers
from ..upstream.data_folder import check_data


@register_model("transformer_shared")
class SharedTransformerModel(SharedLayers, TransformerModel):
    """fairseq's Transformer with N layers from M parameter sets in each stack, and factorised embeddings.

    With --factorized-embed-dim E all tables are V x E. fairseq's decoder then projects E -> H and, before its output,
    H -> E by itself; the encoder gets the projection here.
    """

    @classmethod
    def add_args(cls, parser):
        """Add the flags of the factorised embedding and of residual scaling too."""
        super().add_args(parser)
        add_factorized_args(parser)
        add_residual_args(parser)

    @classmethod
    def build_embedding(cls, args, dictionary, embed_dim, path=None):
        """Build a table of width E where that is given."""
        return super().build_embedding(args, dictionary, getattr(args, "factorized_embed_dim", None) or embed_dim, path)

    @classmethod
    def build_encoder(cls, args, src_dict, embed_tokens):
        """Build fairseq's encoder over an embedding that reads as wide as its layers."""
        if embed_tokens.embedding_dim != args.encoder_embed_dim:
            embed_tokens = ProjectedEmbedding(embed_tokens, args.encoder_embed_dim)
        return super().build_encoder(args, src_dict, embed_tokens)


# Size -> (fairseq's architecture, what Universal widens: width, FFN width and heads, about the parameters of M=6).
SIZES = {
    "": (base_architecture, (1024, 4096, 16)),
    "_iwslt_de_en": (transformer_iwslt_de_en, (1024, 2048, 8)),
    "_wmt_en_de": (transformer_wmt_en_de, (1024, 4096, 16)),
    "_wmt_en_de_big": (transformer_wmt_en_de_big, (2048, 8192, 32)),
}
# Name -> (strategy, N, M). With M=1 all strategies are one.
PRESETS = {
    "sequence": ("sequence", 12, 6),
    "cycle": ("cycle", 12, 6),
    "cycle_rev": ("cycle_rev", 12, 6),
    "universal": ("cycle", 6, 1),
}


def check_widths(args) -> None:
    """Refuse widths that do not fit together here: fairseq would only notice after it has made --save-dir."""
    check_heads(args, "encoder", "decoder")
    check_quant_noise(args, "encoder", "decoder")
    check_adaptive_softmax(args)
    one_table = next(
        (name for name in ("share_all_embeddings", "merge_src_tgt_embed") if getattr(args, name, False)), None
    )
    tied = one_table or args.share_decoder_input_output_embed
    output_dim = int(args.decoder_output_dim)  # text, when it came from the command line
    table = args.factorized_embed_dim or args.decoder_embed_dim
    if tied and output_dim != table:
        refuse(
            f"an output tied to the decoder's embedding needs one width, but --decoder-output-dim is "
            f"{args.decoder_output_dim} and --decoder-embed-dim is {args.decoder_embed_dim}: "
            "--factorized-embed-dim makes both narrower"
        )
    if one_table and args.encoder_embed_dim != args.decoder_embed_dim:
        refuse(
            f"--{one_table.replace('_', '-')} needs one width, but --encoder-embed-dim is {args.encoder_embed_dim} "
            f"and --decoder-embed-dim is {args.decoder_embed_dim}"
        )


def register_architecture(preset: str, size: str) -> None:
    """Register ``transformer_shared_{preset}{size}``."""
    strategy, num_layers, num_unique = PRESETS[preset]
    upstream_architecture, (width, ffn, heads) = SIZES[size]

    def architecture(args):
        set_defaults(args, encoder_layers=num_layers, decoder_layers=num_layers)
        if preset == "universal":
            set_defaults(args, encoder_embed_dim=width, encoder_ffn_embed_dim=ffn, encoder_attention_heads=heads)
            # The decoder is as wide as the encoder, whatever that was set to, as in fairseq's base architecture.
            set_defaults(
                args,
                decoder_embed_dim=args.encoder_embed_dim,
                decoder_ffn_embed_dim=args.encoder_ffn_embed_dim,
                decoder_attention_heads=heads,
            )
        resolve_factorized_embedding(args, "decoder_output_dim")
        upstream_architecture(args)
        check_data(args)
        check_widths(args)
        resolve_residual_scaling(args, "encoder", "decoder")
        for stack in ("encoder", "decoder"):
            resolve_sharing(args, stack, strategy, num_unique)

    architecture.__doc__ = f"{num_layers} layers from {num_unique} parameter sets in each stack ({strategy})."
    register_model_architecture("transformer_shared", f"transformer_shared_{preset}{size}")(architecture)


for preset in PRESETS:
    for size in SIZES:
        register_architecture(preset, size)
