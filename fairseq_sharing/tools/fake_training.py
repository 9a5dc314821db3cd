"""A training's forward pass over fake tensors: shapes are followed, nothing is computed."""

from contextlib import contextmanager

import torch
from fairseq.modules.layer_drop import LayerDropModuleList
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ..attention import SharedProjection

# Length of source and target; frames of filterbanks for speech.
LENGTHS = {"translation": (32, 32), "language model": (0, 512), "speech": (1000, 32), "masked language model": (512, 0)}


def family_of(model) -> str:
    """Return a key of `LENGTHS`."""
    if hasattr(getattr(model, "encoder", None), "subsample"):
        return "speech"
    if not hasattr(model, "decoder"):
        return "masked language model"
    return "translation" if hasattr(model, "encoder") else "language model"


def choose_lengths(model, source_length: int | None, target_length: int | None) -> tuple[int, int]:
    """Return the length of source and target, 0 where the model has none.

    Raises:
        ValueError: a length is below 1 or above the model's positions.
    """
    family = family_of(model)
    default = LENGTHS[family]
    if family == "masked language model":  # one text, which is fairseq's source
        source_length, target_length = target_length or source_length, None
    given = {"--source-length": source_length, "--target-length": target_length}
    most = model.max_positions()
    most = most if isinstance(most, tuple) else (0, most) if family == "language model" else (most, 0)
    lengths = []
    for (flag, length), usual, limit in zip(given.items(), default, most, strict=True):
        if usual == 0:
            lengths.append(0)
            continue
        if length is None:
            length = min(usual, limit)
        if not 1 <= length <= limit:
            raise ValueError(f"{flag} {length} must be between 1 and {limit}, the positions of this model")
        lengths.append(length)
    return tuple(lengths)


class NoPadding(TorchFunctionMode):
    """Answers what fairseq asks of numbers, which fake tensors lack: shapes are known, and no sentence has padding.

    Args:
        model: the model.
        source_length: length of every source; of speech, the frames before the convolutions.
    """

    def __init__(self, model, source_length: int):
        super().__init__()
        self.frames = None
        if family_of(model) == "speech":
            lengths = model.encoder.subsample.get_out_seq_lens_tensor(torch.tensor([source_length]))
            self.frames = int(lengths.max())

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch._shape_as_tensor:  # in sinusoidal positions
            return args[0].shape
        if func is torch.Tensor.__bool__:
            return False
        if func is torch.max and self.frames is not None and len(args) == 1:  # the longest sentence, in speech
            return torch.tensor(self.frames)
        return func(*args, **(kwargs or {}))


def run_forward(model, source_length: int, target_length: int, sentences: int = 1):
    """Compute the scores of all symbols; within `fake_training`.

    Returns:
        Scores.  # B x T x V
    """
    symbol = 4  # the first that is none of fairseq's own

    def tokens(length):
        return torch.full((sentences, length), symbol)

    family = family_of(model)
    if family == "masked language model":
        return model(tokens(source_length))[0]
    if family == "language model":
        net_input = {"src_tokens": tokens(target_length)}
    else:
        source = tokens(source_length)
        if family == "speech":
            source = torch.zeros(sentences, source_length, model.encoder.subsample.conv_layers[0].in_channels)
        lengths = torch.full((sentences,), source_length)
        net_input = {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": tokens(target_length)}
    output = model(**net_input)
    softmax = getattr(model.decoder, "adaptive_softmax", None)
    return output[0] if softmax is None else softmax.get_log_prob(output[0], None)


@contextmanager
def training_untied(model):
    """Let a model train with a tensor for every name of a parameter, and without gradients that stay; then undo it.

    Projections that run once for several layers stay tied.
    """
    tied, seen, handles = [], set(), []
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if id(parameter) in seen and not isinstance(module, SharedProjection):
            tied.append((module, leaf, parameter))
            setattr(module, leaf, torch.nn.Parameter(parameter.detach(), parameter.requires_grad))
        seen.add(id(parameter))
    try:
        for parameter in model.parameters():
            handles.append(parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None)))
        model.train()
        for module in model.modules():
            if isinstance(module, LayerDropModuleList):
                module.training = False  # it yields every layer
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, leaf, parameter in tied:
            setattr(module, leaf, parameter)
        model.eval()


@contextmanager
def fake_training(model, source_length: int):
    """Let a model of fake tensors train over shapes alone: untied, without padding, with unfused attention.

    Args:
        model: a model of fake tensors.
        source_length: length of every source, see `NoPadding`.
    """
    mode, no_padding = next(model.parameters()).fake_mode, NoPadding(model, source_length)
    with mode, training_untied(model), no_padding, sdpa_kernel(SDPBackend.MATH):
        yield
