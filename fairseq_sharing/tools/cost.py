"""What a model costs: parameters, memory, bytes to save and to send, operations.

Nothing is trained or even computed.
"""

from dataclasses import asdict, dataclass, field

from .activations import measure_activations
from .fake_training import choose_lengths
from .flops import count_flops
from .model import Subject, sharing_of, stacks_of
from .sizes import count_checkpoint, count_components, count_memory


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
    memory = count_memory(model)
    figures = Figures(
        name=subject.name,
        vocabulary=subject.sizes,
        stacks={stack: describe_stack(layers) for stack, layers in stacks_of(model).items()},
        parameters=count_components(model),
        lengths=lengths,
        memory=memory,
        all_reduced={name: each["gradients"] for name, each in memory.items()},
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
