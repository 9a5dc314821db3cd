"""Bytes of the activations in one training step, followed over fake tensors."""

import weakref

import torch
from fairseq.modules import AdaptiveInput
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .fake_training import fake_training, run_forward


class PeakMemory(TorchDispatchMode):
    """Follows which tensors are alive.

    Attributes:
        peak: the most bytes that were alive at once, of tensors made within.
    """

    def __init__(self):
        super().__init__()
        self.alive = self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {id(tensor.untyped_storage()) for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor):
                self.note(tensor.untyped_storage(), before)
        return result

    def note(self, storage, before: set[int]) -> None:
        if id(storage) in before or storage in self.known:
            return
        self.known.add(storage)
        size = storage.nbytes()
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self.free, size)

    def free(self, size: int) -> None:
        self.alive -= size


def measure_activations(model, source_length: int, target_length: int, sentences: int) -> int:
    """Return the bytes of activations at their peak in one training step.

    Follows the tensors alive during the forward pass, the log-softmax over all symbols, the loss and the backward
    pass in fp32, with dropout, all layers and unfused attention, as shapes only. Weights and their gradients are left
    out, as they are counted elsewhere: each gradient is dropped as soon as a layer has made it. What a GPU's
    allocator adds, and what fused attention saves, is not in it.

    Args:
        model: a model of fake tensors.
        source_length: S, tokens or frames.
        target_length: T.
        sentences: B.

    Raises:
        ValueError: the work depends on the words, as with an adaptive softmax.
    """
    softmax = getattr(getattr(model, "decoder", None), "adaptive_softmax", None)
    if softmax is not None or isinstance(getattr(getattr(model, "decoder", None), "embed_tokens", None), AdaptiveInput):
        raise ValueError("the activations of adaptive inputs and an adaptive softmax depend on the words")
    with fake_training(model, source_length), PeakMemory() as memory:
        scores = run_forward(model, source_length, target_length, sentences)
        log_probs = torch.log_softmax(scores, -1, dtype=torch.float32).flatten(0, 1)
        torch.nn.functional.nll_loss(log_probs, torch.zeros(len(log_probs), dtype=torch.long)).backward()
    return memory.peak
