"""The mechanism: tie the parameters of an existing stack of layers to an assignment.

The stack keeps its N layer objects, each with its own attention cache, dropout and hooks; only parameters are shared
(looping one object over several slots trains well and decodes wrongly, because fairseq keys caches by module).
This file knows torch, neither fairseq nor its flags.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from .strategies import owners, picture

# A part is named by the submodules, or bare parameters, of a fairseq layer that make it up.
PARTS = {
    "attention": {"self_attn", "encoder_attn", "c_attn"},
    "ffn": {"fc1", "fc2", "w_resid"},
    "norm": {"self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm", "attn_ln", "ffn_layernorm"},
}
# The LayerNorms that go with a sublayer when only that sublayer is shared.
NORMS_OF = {
    "attention": {"self_attn_layer_norm", "encoder_attn_layer_norm", "attn_ln"},
    "ffn": {"final_layer_norm", "ffn_layernorm"},
    "norm": set(),
}
ALL_PARTS = tuple(PARTS)
# Each of the N layers keeps its own, whatever is shared, as in the authors' code: the residual scalings of Admin.
NEVER_SHARED = "residual_delta"


@dataclass(frozen=True)
class Sharing:
    """Who owns what in one stack; kept as the stack's attribute ``sharing``.

    Attributes:
        assignment: the parameter set of each of the N layers.
        parts: which parts of a layer follow the assignment, a subset of `ALL_PARTS`.
    """

    assignment: tuple[int, ...]
    parts: tuple[str, ...] = ALL_PARTS

    @property
    def owners(self) -> list[int]:
        return owners(list(self.assignment))

    @property
    def shares(self) -> bool:
        """Whether any layer borrows."""
        return len(set(self.assignment)) < len(self.assignment)

    @property
    def depth(self) -> str:
        """N and, where layers share, M in words."""
        n, m = len(self.assignment), len(set(self.assignment))
        sets = f" from {m} parameter set{'s' if m > 1 else ''}" if self.shares else ""
        return f"{n} layer{'s' if n > 1 else ''}{sets}"

    def same_as(self, other: "Sharing") -> bool:
        """Whether both tie the same parameters, however their sets are numbered."""
        if not self.shares and not other.shares:
            return len(self.assignment) == len(other.assignment)
        return self.owners == other.owners and set(self.parts) == set(other.parts)

    def __str__(self) -> str:
        parts = f" ({','.join(self.parts)} only)" if self.shares and set(self.parts) != set(ALL_PARTS) else ""
        return picture(list(self.assignment)) + parts


def is_shared(name: str, parts: Iterable[str]) -> bool:
    """Whether a parameter of a layer is shared when these parts are.

    A LayerNorm is shared with ``norm``. When ``attention`` or ``ffn`` is the only part, the LayerNorms of that
    sublayer go with it, as in the ablation of ALBERT (Lan et al., arXiv 1909.11942, table 4).

    Args:
        name: the parameter's name within its layer, such as ``self_attn.k_proj.weight``.
        parts: a subset of `ALL_PARTS`.

    Raises:
        ValueError: only some parts are shared and the parameter belongs to none that is known.
    """
    if name.endswith(NEVER_SHARED):
        return False
    parts = set(parts)
    if parts == set(ALL_PARTS):
        return True
    head = name.split(".")[0]
    shared = set().union(*(PARTS[part] for part in parts))
    if len(parts) == 1:
        shared |= NORMS_OF[next(iter(parts))]
    if head not in set().union(*PARTS.values()):
        raise ValueError(f"parameter {name} is part of neither {', nor '.join(ALL_PARTS)}: share whole layers instead")
    return head in shared


def share_layers(layers: nn.ModuleList, assignment: Sequence[int], parts: Sequence[str] = ALL_PARTS) -> Sharing:
    """Tie the layers of a stack in place: each parameter of a borrower becomes its owner's.

    The owner of a set is the first layer that uses it. Buffers, if a layer has any, stay with their layer.

    Args:
        layers: N layers of the same structure.
        assignment: N entries, see `strategies`.
        parts: which parts of each layer to share.

    Returns:
        The record of what was tied, also left as ``layers.sharing``.

    Raises:
        ValueError: there is nothing to tie, the assignment does not fit the stack, or two layers that should share
            differ in their parameters' names or shapes, or are wrapped by FullyShardedDataParallel.
    """
    if len(layers) == 0 and assignment:
        raise ValueError(f"there are no layers to share in this stack as {picture(list(assignment))}")
    if len(layers) != len(assignment):
        raise ValueError(
            f"the assignment {picture(list(assignment))} is for {len(assignment)} layers, not for {len(layers)}"
        )
    sharing = Sharing(tuple(assignment), tuple(parts))
    if sharing.shares and any(type(module).__name__ == "FullyShardedDataParallel" for module in layers.modules()):
        raise ValueError(
            "layers wrapped by FullyShardedDataParallel cannot share parameters: use another --ddp-backend"
        )
    layers.sharing = sharing
    tie_layers(layers)
    return sharing


def tie_layers(layers: nn.ModuleList) -> None:
    """Tie a stack as its ``sharing`` says; what is tied already stays as it is."""
    for index, owner in enumerate(layers.sharing.owners):  # by index: iterating over a LayerDropModuleList skips layers
        if index != owner:
            tie(layers[owner], layers[index], layers.sharing.parts, f"layers {owner} and {index}")


def untie_layers(layers: nn.ModuleList) -> None:
    """Give every borrower a copy of its own of what it borrows: the stack computes the same and shares nothing."""
    for index, _, name in shared_names(layers):
        path, _, leaf = name.rpartition(".")
        module = layers[index].get_submodule(path)
        setattr(module, leaf, nn.Parameter(getattr(module, leaf).detach().clone()))
    for module in layers.modules():
        if hasattr(module, "stand_alone"):  # a projection that ran once for all that share it
            module.stand_alone()
        if hasattr(module, "init_incremental_state"):  # an attention, with the name of its cache
            module.init_incremental_state()
    layers.sharing = Sharing(tuple(range(len(layers))), layers.sharing.parts)


def tie(owner: nn.Module, borrower: nn.Module, parts: Iterable[str], what: str) -> None:
    """Replace each shared parameter of the borrower by the owner's."""
    owned = dict(owner.named_parameters(remove_duplicate=False))
    borrowed = dict(borrower.named_parameters(remove_duplicate=False))
    if owned.keys() != borrowed.keys():
        odd = sorted(owned.keys() ^ borrowed.keys())
        raise ValueError(f"{what} cannot share parameters: only one of them has {odd[0]}")
    for name, parameter in owned.items():
        if not is_shared(name, parts):
            continue
        if parameter.shape != borrowed[name].shape:
            raise ValueError(
                f"{what} cannot share parameters: {name} is {tuple(parameter.shape)} in one, "
                f"{tuple(borrowed[name].shape)} in the other"
            )
        path, _, leaf = name.rpartition(".")
        setattr(borrower.get_submodule(path), leaf, parameter)


def tied_names(module: nn.Module) -> list[list[str]]:
    """List the parameters of a module that have several names, such as tied embeddings and layers: their names."""
    names = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tie_names(module: nn.Module, groups: Iterable[Sequence[str]]) -> None:
    """Let the names of each group, as `tied_names` lists them, be the parameter of the first of them."""
    for first, *others in groups:
        parameter = module.get_parameter(first)
        for name in others:
            path, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(path), leaf, parameter)


def shared_names(layers: nn.ModuleList) -> list[tuple[int, int, str]]:
    """List what borrowers borrow as (borrower, owner, parameter name within the layer)."""
    sharing: Sharing = layers.sharing
    return [
        (index, owner, name)
        for index, owner in enumerate(sharing.owners)
        if index != owner
        for name, _ in layers[index].named_parameters(remove_duplicate=False)
        if is_shared(name, sharing.parts)
    ]


def count_saved(layers: nn.ModuleList) -> int:
    """Return how many parameters the stack does without thanks to sharing."""
    every = sum(parameter.numel() for _, parameter in layers.named_parameters(remove_duplicate=False))
    return every - sum(parameter.numel() for parameter in layers.parameters())
