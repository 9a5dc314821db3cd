"""Saving writes each tensor once; loading restores ties and refuses a foreign sharing."""

import copy
import io
import logging
import pickle

import pytest
import test_albert_encoder as albert
import test_s2t_transformer_shared as s2t
import test_transformer_lm_shared as lm
import torch
from conftest import FOUR_FROM_TWO, TINY, TINY_ARCHS, build
from fairseq import utils
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema.ema import EMA
from torch.nn.utils import prune

from fairseq_sharing.checkpoint import RECORD, decode_sharing, encode_sharing
from fairseq_sharing.sharing import Sharing

REV = ("transformer_shared_cycle_rev", *TINY, *FOUR_FROM_TWO)
LM = ("transformer_lm_shared_cycle", *lm.TINY, "--decoder-unique-layers", "2")
UNSHARED = ["--encoder-sharing", "none", "--decoder-sharing", "none"]


def build_unshared(**kwargs):
    flags = [*TINY, "--encoder-layers", "4", "--decoder-layers", "4", *UNSHARED]
    return build("transformer_shared_cycle_rev", *flags, **kwargs)


def ties(model) -> set[frozenset[str]]:
    """Return the groups of names that share one parameter."""
    groups = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(name)
    return {frozenset(names) for names in groups.values()}


def unique_storages(state_dict: dict) -> int:
    return len({tensor.untyped_storage().data_ptr() for tensor in state_dict.values() if tensor.is_floating_point()})


def saved_size(obj) -> int:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.tell()


@pytest.mark.parametrize(("arch", "flags"), TINY_ARCHS)
def test_each_tensor_is_saved_once(arch, flags):
    model = build(arch, *flags)
    state = model.state_dict()
    layers = [key for key in state if ".layers." in key and not key.endswith(RECORD)]
    assert len({state[key].data_ptr() for key in layers}) == len(layers)
    by_name = dict(model.named_parameters(remove_duplicate=False))
    assert {by_name[key] for key in layers} == {p for name, p in by_name.items() if ".layers." in name}
    assert state["encoder.layers." + RECORD].dtype == torch.int32


@pytest.mark.parametrize(("arch", "flags"), TINY_ARCHS)
def test_saving_and_loading_keeps_ties_and_values(arch, flags):
    model, other = build(arch, *flags, seed=1), build(arch, *flags, seed=2)
    before = ties(other)
    other.load_state_dict(model.state_dict())
    assert ties(other) == before == ties(model)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_half_precision_file_holds_each_tensor_once():
    """Upstream's move_to_cpu converts tensor by tensor; on its own it writes every alias."""
    model = build(*REV, "--share-all-embeddings").half()
    state = utils.move_to_cpu(model.state_dict())
    unique = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert state["encoder.embed_tokens.weight"].dtype == torch.float32
    assert state["decoder.output_projection.weight"] is state["encoder.embed_tokens.weight"]
    assert unique_storages(state) <= len(list(model.parameters())) + 4  # and version, position buffers
    overhead = saved_size({key: torch.empty(0) for key in state}) + 1000
    assert saved_size(state) < unique + 200 * len(state) + overhead


def test_full_files_load_when_aliases_agree():
    model, other = build(*REV), build(*REV, seed=2)
    full = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    full |= {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    other.load_state_dict(full)
    assert torch.equal(other.encoder.layers[3].fc1.weight, model.encoder.layers[0].fc1.weight)


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (
            ["--encoder-sharing", "cycle"],
            "encoder.layers were saved shared as 0 1 0 1; this model shares them as 0 1 1 0",
        ),
        (["--decoder-sharing", "sequence"], "decoder.layers were saved shared as 0 0 1 1; .* as 0 1 1 0"),
        (["--decoder-unique-layers", "3"], "decoder.layers were saved shared as 0 1 2 2; .* as 0 1 1 0"),
        (["--sharing-parts", "ffn"], r"encoder.layers were saved shared as 0 1 1 0 \(ffn only\); .* as 0 1 1 0$"),
    ],
)
def test_another_sharing_is_refused_with_both_assignments(flags, shown, caplog):
    arch, *common = REV
    saved = build(arch, *common, *flags).state_dict()
    model = build(*REV, seed=2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=shown) as caught, caplog.at_level(logging.ERROR):
        model.load_state_dict(saved)
    assert str(caught.value) in caplog.messages
    layers = [key for key in before if ".layers." in key]
    stack = "encoder" if "encoder" in shown else "decoder"
    assert all(torch.equal(before[key], model.state_dict()[key]) for key in layers if key.startswith(stack))


def test_unshared_into_shared_is_refused():
    with pytest.raises(ValueError, match="different .* in layers 1 and 2, .* this model shares them as 0 1 1 0"):
        build(*REV).load_state_dict(build_unshared().state_dict())


def test_a_shallower_unshared_model_is_refused():
    """Its layers are exactly those that own parameters here: without a record the keys alone would fit."""
    arch = "transformer_shared_cycle_rev"
    flags = [*TINY, "--encoder-layers", "2", "--decoder-layers", "2"]
    with pytest.raises(ValueError, match="without a record of sharing and without layer 2"):
        build(*REV).load_state_dict(build(arch, *flags, *UNSHARED).state_dict())


def test_shared_into_unshared_is_refused():
    with pytest.raises(ValueError, match="saved shared as 0 1 1 0; this model shares them as 0 1 2 3"):
        build_unshared().load_state_dict(build(*REV).state_dict())


def test_only_the_component_loads():
    model, other = build(*REV), build(*REV, seed=2)
    other.encoder.load_state_dict(model.encoder.state_dict())
    assert torch.equal(other.encoder.layers[3].fc1.weight, model.encoder.layers[0].fc1.weight)
    arch, *common = REV
    with pytest.raises(ValueError, match="layers were saved shared as 0 1 0 1"):
        other.encoder.load_state_dict(build(arch, *common, "--encoder-sharing", "cycle").encoder.state_dict())


# For each family how to build it, and a sharing that differs in the last stack that torch comes to.
FAMILIES = {
    "translation": (build, REV, "decoder", ["--decoder-sharing", "sequence"]),
    "language model": (lm.build, LM, "decoder", ["--decoder-sharing", "sequence"]),
    "speech": (s2t.build, (s2t.REV, *s2t.SETS), "decoder", ["--decoder-sharing", "sequence"]),
    "masked LM": (albert.build, ("albert_encoder", *albert.TINY), "encoder", ["--encoder-unique-layers", "2"]),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("whole", [True, False])
def test_a_refused_file_changes_nothing(family, whole):
    """Nor what torch would have loaded before it comes to the stack that does not fit, such as embeddings."""
    build_one, common, part, other = FAMILIES[family]
    model, stranger = build_one(*common, *other, seed=2), build_one(*common, seed=1)
    loaded, saved = (each if whole else getattr(each, part) for each in (model, stranger))
    before = {name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    with pytest.raises(ValueError, match="cannot load this checkpoint"):
        loaded.load_state_dict(saved.state_dict())
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_ties_and_hooks(copied):
    model = build(*REV)
    other = copied(model)
    assert ties(other) == ties(model) and other.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        other.encoder.layers[0].fc1.weight.fill_(3)
    assert other.encoder.layers[3].fc1.weight.eq(3).all() and not model.encoder.layers[0].fc1.weight.eq(3).any()
    model.load_state_dict(other.state_dict())
    assert model.encoder.layers[3].fc1.weight.eq(3).all()
    arch, *common = REV
    with pytest.raises(ValueError, match="0 1 0 1"):
        other.load_state_dict(build(arch, *common, "--encoder-sharing", "cycle").state_dict())


@pytest.mark.parametrize("moved", [lambda m: m.half(), lambda m: m.double(), lambda m: m.to("cpu", torch.bfloat16)])
def test_conversions_keep_ties(moved):
    model = build(*REV)
    before = ties(model)
    assert ties(moved(model)) == before


def test_moving_average_of_shared_layers():
    """A layer used twice must decay once."""
    model = build(*REV)
    ema = EMA(model, EMAConfig(store_ema=True, ema_decay=0.5))
    start = model.encoder.layers[0].fc1.weight.detach().clone()
    with torch.no_grad():
        model.encoder.layers[0].fc1.weight.add_(1)
    ema.step(model)
    average = ema.get_model().encoder.layers[3].fc1.weight
    assert torch.allclose(average, start + 0.5, atol=1e-6)


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_moving_average_decays_tied_embeddings_once(fp32, half):
    model = build(*REV, "--share-all-embeddings")
    model = model.half() if half else model
    ema = EMA(model, EMAConfig(store_ema=True, ema_decay=0.5, ema_fp32=fp32))
    start = model.encoder.embed_tokens.weight.detach().clone()
    for _ in range(2):
        with torch.no_grad():
            model.encoder.embed_tokens.weight.copy_(start + 1)
        ema.step(model)
    moved = ema.get_model().decoder.output_projection.weight - start
    assert torch.allclose(moved, torch.full_like(moved, 0.75), atol=1e-2 if half else 1e-6)
    if fp32:
        names = [name for name in ema.fp32_params if "embed_tokens" in name or "output_projection" in name]
        assert names == ["encoder.embed_tokens.weight"]


def test_moving_average_refuses_another_sharing():
    arch, *common = REV
    ema = EMA(build(*REV), EMAConfig(store_ema=True))
    with pytest.raises(ValueError, match="saved shared as 0 1 0 1; this model shares them as 0 1 1 0"):
        ema.restore(build(arch, *common, "--encoder-sharing", "cycle").state_dict())


def test_loading_by_assignment_keeps_ties():
    model, other = build(*REV), build(*REV, seed=2)
    before = ties(other)
    torch.nn.Module.load_state_dict(other, model.state_dict(), assign=True)
    assert ties(other) == before
    assert torch.equal(other.encoder.layers[3].fc1.weight, model.encoder.layers[0].fc1.weight)


def test_broken_ties_are_not_saved_as_ties():
    model = build(*REV)
    model.encoder.layers[3].fc1 = torch.nn.Linear(16, 32)
    with pytest.raises(
        ValueError, match="encoder.layers.3.fc1.weight no longer is the same tensor as encoder.layers.0.fc1"
    ):
        model.state_dict()
    model = build(*REV)
    prune.l1_unstructured(model.encoder.layers[0].fc1, "weight", 0.5)
    with pytest.raises(ValueError, match="no longer is the same tensor"):
        model.state_dict()


def test_records_of_every_part():
    for parts in (("attention",), ("ffn", "norm"), ("attention", "ffn", "norm")):
        sharing = Sharing((0, 1, 1, 0), parts)
        assert decode_sharing(encode_sharing(sharing)) == sharing
    with pytest.raises(ValueError, match="format 9"):
        decode_sharing(torch.tensor([9, 7, 0, 0]))
