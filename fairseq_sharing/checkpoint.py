"""Checkpoints of shared stacks: one copy of each tensor, and a record of who shares with whom.

Hooks on the stack itself do all the work, so every path that saves or loads a model goes through them: fairseq's
trainer, its EMA, checkpoint averaging, component loading, the hub. Saving leaves borrowed tensors out and adds the
record; loading compares the record, then lets the borrowers borrow again.

The record is one small integer tensor, ``<stack>.sharing_version``: format, parts as bits, then the assignment. Its
name contains "version" because fairseq's EMA leaves such keys alone. A stack that shares nothing saves exactly what
upstream saves.
"""

import logging

import torch
from torch import nn

from .residual import compare_scalings
from .sharing import ALL_PARTS, Sharing, shared_names, tie_layers

logger = logging.getLogger(__name__)

RECORD = "sharing_version"
FORMAT = 1


def encode_sharing(sharing: Sharing) -> torch.Tensor:
    """Return the record as an integer tensor of N + 2 entries."""
    bits = sum(1 << ALL_PARTS.index(part) for part in sharing.parts)
    return torch.tensor([FORMAT, bits, *sharing.assignment], dtype=torch.int32)


def decode_sharing(record: torch.Tensor) -> Sharing:
    """Read a record back.

    Raises:
        ValueError: the record was written by a later version of this package.
    """
    version, bits, *assignment = record.tolist()
    if version != FORMAT:
        raise ValueError(
            f"the sharing record has format {version}, this version of fairseq_sharing reads format {FORMAT}"
        )
    return Sharing(tuple(assignment), tuple(part for i, part in enumerate(ALL_PARTS) if bits & 1 << i))


def register_checkpoint_hooks(layers: nn.ModuleList) -> None:
    """Make a stack that went through `share_layers` save each tensor once and refuse a foreign sharing on loading."""
    layers.register_state_dict_post_hook(drop_borrowed)
    layers.register_load_state_dict_pre_hook(restore_borrowed)
    layers.register_load_state_dict_post_hook(tie_again)


def drop_borrowed(layers: nn.ModuleList, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """Leave borrowed tensors out of the state dict and add the record (a state-dict hook).

    Raises:
        ValueError: a borrowed tensor is no longer its owner's, so leaving it out would lose it.
    """
    if not layers.sharing.shares:
        return
    for borrower, owner, name in shared_names(layers):
        borrowed, owned = f"{prefix}{borrower}.{name}", f"{prefix}{owner}.{name}"
        if owned not in state_dict or not is_tied(layers, (borrower, owner), name, state_dict, prefix):
            raise ValueError(
                f"{borrowed} no longer is the same tensor as {owned}: these layers cannot be saved as shared"
            )
        del state_dict[borrowed]
    state_dict[prefix + RECORD] = encode_sharing(layers.sharing)


def is_tied(layers: nn.ModuleList, pair: tuple[int, int], name: str, state_dict: dict, prefix: str) -> bool:
    """Whether a parameter of two layers is one tensor in a state dict.

    Where tensors have no address, as on the device ``meta``, the layers themselves tell.
    """
    one, other = (state_dict[f"{prefix}{index}.{name}"].data_ptr() for index in pair)
    if one or other:
        return one == other
    return layers[pair[0]].get_parameter(name) is layers[pair[1]].get_parameter(name)


def check_before_loading(model: nn.Module) -> None:
    """Let a model, and each part of it that holds a shared stack, compare all its stacks before it loads anything.

    Torch copies module by module: without this, what comes before a refused stack would be overwritten already.
    """
    for module in model.modules():
        if not hasattr(module, "checks_stacks") and list(stacks_below(module)):
            module.checks_stacks = True
            module.register_load_state_dict_pre_hook(restore_below)


def stacks_below(module: nn.Module):
    """Yield name and layers of each shared stack inside a module."""
    yield from ((name, layers) for name, layers in module.named_modules() if name and hasattr(layers, "sharing"))


def restore_below(module: nn.Module, state_dict: dict, prefix: str, *_) -> None:
    """Do the work of `restore_borrowed` for each stack inside a module (a hook that runs before loading)."""
    for name, layers in stacks_below(module):
        restore_borrowed(layers, state_dict, f"{prefix}{name}.")


def restore_borrowed(layers: nn.ModuleList, state_dict: dict, prefix: str, *_) -> None:
    """Compare the record, then put the borrowed tensors back (a hook that runs before loading).

    A file without record is welcome when it holds every alias and aliases agree, and so is one that went through here.

    Raises:
        ValueError: the checkpoint's sharing is not this stack's, or its residual connections are scaled otherwise.
    """
    compare_scalings(layers, state_dict, prefix)
    stack = prefix.rstrip(".")
    record = state_dict.pop(prefix + RECORD, None)
    if record is not None and not layers.sharing.same_as(decode_sharing(record)):
        refuse(stack, f"shared as {decode_sharing(record)}", layers.sharing)
    if not layers.sharing.shares:
        return
    for borrower, owner, name in shared_names(layers):
        borrowed, owned = f"{prefix}{borrower}.{name}", f"{prefix}{owner}.{name}"
        if owned not in state_dict:
            continue  # torch reports the missing key by its name
        if borrowed not in state_dict:
            if record is None:
                refuse(stack, f"without a record of sharing and without layer {borrower}", layers.sharing)
            state_dict[borrowed] = state_dict[owned]
        elif not agree(state_dict[borrowed], state_dict[owned]):
            refuse(
                stack, f"with different {name} in layers {owner} and {borrower}, that is not shared so", layers.sharing
            )


def agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal; NaN, which a run that diverged saves, is equal to itself."""
    return one is other or (one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))


def tie_again(layers: nn.ModuleList, incompatible_keys) -> None:
    """Tie after loading (a hook): ``load_state_dict(assign=True)`` gives every name a parameter of its own."""
    tie_layers(layers)


def refuse_into_stock_model(model: nn.Module, state_dict: dict) -> None:
    """Compare the records with a model whose stacks never heard of sharing, such as fairseq's own.

    Raises:
        ValueError: the checkpoint's layers share parameters, those of the model do not.
    """
    modules = dict(model.named_modules())
    for key in state_dict:
        stack, _, name = key.rpartition(".")
        if name == RECORD and stack in modules and not hasattr(modules[stack], "sharing"):
            unshared = Sharing(tuple(range(len(modules[stack]))))
            refuse(stack, f"shared as {decode_sharing(state_dict[key])}", unshared)


def refuse(stack: str, found: str, wanted: Sharing) -> None:
    """Log the sentence, since fairseq's trainer replaces it by its own, then raise it."""
    sentence = f"cannot load this checkpoint: its {stack} were saved {found}; this model shares them as {wanted}"
    logger.error(sentence)
    raise ValueError(sentence)
