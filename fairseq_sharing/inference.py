"""Faster products on the CPU once a model only decodes: packed matrices, and query, key and value in one product.

A step of beam search multiplies a few rows by every matrix of the decoder, and most of its time is spent so. torch's
BLAS takes a matrix as it was trained; packed, in the order in which oneDNN reads it, it takes less time, and a second
place in memory. Layers that share parameters share the packed copy too: there are M of them and not N. Results differ
by rounding. Switched on by fairseq's ``make_generation_fast_``, after which fairseq refuses to train.
"""

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

# Entries of the smallest matrix that is packed. A packed product takes 20 microseconds more to start with, which
# a matrix of 256 x 256 does not make up for at the rows of a beam search, and one of 512 x 256 does.
SMALLEST = 1 << 17


class Packed:
    """The packed copy of a matrix, or of several on top of each other, and their bias.

    It is made when it is first needed and again when a parameter has changed, unless through ``.data``, of which torch
    keeps no count. Copies and pickles of a model have none, and make their own.
    """

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        """Forget the copy."""
        # What it was made from, those tensors, so that no other takes their place, matrix and bias: one value, so that
        # threads may share it.
        self.copy = (None, None, None, None)

    def get(self, *layers: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """Return packed matrix and bias of these layers, which read the same input."""
        tensors = [tensor for layer in layers for tensor in (layer.weight, layer.bias) if tensor is not None]
        made_from = [(id(tensor), tensor.data_ptr(), tensor._version) for tensor in tensors]
        known, _, matrix, bias = self.copy
        if known != made_from:
            weights, biases = ([getattr(layer, name) for layer in layers] for name in ("weight", "bias"))
            whole = torch.cat(weights) if len(layers) > 1 else weights[0]
            matrix = torch.ops.mkldnn._reorder_linear_weight(whole.detach())
            bias = torch.cat(biases).detach() if len(layers) > 1 else biases[0]
            self.copy = (made_from, tensors, matrix, bias)
        return matrix, bias

    def __getstate__(self):
        return {}

    def __setstate__(self, state):
        self.__init__()


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by a packed matrix where that is possible: in fp32, on the CPU, without gradient.

    Attributes:
        packed: what all layers with this matrix share.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Multiply as torch does."""
        if torch.jit.is_scripting():
            return F.linear(x, self.weight, self.bias)
        return self.multiply(x)

    @torch.jit.unused
    def multiply(self, x: Tensor) -> Tensor:
        """Multiply by the packed matrix, or else as torch does."""
        return multiply(x, self.packed, self) if self.is_packed(x) else F.linear(x, self.weight, self.bias)

    @torch.jit.unused
    def is_packed(self, x: Tensor) -> bool:
        """Whether this input can be multiplied by the packed matrix."""
        return (
            x.is_cpu
            and x.dtype is torch.float32
            and self.weight.dtype is torch.float32
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
            and not torch.jit.is_tracing()
            and not self.weight.is_inference()  # changes of such tensors are not counted
        )

    def _apply(self, fn, recurse=True):
        self.packed.clear()
        return super()._apply(fn, recurse)


class Joint:
    """The three projections of a self-attention, and what one product has left for the second and the third.

    Attributes:
        layers: of query, key and value.
    """

    def __init__(self, layers):
        self.layers = layers
        self.left = (None, {})  # an input, and what each layer makes of it: one value, so that threads may share it

    def __getstate__(self):
        return {"layers": self.layers}

    def __setstate__(self, state):
        self.__init__(**state)


class JointLinear(PackedLinear):
    """One of the three projections of a self-attention; the first computes all three, which fairseq asks for in turn.

    Attributes:
        joint: what the three have in common.
    """

    @torch.jit.unused
    def multiply(self, x: Tensor) -> Tensor:
        """Compute all three, or take what was computed from the same input, or else multiply as torch does."""
        layers = self.joint.layers
        if self is layers[0] and self.is_packed(x):
            parts = multiply(x, self.packed, *layers).chunk(3, dim=-1)
            self.joint.left = (x, dict(zip(layers, parts, strict=True)))
        source, parts = self.joint.left
        part = parts.pop(self, None) if source is x else None
        if not parts:
            self.joint.left = (None, {})
        return F.linear(x, self.weight, self.bias) if part is None else part


def multiply(x: Tensor, packed: Packed, *layers: nn.Linear) -> Tensor:
    """Return what these layers compute of the same input, side by side in the last dimension."""
    matrix, bias = packed.get(*layers)
    return torch.ops.mkldnn._linear_pointwise(x, matrix, bias, "none", [], "")


def can_pack() -> bool:
    """Whether this build of torch offers what torch's own compiler uses for linear layers on the CPU."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)


def pack_linears(modules) -> None:
    """Let the linear layers among these modules multiply by packed matrices, one for each parameter.

    Args:
        modules: those of a decoder; an encoder runs once where a decoder runs once for each symbol.
    """
    if not can_pack():
        return
    modules, copies = list(modules), {}

    def switch(module: nn.Linear, kind: type) -> None:
        module.__class__ = kind
        module.packed = copies.setdefault(id(module.weight), Packed())

    for module in modules:
        if type(module) is MultiheadAttention and module.self_attention:
            projections = [module.q_proj, module.k_proj, module.v_proj]
            plain = all(type(each) is nn.Linear and each.bias is not None for each in projections)
            if plain and 3 * module.q_proj.weight.numel() >= SMALLEST:
                joint = Joint(projections)
                for each in projections:
                    switch(each, JointLinear)
                    each.joint = joint
    for module in modules:
        if type(module) is nn.Linear and module.weight.numel() >= SMALLEST:
            switch(module, PackedLinear)
