"""Faster products on the CPU once a model only decodes: matrices in the order in which oneDNN reads them.

A step of beam search multiplies a few rows by every matrix of the decoder, and most of its time is spent so. torch
hands such a product to its BLAS with the matrix as it was trained; packed for oneDNN it takes less (and is kept a second
time). Layers that share parameters share the packed copy too, so there are M of them and not N. The results differ by
rounding. Switched on by fairseq's ``make_generation_fast_``, after which fairseq refuses to train.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Packed:
    """The packed copy of one matrix, made when it is first needed and again when the matrix has changed.

    Copies and pickles of a model have none, and make their own.
    """

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        """Forget the copy."""
        self.made_from = self.matrix = None

    def get(self, weight: Tensor) -> Tensor:
        """Return the packed copy of a matrix."""
        made_from = (id(weight), weight.data_ptr(), weight._version)
        if self.made_from != made_from:
            self.matrix = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
            self.made_from = made_from
        return self.matrix

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
        if (
            not x.is_cpu
            or x.dtype is not torch.float32
            or self.weight.dtype is not torch.float32
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or self.weight.is_inference()  # changes of such tensors are not counted
        ):
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed.get(self.weight), self.bias, "none", [], "")

    def _apply(self, fn, recurse=True):
        self.packed.clear()
        return super()._apply(fn, recurse)


def can_pack() -> bool:
    """Whether this build of torch offers what torch's own compiler uses for linear layers on the CPU."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)


def pack_linears(modules) -> None:
    """Let the linear layers among these modules multiply by packed matrices, one for each parameter.

    torch's attention, which fairseq's encoders use, is handed the matrices and packs nothing.
    """
    if not can_pack():
        return
    copies = {}
    for module in modules:
        if type(module) is nn.Linear:
            module.__class__ = PackedLinear
            module.packed = copies.setdefault(id(module.weight), Packed())
