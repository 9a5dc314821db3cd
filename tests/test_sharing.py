"""The mechanism alone: torch modules, no flags."""

import pytest
import torch
from fairseq.modules import LayerDropModuleList
from torch import nn

from fairseq_sharing.sharing import ALL_PARTS, Sharing, count_saved, is_shared, share_layers, shared_names

PART_SETS = [tuple(part for i, part in enumerate(ALL_PARTS) if bits & 1 << i) for bits in range(1, 8)]


class Layer(nn.Module):
    """A layer with fairseq's names."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.self_attn = nn.Linear(width, width)
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)
        self.final_layer_norm = nn.LayerNorm(width)


ATTENTION, FFN, NORM = 4 * 4 + 4, (4 * 8 + 8) + (8 * 4 + 4), 4 + 4  # parameters of each part of Layer; it has two norms


def build_stack(n: int = 4, **kwargs) -> nn.ModuleList:
    return nn.ModuleList([Layer(**kwargs) for _ in range(n)])


def test_tied_parameters_are_one_object_and_layers_are_not():
    stack = build_stack(4)
    before = [dict(layer.named_parameters()) for layer in stack]
    share_layers(stack, [0, 1, 1, 0])
    assert len({id(layer) for layer in stack}) == 4
    for name, parameter in stack[0].named_parameters():
        assert dict(stack[3].named_parameters())[name] is parameter is before[0][name]
        assert dict(stack[1].named_parameters())[name] is not parameter
    with torch.no_grad():
        stack[0].fc1.weight.fill_(7)
    assert stack[3].fc1.weight.eq(7).all() and not stack[1].fc1.weight.eq(7).any()


def test_any_numbering_of_the_sets():
    stack = share_and_return([2, 0, 1, 2])
    assert stack[0].fc1.weight is stack[3].fc1.weight
    assert len({id(layer.fc1.weight) for layer in stack}) == 3


def share_and_return(assignment, **kwargs):
    stack = build_stack(len(assignment))
    share_layers(stack, assignment, **kwargs)
    return stack


@pytest.mark.parametrize("parts", PART_SETS)
def test_parts_by_count(parts):
    """A LayerNorm is shared with `norm`, or with its sublayer when that is the only part."""
    stack = share_and_return([0, 1, 1, 0], parts=parts)
    saved_by_layer = {
        ("attention",): ATTENTION + NORM,
        ("ffn",): FFN + NORM,
        ("norm",): 2 * NORM,
        ("attention", "ffn"): ATTENTION + FFN,
        ("attention", "norm"): ATTENTION + 2 * NORM,
        ("ffn", "norm"): FFN + 2 * NORM,
        ("attention", "ffn", "norm"): ATTENTION + FFN + 2 * NORM,
    }[parts]
    whole = 4 * (ATTENTION + FFN + 2 * NORM)
    assert sum(parameter.numel() for parameter in stack.parameters()) == whole - 2 * saved_by_layer
    assert count_saved(stack) == 2 * saved_by_layer


def test_layerdrop_stacks_are_tied_whole_in_training_mode():
    stack = LayerDropModuleList(p=0.9, modules=[Layer() for _ in range(6)]).train()
    share_layers(stack, [0, 1, 2, 2, 1, 0])
    assert all(stack[i].fc1.weight is stack[5 - i].fc1.weight for i in range(3))


def test_shared_names_lists_every_borrowed_tensor():
    stack = share_and_return([0, 0, 1], parts=("ffn",))
    assert [(borrower, owner) for borrower, owner, _ in shared_names(stack)] == [(1, 0)] * 6
    assert {name.split(".")[0] for _, _, name in shared_names(stack)} == {"fc1", "fc2", "final_layer_norm"}


def test_a_stack_without_layers_is_refused():
    with pytest.raises(ValueError, match="no layers to share"):
        share_layers(nn.ModuleList(), [0, 0])


def test_an_assignment_of_another_length_is_refused():
    with pytest.raises(ValueError, match="0 1 0 is for 3 layers, not for 4"):
        share_layers(build_stack(4), [0, 1, 0])


def test_layers_of_different_widths_are_refused():
    stack = nn.ModuleList([Layer(4), Layer(6)])
    with pytest.raises(
        ValueError, match=r"layers 0 and 1 .* self_attn.weight is \(4, 4\) in one, \(6, 6\) in the other"
    ):
        share_layers(stack, [0, 0])


def test_layers_of_different_structure_are_refused():
    odd = Layer()
    odd.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="only one of them has extra.bias"):
        share_layers(nn.ModuleList([Layer(), odd]), [0, 0])


def test_a_parameter_of_no_known_part_is_refused_only_when_parts_are_asked_for():
    assert is_shared("adapter.weight", ALL_PARTS)
    with pytest.raises(ValueError, match="adapter.weight is part of neither"):
        is_shared("adapter.weight", ("ffn",))


def test_wrapped_layers_are_refused():
    class FullyShardedDataParallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = Layer()

    stack = nn.ModuleList([FullyShardedDataParallel(), FullyShardedDataParallel()])
    with pytest.raises(ValueError, match="--ddp-backend"):
        share_layers(stack, [0, 0])


def test_same_sharing_whatever_the_numbering():
    assert Sharing((0, 1, 0)).same_as(Sharing((1, 0, 1)))
    assert not Sharing((0, 1, 0)).same_as(Sharing((0, 1, 1)))
    assert not Sharing((0, 0), ("ffn",)).same_as(Sharing((0, 0)))
    assert Sharing((0, 1), ("ffn",)).same_as(Sharing((0, 1)))
    assert not Sharing((0, 1)).same_as(Sharing((0, 1, 2)))
