"""Decoder layers that share the parameters of their cross-attention compute its keys and values once.

Every layer of a decoder projects the same encoder output; layers with the same matrices get the same keys and values.
The first layer of each parameter set computes them, the others take them: in training from that layer's projections,
which so run forward and backward once, in incremental decoding from its cache, of which there is one for each set.
Layers, parameters and their names stay what they are, and so does fairseq's attention.
"""

import torch
import torch.nn.functional as F
from fairseq.modules import LayerDropModuleList, MultiheadAttention
from torch import Tensor, nn


class Shelf:
    """Where one projection leaves its output for the layers above that would compute the same.

    Copies and pickles of a model have empty shelves.

    Attributes:
        borrowers: how many will ask for it in one forward pass.
    """

    def __init__(self, borrowers: int):
        self.borrowers = borrowers
        self.clear()

    def clear(self) -> None:
        """Forget what was left here."""
        self.source = self.output = None
        self.left = 0

    def put(self, source: tuple, output: Tensor) -> None:
        """Leave an output and what it was computed from."""
        self.source, self.output, self.left = source, output, self.borrowers

    def take(self, source: tuple) -> Tensor | None:
        """Return what was computed from this source, or None; after the last borrower nothing is kept."""
        if self.source is None or not all(ours is theirs for ours, theirs in zip(self.source, source, strict=True)):
            return None
        output = self.output
        self.left -= 1
        if self.left <= 0:
            self.clear()
        return output

    def __getstate__(self):
        return {"borrowers": self.borrowers}

    def __setstate__(self, state):
        self.__init__(**state)


class SharedProjection(nn.Linear):
    """A projection of the encoder output that tied layers run once in a forward pass of training.

    Attributes:
        shelf: the one of this parameter set.
        lends: whether this is the first layer of the set, which always computes.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Project as torch does.

        Args:
            x: the encoder output.  # T x B x C
        """
        if torch.jit.is_scripting() or not self.training:  # decoding has its caches
            return F.linear(x, self.weight, self.bias)
        return self.project_once(x)

    @torch.jit.unused
    def project_once(self, x: Tensor) -> Tensor:
        """Compute and lend, or borrow; compute without lending where what is lent comes from something else."""
        source = (x, self.weight, self.bias, torch.is_grad_enabled(), torch.is_autocast_enabled())
        output = None if self.lends else self.shelf.take(source)
        if output is None:
            output = F.linear(x, self.weight, self.bias)
            if self.lends:
                self.shelf.put(source, output)
        return output

    def train(self, mode: bool = True):
        """Switch the mode, and forget what a pass that stopped with an error has left."""
        self.shelf.clear()
        return super().train(mode)

    def stand_alone(self) -> None:
        """Become torch's own again."""
        self.__class__ = nn.Linear
        del self.shelf, self.lends


def share_keys_and_values(layers: nn.ModuleList) -> None:
    """Let the cross-attentions of a stack that project with the same parameters do so once.

    Where training computes layers again (activation checkpointing) or leaves some out (LayerDrop), only caches are
    shared.

    Args:
        layers: the tied layers of a decoder, or of anything else, of which nothing changes.
    """
    sets = {}
    for layer in (layers[index] for index in range(len(layers))):  # iterating over a LayerDropModuleList skips layers
        attention = getattr(layer, "encoder_attn", None)
        if type(attention) is MultiheadAttention:
            projections = (attention.k_proj, attention.v_proj)
            parameters = tuple(id(parameter) for each in projections for parameter in each.parameters())
            sets.setdefault(parameters, []).append(layer)
    for owner, *borrowers in sets.values():
        for borrower in borrowers:
            # fairseq reorders this cache only where it has other rows than the order: the owner does, nobody after it.
            borrower.encoder_attn._incremental_state_id = owner.encoder_attn._incremental_state_id
        if borrowers and computes_once(layers, owner):
            for name in ("k_proj", "v_proj"):
                shelf = Shelf(len(borrowers))
                for layer in (owner, *borrowers):
                    projection = getattr(layer.encoder_attn, name)
                    projection.__class__ = SharedProjection
                    projection.shelf, projection.lends = shelf, layer is owner


def computes_once(layers: nn.ModuleList, owner: nn.Module) -> bool:
    """Whether each layer of the stack runs once in a forward pass of training."""
    return not isinstance(layers, LayerDropModuleList) and not hasattr(owner, "precheckpoint_forward")
