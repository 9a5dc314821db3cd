"""The factorised embedding: V x E and E x H in place of V x H.

Source: Lan et al., "ALBERT: A Lite BERT for Self-supervised Learning of Language Representations", arXiv 1909.11942,
section 3.1. With V=30,000 and H=768 the embedding shrinks from 23.0 to 3.9 million parameters at E=128.
This file knows torch, neither fairseq nor its flags.
"""

from torch import Tensor, nn


class ProjectedEmbedding(nn.Module):
    """An embedding of width E that reads as one of width H: looks up, then projects without bias.

    For a model that goes on at width H and has no projection of its own, as fairseq's encoder; its decoder has one.

    Attributes:
        embedding: the table V x E, which may be tied to others.
        embedding_dim: H, the width of what comes out.
    """

    def __init__(self, embedding: nn.Embedding, hidden_dim: int):
        super().__init__()
        self.embedding = embedding
        self.embedding_dim = hidden_dim
        self.padding_idx = embedding.padding_idx
        self.projection = nn.Linear(embedding.embedding_dim, hidden_dim, bias=False)
        nn.init.xavier_uniform_(self.projection.weight)  # as the decoder's

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up and project.

        Args:
            tokens: symbols.  # B x T

        Returns:
            Their vectors.  # B x T x H
        """
        return self.projection(self.embedding(tokens))


class FactorizedEmbedding(nn.Embedding):
    """A table of V rows of width E, and the biased linear layer that takes width E to width H.

    Both factors live here, but are applied in two steps, so that a model can add positions, a LayerNorm and dropout
    at width E in between. Without such, ``embedding.project(embedding(tokens))`` is the whole. An output is tied to
    the table by its attribute ``weight``. Where E = H there is no second factor, and this is ``nn.Embedding``: same
    parameters, same names.

    Attributes:
        hidden_dim: H.
        projection: the layer E -> H, or None where E = H.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, hidden_dim: int, padding_idx: int | None = None):
        """Make both factors.

        Args:
            num_embeddings: V.
            embedding_dim: E, which may be smaller than, equal to or larger than H.
            hidden_dim: H.
            padding_idx: the row of zeros that gets no gradient.

        Raises:
            ValueError: a size is below 1.
        """
        for name, size in (("V", num_embeddings), ("E", embedding_dim), ("H", hidden_dim)):
            if size < 1:
                raise ValueError(f"a factorised embedding needs {name} of at least 1, not {size}")
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self.hidden_dim = hidden_dim
        self.projection = nn.Linear(embedding_dim, hidden_dim) if embedding_dim != hidden_dim else None

    def project(self, x: Tensor) -> Tensor:
        """Take width E to width H, without activation.

        Args:
            x: looked-up rows, or what a model made of them.  # ... x E

        Returns:
            The same at width H; ``x`` itself where E = H.  # ... x H
        """
        return x if self.projection is None else self.projection(x)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hidden_dim={self.hidden_dim}"
