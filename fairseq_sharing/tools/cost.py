"""What a model costs: parameters, memory, bytes to save and to send, operations. Nothing is trained or even computed.

Parameters and bytes are counted from the tensors' shapes. FLOPs come from torch's own counter, which sees every matrix
product and convolution of a training's forward pass over fake tensors: each of N layers counts, whatever it shares, and
keys and values of the encoder output count once for the layers that take them from one another (see `attention`).
"""

import re
import weakref
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch
from fairseq.modules import AdaptiveInput
from fairseq.modules.layer_drop import LayerDropModuleList
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ..attention import SharedProjection
from .model import Subject, paths_of, sharing_of, stacks_of

# What modules outside of the stacks belong to, by a part of their name; the first that fits. A tensor that has two
# names, such as a tied output, belongs to the component that comes first.
COMPONENTS = {
    "convolutions": ("encoder.subsample.",),
    "embeddings": ("embed_tokens", "embed_positions", "project_in_dim"),
    "encoder": (),
    "decoder": (),
    "norms": (),
    "head": ("project_out_dim", "output_projection", "adaptive_softmax", "lm_head", "classification_heads"),
    "other": ("",),
}
# The modules of the head whose operations add up; an adaptive softmax is not called as a whole.
HEADS = re.compile(r"decoder\.(project_out_dim|output_projection|adaptive_softmax\.(head|tail\.\d+))|encoder\.lm_head")
# Length of source and target; frames of filterbanks for speech.
LENGTHS = {"translation": (32, 32), "language model": (0, 512), "speech": (1000, 32), "masked language model": (512, 0)}
# Bytes of each parameter: weight, gradient, Adam's two moments, fp32 masters with their gradients (optim/fp16_optimizer
# keeps both, --memory-efficient-fp16 neither), and what workers exchange.
PRECISIONS = {
    "fp32": {"weights": 4, "gradients": 4, "Adam's moments": 8, "fp32 masters": 0},
    "--fp16": {"weights": 2, "gradients": 2, "Adam's moments": 8, "fp32 masters": 8},
    "--memory-efficient-fp16": {"weights": 2, "gradients": 2, "Adam's moments": 8, "fp32 masters": 0},
}
ADAM_BYTES = 8  # two moments in fp32, of each parameter, in a checkpoint


@dataclass
class Figures:
    """What a model costs.

    Attributes:
        name: what the model is called.
        vocabulary: symbols in the dictionaries of the source and the target.
        stacks: sizes, layers N, parameter sets M, assignment and shared parts of each stack, and how many of its layers
            project the encoder output in training.
        parameters: unique parameters and parameters without sharing, by component; they add up to the model.
        lengths: the length of source and target that FLOPs and activations are for.
        flops: floating-point operations of a training's forward pass per token of the target (of the only text, where
            there is one), by component; None where the pass cannot be followed.
        why_no_flops: the reason then.
        memory: bytes in training without activations, by precision and kind.
        all_reduced: bytes of the gradients that workers exchange per update, by precision.
        checkpoint: bytes of the tensors in a checkpoint, ``model`` alone and ``with optimizer``.
        activations: bytes of the activations at their peak, see `measure_activations`; None where not asked for.
        sentences: sentences in the batch that ``activations`` is for.
    """

    name: str
    vocabulary: tuple[int, int]
    stacks: dict[str, dict]
    parameters: dict[str, dict[str, int]]
    lengths: tuple[int, int]
    flops: dict[str, float] | None = None
    why_no_flops: str | None = None
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    all_reduced: dict[str, int] = field(default_factory=dict)
    checkpoint: dict[str, int] = field(default_factory=dict)
    activations: int | None = None
    sentences: int | None = None

    @property
    def unique(self) -> int:
        return sum(row["unique"] for row in self.parameters.values())

    @property
    def unshared(self) -> int:
        return sum(row["without sharing"] for row in self.parameters.values())

    @property
    def total_flops(self) -> float | None:
        return None if self.flops is None else sum(self.flops.values())

    def as_json(self) -> dict:
        """Return everything, with the totals."""
        totals = {"unique": self.unique, "without sharing": self.unshared}
        return {**asdict(self), "total_parameters": totals, "total_flops": self.total_flops}


def family_of(model) -> str:
    """Return a key of `LENGTHS`."""
    if hasattr(getattr(model, "encoder", None), "subsample"):
        return "speech"
    if not hasattr(model, "decoder"):
        return "masked language model"
    return "translation" if hasattr(model, "encoder") else "language model"


def measure(
    subject: Subject,
    source_length: int | None = None,
    target_length: int | None = None,
    sentences: int | None = None,
) -> Figures:
    """Return all figures of a model.

    Args:
        subject: the model.
        source_length: tokens of the source, or frames of filterbanks; the family's of `LENGTHS` by default.
        target_length: tokens of the target, or of the only text where there is one.
        sentences: measure the activations of so many sentences too.

    Raises:
        ValueError: a length does not fit the model, or its activations cannot be measured.
    """
    model = subject.model
    lengths = choose_lengths(model, source_length, target_length)
    figures = Figures(
        name=subject.name,
        vocabulary=subject.sizes,
        stacks={stack: describe_stack(layers) for stack, layers in stacks_of(model).items()},
        parameters=count_components(model),
        lengths=lengths,
        memory=count_memory(model),
        all_reduced={name: each["gradients"] for name, each in count_memory(model).items()},
        checkpoint=count_checkpoint(model),
    )
    try:
        figures.flops = count_flops(model, *lengths)
    except ValueError as error:
        figures.why_no_flops = str(error)
    if sentences is not None:
        if figures.flops is None:
            raise ValueError(f"--activation-memory {sentences}: {figures.why_no_flops}")
        figures.activations, figures.sentences = measure_activations(model, *lengths, sentences), sentences
    return figures


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


def describe_stack(layers) -> dict:
    """Return sizes, N, M, the assignment and the shared parts of a stack, and how many layers project the source."""
    sharing = sharing_of(layers)
    layer = layers[0]
    return {
        "width": layer.embed_dim,
        "ffn": layer.fc1.out_features,
        "heads": layer.self_attn.num_heads,
        "layers": len(layers),
        "parameter_sets": len(set(sharing.assignment)),
        "assignment": list(sharing.assignment),
        "parts": list(sharing.parts),
        "source_projections": sum(projects_source(layers[index]) for index in range(len(layers))),
    }


def projects_source(layer) -> bool:
    """Whether a layer computes keys and values of the encoder output in training, and takes them from no other."""
    attention = getattr(layer, "encoder_attn", None)
    return attention is not None and getattr(attention.k_proj, "lends", True)


def component_of(name: str, paths: dict[str, str], norms: set[str]) -> str:
    """Return the component of `COMPONENTS` that a parameter, or a module, of this name belongs to."""
    if name.rpartition(".")[0] in norms or name in norms:
        return "norms"
    for stack, path in paths.items():
        if name.startswith(path + "."):
            return stack
    return next(component for component, words in COMPONENTS.items() if any(word in name for word in words))


def count_components(model) -> dict[str, dict[str, int]]:
    """Return unique parameters and parameters without sharing by component; they add up to the model."""
    order = list(COMPONENTS)
    paths = paths_of(model)
    norms = {
        name for name, module in model.named_modules(remove_duplicate=False) if hasattr(module, "normalized_shape")
    }
    owner, copies = {}, dict.fromkeys(order, 0)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        component = component_of(name, paths, norms)
        known = owner.get(id(parameter))
        if known is None or order.index(component) < order.index(known[0]):
            owner[id(parameter)] = (component, parameter.numel())
        if known is not None and any(name.startswith(path + ".") for path in paths.values()):
            copies[component] += parameter.numel()  # one more layer uses it
    counts = {}
    for component in order:
        unique = sum(size for each, size in owner.values() if each == component)
        if unique or component not in ("convolutions", "other", *({"encoder", "decoder"} - paths.keys())):
            counts[component] = {"unique": unique, "without sharing": unique + copies[component]}
    return counts


def count_memory(model) -> dict[str, dict[str, int]]:
    """Return bytes in training with Adam, by precision and kind; frozen parameters have a weight only."""
    every = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return {
        precision: {kind: size * (every if kind == "weights" else trained) for kind, size in sizes.items()}
        for precision, sizes in PRECISIONS.items()
    }


def count_checkpoint(model) -> dict[str, int]:
    """Return bytes of the tensors that fairseq writes, each once: fp32, whatever it trained in."""
    trained = {id(parameter): parameter.numel() for parameter in model.parameters() if parameter.requires_grad}
    tensors = {id(parameter): parameter.numel() * 4 for parameter in model.parameters()}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[id(buffer)] = buffer.numel() * max(4, buffer.element_size())
    records = sum(4 * (len(layers) + 2) for layers in stacks_of(model).values() if sharing_of(layers).shares)
    size = sum(tensors.values()) + records
    return {"model": size, "with optimizer": size + ADAM_BYTES * sum(trained.values())}


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
    """Compute the scores of all symbols; within the model's fake mode and `NoPadding`.

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


def count_flops(model, source_length: int, target_length: int) -> dict[str, float]:
    """Return floating-point operations of a training's forward pass by component, per token of the target.

    A multiplication and its addition count as two. Counted are matrix products, attention among them (all T x T of
    it, as it is computed without a fused kernel), and convolutions. The source's share is in it: S / T of its tokens
    for each token of the target. With an adaptive input all words are of its first band, the most costly; an adaptive
    softmax gives every symbol its score.

    Args:
        model: a model of fake tensors.
        source_length: S, tokens or frames.
        target_length: T; 0 for a masked language model, whose only text is the source.

    Raises:
        ValueError: the forward pass asks for more than shapes.
    """
    paths = paths_of(model)
    embedding = getattr(getattr(model, "decoder", None), "embed_tokens", None)
    mode = next(model.parameters()).fake_mode
    try:
        no_padding = NoPadding(model, source_length)
        if isinstance(embedding, AdaptiveInput):
            model.decoder.embed_tokens = embedding.embeddings[0]
        counter = FlopCounterMode(display=False)
        with mode, training_untied(model), no_padding, sdpa_kernel(SDPBackend.MATH), counter:
            run_forward(model, source_length, target_length)
    except (RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
        raise ValueError(f"the forward pass of {type(model).__name__} cannot be followed: {error}") from error
    finally:
        if embedding is not None:
            model.decoder.embed_tokens = embedding
    counts = {name.partition(".")[2]: sum(found.values()) for name, found in counter.get_flop_counts().items()}
    flops = {
        stack: sum(counts.get(f"{path}.{i}", 0) for i in range(len(stacks_of(model)[stack])))
        for stack, path in paths.items()
    }
    flops["convolutions"] = counts.get("encoder.subsample", 0)
    flops["head"] = sum(value for name, value in counts.items() if HEADS.fullmatch(name))
    flops["embeddings"] = counter.get_total_flops() - sum(flops.values())
    return {name: flops[name] / (target_length or source_length) for name in COMPONENTS if flops.get(name)}


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
    mode, no_padding = next(model.parameters()).fake_mode, NoPadding(model, source_length)
    with mode, training_untied(model), no_padding, sdpa_kernel(SDPBackend.MATH), PeakMemory() as memory:
        scores = run_forward(model, source_length, target_length, sentences)
        log_probs = torch.log_softmax(scores, -1, dtype=torch.float32).flatten(0, 1)
        torch.nn.functional.nll_loss(log_probs, torch.zeros(len(log_probs), dtype=torch.long)).backward()
    return memory.peak
