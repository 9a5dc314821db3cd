"""Masked language modelling: fairseq's RoBERTa with ALBERT's two ideas, factorised embeddings and shared layers.

Source: Lan et al., "ALBERT: A Lite BERT for Self-supervised Learning of Language Representations", arXiv 1909.11942,
sections 3.1 and 3.2, table 1. Token and position embeddings, their LayerNorm and dropout are E wide; one biased linear
layer takes them to width H; N Post-LN layers are computed from M parameter sets (ALBERT's groups, `sequence`).

Weights start as RoBERTa's do, normal with a standard deviation of 0.02: RobertaModel's constructor initialises the
whole model itself. ALBERT's normal is cut off at two standard deviations. There are no segment embeddings, because
fairseq's tasks supply no segments, and no sentence-order objective.
"""

import torch
from fairseq.models import register_model, register_model_architecture
from fairseq.models.roberta import RobertaEncoder, RobertaModel, base_architecture
from fairseq.models.transformer import TransformerEncoder
from fairseq.modules import LayerNorm
from fairseq.modules.gelu import gelu_accurate
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import nn

from ..architecture import check_heads, check_quant_noise, set_defaults
from ..arguments import resolve_sharing
from ..embedding import FactorizedEmbedding
from ..options import add_factorized_args, add_layernorm_args
from ..refusals import refuse
from ..shared_model import SharedLayers
from ..upstream.data_folder import check_data


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return what fairseq's `gelu_accurate`, ALBERT's activation, returns, from one kernel instead of eight."""
    return nn.functional.gelu(x, approximate="tanh")


class FactorizedSentenceEncoder(TransformerEncoder):
    """fairseq's Transformer encoder, E wide below the embedding's projection and H wide above it.

    fairseq sizes positions and embedding LayerNorm by the embedding's width, here E.
    """

    def __init__(self, args, dictionary, embed_tokens: FactorizedEmbedding):
        super().__init__(args, dictionary, embed_tokens)
        if self.layer_norm is not None and embed_tokens.projection is not None:
            self.layer_norm = LayerNorm(embed_tokens.hidden_dim)  # Pre-LN's last one, above the projection

    def forward_embedding(self, src_tokens, token_embedding=None):
        """Embed at width E as fairseq does, then project.

        Args:
            src_tokens: symbols.  # B x T
            token_embedding: rows looked up before.  # B x T x E

        Returns:
            The input of the first layer (B x T x H), and the rows without positions (B x T x E).
        """
        x, embed = super().forward_embedding(src_tokens, token_embedding)
        return self.embed_tokens.project(x), embed


class FactorizedRobertaEncoder(RobertaEncoder):
    """fairseq's RoBERTa encoder and masked-LM head with a factorised embedding."""

    def build_embedding(self, vocab_size, embedding_dim, padding_idx):
        """Build V x E and E x H; ``embedding_dim`` is H, as RoBERTa passes it."""
        return FactorizedEmbedding(vocab_size, self.args.factorized_embed_dim, embedding_dim, padding_idx)

    def build_encoder(self, args, dictionary, embed_tokens):
        """Build the stack of layers."""
        encoder = FactorizedSentenceEncoder(args, dictionary, embed_tokens)
        encoder.apply(init_bert_params)
        return encoder

    def build_lm_head(self, embed_dim, output_dim, activation_fn, weight):
        """Build the head: dense H -> E, activation, LayerNorm(E), then V x E and a bias for each symbol."""
        head = super().build_lm_head(self.args.factorized_embed_dim, output_dim, activation_fn, weight)
        if embed_dim != self.args.factorized_embed_dim:
            head.dense = nn.Linear(embed_dim, self.args.factorized_embed_dim)
        return head


class FactorizedRobertaModel(RobertaModel):
    """fairseq's RoBERTa with a factorised embedding. Upstream names its encoder in ``build_model``; so does this."""

    @classmethod
    def hub_models(cls):
        """Return no downloads: upstream's are RoBERTa's."""
        return {}

    @classmethod
    def add_args(cls, parser):
        """Add RoBERTa's flags and those of the embedding and the LayerNorms."""
        super().add_args(parser)
        add_factorized_args(parser)
        add_layernorm_args(parser)

    @classmethod
    def build_model(cls, args, task):
        """Build a model from complete arguments."""
        model = cls(args, FactorizedRobertaEncoder(args, task.source_dictionary))
        for module in model.modules():
            if hasattr(module, "normalized_shape"):  # torch's LayerNorm and apex's
                module.eps = args.layernorm_eps
            if getattr(module, "activation_fn", None) is gelu_accurate:
                module.activation_fn = gelu_tanh
        return model


@register_model("albert_encoder")
class AlbertEncoderModel(SharedLayers, FactorizedRobertaModel):
    """An encoder for masked language modelling and classification with N layers from M parameter sets."""

    STACKS = {"encoder": "encoder.sentence_encoder.layers"}
    FROM_TASK = ("max_positions",)  # at least --tokens-per-sample


# Size -> (N, width H, FFN width, heads); E is 128 and M is 1 in all of them.
SIZES = {
    "": (12, 768, 3072, 12),
    "_base": (12, 768, 3072, 12),
    "_large": (24, 1024, 4096, 16),
    "_xlarge": (24, 2048, 8192, 16),
    "_xxlarge": (12, 4096, 16384, 64),
}
EMBED_DIM = 128
POSITIONS = 512


def check(args) -> None:
    """Refuse what does not fit together while parsing: fairseq would only notice after it has made --save-dir.

    Raises:
        ValueError: with the flags and their values.
    """
    check_heads(args, "encoder")
    check_quant_noise(args, "encoder")
    if args.factorized_embed_dim < 1:
        refuse(f"--factorized-embed-dim {args.factorized_embed_dim} must be at least 1")
    if not args.layernorm_eps > 0:
        refuse(f"--layernorm-eps {args.layernorm_eps} must be greater than 0")
    block = getattr(args, "tokens_per_sample", None)
    if getattr(args, "task", None) == "masked_lm" and block is not None and block > args.max_positions:
        refuse(f"--tokens-per-sample {block} does not fit into --max-positions {args.max_positions}")


def register_architecture(size: str) -> None:
    """Register ``albert_encoder{size}``."""
    num_layers, width, ffn, heads = SIZES[size]

    def architecture(args):
        set_defaults(
            args,
            encoder_layers=num_layers,
            encoder_embed_dim=width,
            encoder_ffn_embed_dim=ffn,
            encoder_attention_heads=heads,
            factorized_embed_dim=EMBED_DIM,
            layernorm_eps=1e-12,
            activation_fn="gelu_accurate",
            # As many as sentence_prediction asks for, so that fine-tuning finds them; more where blocks are longer.
            max_positions=max(POSITIONS, getattr(args, "tokens_per_sample", None) or 0),
        )
        base_architecture(args)
        check_data(args)
        check(args)
        resolve_sharing(args, "encoder", "sequence", 1)

    architecture.__doc__ = f"{num_layers} layers of width {width} from one parameter set."
    register_model_architecture("albert_encoder", f"albert_encoder{size}")(architecture)


for size in SIZES:
    register_architecture(size)
