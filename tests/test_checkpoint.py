"""Saving writes each tensor once; loading restores ties and refuses a foreign sharing."""

import copy
import io
import json
import logging
import pickle
import re
import shutil

import numpy as np
import pytest
import test_albert_encoder as albert
import test_s2t_transformer_shared as s2t
import test_transformer_lm_shared as lm
import torch
from conftest import FOUR_FROM_TWO, REPOSITORY, TINY, TINY_ARCHS, build
from fairseq import checkpoint_utils, utils
from fairseq.dataclass.configs import EMAConfig
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.ema.ema import EMA
from families import EVERY_FAMILY, FAMILIES, build_trainer, configure, evaluate, load_whole, make_data, run_train
from torch.nn.utils import prune

from fairseq_sharing.checkpoint import RECORD, decode_sharing, encode_sharing
from fairseq_sharing.sharing import Sharing
from fairseq_sharing.tools.files import load_checkpoint
from fairseq_sharing.tools.main import main
from fairseq_sharing.upstream import checkpoint_files

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


@pytest.mark.parametrize("full", [False, True])
def test_what_a_run_saved_that_diverged_can_be_loaded(full):
    """NaN is not equal to itself, but both layers have it."""
    model, other = build(*REV), build(*REV, seed=2)
    with torch.no_grad():
        model.encoder.layers[0].fc1.weight[0, 0] = torch.nan
    state = model.state_dict()
    if full:  # a copy for each layer
        state = {name: value.detach().clone() for name, value in model.named_parameters(remove_duplicate=False)}
        state |= {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    other.load_state_dict(state)
    assert other.encoder.layers[3].fc1.weight.isnan().sum() == 1
    assert other.encoder.layers[3].fc1.weight is other.encoder.layers[0].fc1.weight


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
REFUSALS = {
    "translation": (build, REV, "decoder", ["--decoder-sharing", "sequence"]),
    "language model": (lm.build, LM, "decoder", ["--decoder-sharing", "sequence"]),
    "speech": (s2t.build, (s2t.REV, *s2t.SETS), "decoder", ["--decoder-sharing", "sequence"]),
    "masked LM": (albert.build, ("albert_encoder", *albert.TINY), "encoder", ["--encoder-unique-layers", "2"]),
}


@pytest.mark.parametrize("family", REFUSALS)
@pytest.mark.parametrize("whole", [True, False])
def test_a_refused_file_changes_nothing(family, whole):
    """Nor what torch would have loaded before it comes to the stack that does not fit, such as embeddings."""
    build_one, common, part, other = REFUSALS[family]
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
    model.encoder.layers.to("meta")  # a part of the model, of which torch makes new parameters without an address
    with pytest.raises(ValueError, match="encoder.layers.2.* no longer is the same tensor as encoder.layers.1"):
        model.state_dict()
    model = build(*REV).to("meta")
    assert "encoder.layers.3.fc1.weight" not in model.state_dict()
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


# --- every family, through fairseq's own commands ---


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"), sentences=28)


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):
    """For each family, the last checkpoint of a shared model (M = 2) and of the same architecture without sharing."""
    paths = {}
    for name, family in FAMILIES.items():
        for kind, flags in (("shared", family.sets(2)), ("unshared", family.sharing("none"))):
            save_dir = tmp_path_factory.mktemp(kind)
            run_train(configure(family, folders[name], save_dir, *flags))
            paths[name, kind] = save_dir / "checkpoint_last.pt"
    return paths


def every_name(model) -> dict:
    """Return what a stock model of the same tensors saves: every parameter under every name, and the buffers."""
    named = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    kept = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(RECORD)}
    return {**kept, **named}


@pytest.fixture(scope="module")
def plain(folders, trained, tmp_path_factory):
    """For each family, a checkpoint of fairseq's stock model with exactly the tensors of the shared one."""
    paths = {}
    for name, family in FAMILIES.items():
        save_dir = tmp_path_factory.mktemp("plain")
        run_train(configure(family, folders[name], save_dir, stock=True))
        paths[name] = save_dir / "checkpoint_last.pt"
        [model], _, _ = checkpoint_utils.load_model_ensemble_and_task([str(trained[name, "shared"])])
        state = load_whole(paths[name])
        assert state["model"].keys() == every_name(model).keys()
        torch.save({**state, "model": every_name(model)}, paths[name])
    return paths


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, ["fp16", "memory_efficient_fp16"]) for name in FAMILIES),
        ("speech", ["fp16", "fp16_no_flatten_grads"]),
    ],
)
def test_a_large_file_weighs_its_unique_tensors(name, precision, folders, tmp_path):
    """Saved as fairseq-train saves in half precision: model, Adam's two moments, moving average and its fp32 copy."""
    family = FAMILIES[name]
    width, ffn, depth, sets = (512, 2048, 4, 2) if len(family.stacks) == 1 else (256, 1024, 6, 3)
    flags = family.sets(sets)
    for stack in family.stacks:
        flags += [f"--{stack}-embed-dim", width, f"--{stack}-ffn-embed-dim", ffn, f"--{stack}-layers", depth]
    config = configure(family, folders[name], tmp_path, *flags, "--store-ema", "--ema-fp32")
    for option in precision:  # which --cpu excludes on the command line, for what happens at an overflow
        config.common[option] = True
    trainer = build_trainer(config)
    trainer.load_checkpoint("none yet")
    unique = sum(parameter.numel() for parameter in trainer.model.parameters())
    every = sum(parameter.numel() for _, parameter in trainer.model.named_parameters(remove_duplicate=False))
    assert unique >= 5_000_000 and every > 1.5 * unique
    assert all(parameter.dtype == torch.float16 for parameter in trainer.model.parameters())

    trainer.optimizer.backward(sum(parameter.float().mean() for parameter in trainer.model.parameters()))
    trainer.optimizer.clip_grad_norm(0)
    trainer.optimizer.step()
    trainer.ema.step(trainer.get_model(), 1)
    trainer.consolidate_optimizer()
    trainer.save_checkpoint(str(tmp_path / "large.pt"), {})
    assert 1 <= (tmp_path / "large.pt").stat().st_size / (5 * 4 * unique) < 1.02
    moments = load_whole(tmp_path / "large.pt")["last_optimizer_state"]["state"].values()
    for moment in ("exp_avg", "exp_avg_sq"):
        assert sum(state[moment].numel() for state in moments) == unique


@EVERY_FAMILY
def test_every_command_computes_what_a_plain_model_does(name, folders, trained, plain):
    """A stock model of the same tensors gives the same numbers, alone and in an ensemble with the shared one."""
    shared = evaluate(name, folders[name], trained[name, "shared"])
    alone = evaluate(name, folders[name], plain[name])
    together = evaluate(name, folders[name], f"{trained[name, 'shared']}:{plain[name]}", ensemble=True)
    assert len(shared) == {"language model": 3, "masked language model": 1}.get(name, 2)
    for found in (alone, together):
        for command, expected in found.items():
            assert shared[command] == pytest.approx(expected, abs=2e-3), command
    assert together or name == "masked language model"


def stack_layers(name: str, model) -> dict:
    return {stack: model.get_submodule(path) for stack, path in FAMILIES[name].stacks.items()}


def assert_restored(name: str, model, path, sets: int = 2) -> None:
    """The model is tied as its layers say, and each of its tensors is the file's."""
    saved = load_whole(path)["model"]
    for layers in stack_layers(name, model).values():
        assert layers.sharing.shares and len(set(layers.sharing.assignment)) == sets
        for index, owner in enumerate(layers.sharing.owners):
            for mine, theirs in zip(layers[index].parameters(), layers[owner].parameters(), strict=True):
                assert mine is theirs
    for key, tensor in model.state_dict().items():
        assert key.endswith(RECORD) or torch.equal(tensor, saved[key]), key


def hub_model(name: str, data, path, **overrides):
    """Load as a user does in Python."""
    hub = ARCH_MODEL_REGISTRY[FAMILIES[name].arch].from_pretrained(
        str(path.parent), path.name, str(data), bpe="characters", **overrides
    )
    return getattr(hub, "model", None) or hub.models[0]


@EVERY_FAMILY
def test_the_hub_and_training_restore_one_tensor(name, folders, trained, tmp_path):
    path = trained[name, "shared"]
    assert_restored(name, hub_model(name, folders[name], path), path)
    config = configure(FAMILIES[name], folders[name], tmp_path, *FAMILIES[name].sets(2), "--restore-file", path)
    trainer = build_trainer(config, seed=2)
    checkpoint_utils.load_checkpoint(config.checkpoint, trainer)
    assert_restored(name, trainer.get_model(), path)
    held = [parameter for group in trainer.optimizer.optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len({id(parameter) for parameter in held}) == len(list(trainer.model.parameters()))
    assert all(trainer.optimizer.optimizer.state[parameter]["step"] == 2 for parameter in held)


RESET = ["--reset-optimizer", "--reset-dataloader", "--reset-meters", "--reset-lr-scheduler"]


@EVERY_FAMILY
def test_a_full_file_starts_training_when_aliases_agree(name, folders, plain, tmp_path):
    """A stock checkpoint, whose borrowers' tensors are copies of their owners'; then one of them is changed."""
    family = FAMILIES[name]
    flags = [*family.sets(2), *RESET]
    config = configure(family, folders[name], tmp_path, *flags, "--restore-file", plain[name])
    trainer = build_trainer(config, seed=2)
    checkpoint_utils.load_checkpoint(config.checkpoint, trainer)
    assert_restored(name, trainer.get_model(), plain[name])

    state = load_whole(plain[name])
    [stack, path] = list(family.stacks.items())[-1]
    picture = stack_layers(name, trainer.get_model())[stack].sharing
    state["model"][f"{path}.3.fc2.bias"] = state["model"][f"{path}.3.fc2.bias"] + 1e-3
    torch.save(state, tmp_path / "differs.pt")
    config = configure(family, folders[name], tmp_path, *flags, "--restore-file", tmp_path / "differs.pt")
    with pytest.raises(Exception, match="Cannot load model parameters") as caught:
        checkpoint_utils.load_checkpoint(config.checkpoint, build_trainer(config))
    [note] = caught.value.__notes__
    assert re.search(f"{path} were saved with different fc2.bias in layers . and 3, .* shares them as {picture}$", note)


def other_strategy(family) -> str:
    return "sequence" if family.strategy == "cycle" else "cycle"


# What is in the file, the flags of the model that shall load it, and its picture for each strategy of the family.
PICTURES = {"sequence": "0 0 1 1", "cycle": "0 1 0 1", "cycle_rev": "0 1 1 0", "none": "0 1 2 3"}
THREE_SETS = {"sequence": "0 0 1 2", "cycle": "0 1 2 0", "cycle_rev": "0 1 2 2"}
FOREIGN = {
    "strategy": (
        *("shared", lambda family: [*family.sharing(other_strategy(family)), *family.sets(2)]),
        lambda family: PICTURES[other_strategy(family)],
    ),
    "sets": ("shared", lambda family: family.sets(3), lambda family: THREE_SETS[family.strategy]),
    "parts": (
        *("shared", lambda family: [*family.sets(2), "--sharing-parts", "ffn"]),
        lambda family: rf"{PICTURES[family.strategy]} \(ffn only\)",
    ),
    "unshared": ("shared", lambda family: family.sharing("none"), lambda family: PICTURES["none"]),
    "shared": (
        *("unshared", lambda family: [*family.sharing(family.strategy), *family.sets(2)]),
        lambda family: PICTURES[family.strategy],
    ),
}


def routes(name: str, what: str = "strategy") -> tuple[str, str]:
    """Return one way to go on training and one to evaluate: each two of the four meet every family and difference.

    tests/test_end_to_end.py has all of them with translation.
    """
    even = (list(FAMILIES).index(name) + list(FOREIGN).index(what)) % 2 == 0
    return ("--restore-file", "--model-overrides") if even else ("--finetune-from-model", "hub")


@EVERY_FAMILY
@pytest.mark.parametrize("what", FOREIGN)
def test_another_sharing_is_refused_on_every_route(name, what, folders, trained, tmp_path, caplog):
    """With both assignments, logged before fairseq's own words and repeated below them, and nothing is written."""
    family = FAMILIES[name]
    kind, get_flags, get_picture = FOREIGN[what]
    path, flags = trained[name, kind], get_flags(family)
    before = path.read_bytes()
    sentence = re.compile(
        f"cannot load this checkpoint: its {next(iter(family.stacks.values()))} were saved "
        + (f"shared as {PICTURES[family.strategy]}" if kind == "shared" else "with different .*, that is not shared so")
        + f"; this model shares them as {get_picture(family)}$"
    )
    resuming, evaluating = routes(name, what)
    with pytest.raises(Exception, match="Cannot load model parameters") as caught:
        run_train(configure(family, folders[name], tmp_path / "save", *flags, resuming, path))
    assert sentence.search(caught.value.__notes__[0]) and any(map(sentence.search, caplog.messages))
    assert not list((tmp_path / "save").iterdir())

    overrides = {flag[2:].replace("-", "_"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)}
    overrides = {key: int(value) if value.isdigit() else value for key, value in overrides.items()}
    if what == "unshared":
        overrides |= {f"{stack}_unique_layers": None for stack in family.stacks}
    with pytest.raises(ValueError, match=sentence):
        if evaluating == "hub":
            hub_model(name, folders[name], path, **overrides)
        else:
            evaluate(name, folders[name], path, evaluating, str(overrides))
    assert path.read_bytes() == before


@EVERY_FAMILY
def test_a_stock_model_refuses_a_shared_checkpoint(name, folders, trained, tmp_path):
    path = trained[name, "shared"]
    config = configure(FAMILIES[name], folders[name], tmp_path / "save", routes(name)[0], path, stock=True)
    with pytest.raises(Exception, match="Cannot load model parameters") as caught:
        run_train(config)
    found = f"{next(iter(FAMILIES[name].stacks.values()))} were saved shared as {PICTURES[FAMILIES[name].strategy]}"
    assert caught.value.__notes__[0].endswith(f"its {found}; this model shares them as 0 1 2 3")
    assert not list((tmp_path / "save").iterdir())


# --- stopping and going on, with a moving average ---

AVERAGE = {
    "fp32, every second update, from the third": (0.9, 2, 3, ["--ema-fp32"]),
    "every update": (0.75, 1, 0, []),
}


@pytest.fixture(scope="module")
def interrupted(folders, tmp_path_factory):
    """Train each family for nine updates with a checkpoint after each, in one run and in three; return the folders.

    An epoch has two to four updates.
    """
    runs = {}
    for number, (name, family) in enumerate(FAMILIES.items()):
        decay, every, start, more = list(AVERAGE.values())[number == 0]
        average = ["--store-ema", "--ema-decay", decay, "--ema-update-freq", every, "--ema-start-update", start, *more]
        flags = [*family.sets(2), *average, "--save-interval-updates", 1, "--disable-validation", "--dropout", 0.3]
        for kind, stops in (("one run", [9]), ("three runs", [3, 7, 9])):
            runs[name, kind] = tmp_path_factory.mktemp(kind.replace(" ", ""))
            for stop in stops:
                run_train(configure(family, folders[name], runs[name, kind], *flags, "--max-update", stop))
    return runs


def by_update(folder) -> list[dict]:
    """Return one checkpoint for each update."""
    states = [load_whole(path) for path in folder.glob("checkpoint*.pt")]
    return [state for _, state in sorted({count_updates(state): state for state in states}.items())]


def count_updates(state: dict) -> int:
    return state["optimizer_history"][-1]["num_updates"]


def assert_same(one, other, where: str = "") -> None:
    """Compare nested state bit for bit."""
    if torch.is_tensor(one):
        assert torch.equal(one, other) and one.dtype == other.dtype, where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            if not str(key).endswith("._float_tensor"):  # whose number upstream leaves uninitialised
                assert_same(value, other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}.{index}")
    else:
        assert one == other, where


@EVERY_FAMILY
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(name, interrupted):
    """Bit for bit: parameters, Adam's moments, moving average, learning rate and the place in the data."""
    whole, resumed = (by_update(interrupted[name, kind]) for kind in ("one run", "three runs"))
    places = [state["extra_state"]["train_iterator"] for state in whole]
    assert len(whole) == len(resumed) == 9 and places[6]["epoch"] > 1
    assert any(places[update - 1]["iterations_in_epoch"] for update in (3, 7))
    for one, other in zip(whole, resumed, strict=True):
        for part in ("model", "last_optimizer_state"):
            assert_same(one[part], other[part], part)
        for part in ("ema", "ema_fp32_params", "train_iterator"):
            assert_same(one["extra_state"].get(part), other["extra_state"].get(part), part)
        assert one["optimizer_history"][-1] == other["optimizer_history"][-1]


@EVERY_FAMILY
@pytest.mark.parametrize("renewed", [False, True])
def test_a_seed_that_grows_with_the_epoch_is_resumed(name, renewed, folders, tmp_path):
    """--update-ordered-indices-seed, with batches that are kept for all epochs and with new ones in each."""
    flags = ["--update-ordered-indices-seed", *(["--update-epoch-batch-itr", "True"] if renewed else [])]
    flags += [*FAMILIES[name].sets(2), "--disable-validation"]
    for kind, stops in (("one run", [9]), ("two runs", [6, 9])):
        for stop in stops:
            run_train(configure(FAMILIES[name], folders[name], tmp_path / kind, *flags, "--max-update", stop))
    whole, resumed = (load_whole(tmp_path / kind / "checkpoint_last.pt") for kind in ("one run", "two runs"))
    assert whole["extra_state"]["train_iterator"]["epoch"] > 2
    for part in ("model", "last_optimizer_state"):
        assert_same(whole[part], resumed[part], part)


@EVERY_FAMILY
def test_the_moving_average_is_that_of_unique_parameters(name, interrupted):
    """Against a loop over the saved models, bit for bit, also after resuming; each tensor is in the file once."""
    decay, every, start, _ = list(AVERAGE.values())[name == "translation"]
    expected = None
    for update, state in enumerate(by_update(interrupted[name, "three runs"]), 1):
        found = state["extra_state"]["ema"]
        model = {key: tensor for key, tensor in state["model"].items() if "version" not in key}
        if expected is None:  # fairseq starts to average after the first update
            expected = {key: tensor.clone() for key, tensor in model.items()}
        if update % every == 0:
            weight = decay if update >= start else 0
            for key, tensor in model.items():
                expected[key].mul_(weight).add_(tensor, alpha=1 - weight)
        assert found.keys() == state["model"].keys()
        for key, tensor in expected.items():
            assert key.endswith("_float_tensor") or torch.equal(found[key], tensor), (update, key)
        assert unique_storages(found) == unique_storages(state["model"])
        if "ema_fp32_params" in state["extra_state"]:
            for key, tensor in state["extra_state"]["ema_fp32_params"].items():
                assert key.endswith("_float_tensor") or torch.equal(found[key], tensor), (update, key)
    assert not torch.equal(found[key], state["model"][key])


@EVERY_FAMILY
def test_the_moving_average_decodes(name, folders, interrupted, tmp_path):
    """In fairseq, `save_ema_as_checkpoint` puts it in the model's place; every tensor stays one."""
    source = interrupted[name, "one run"] / "checkpoint_last.pt"
    checkpoint_utils.save_ema_as_checkpoint(str(source), str(tmp_path / "ema.pt"))
    saved, average = load_whole(tmp_path / "ema.pt")["model"], load_whole(source)["extra_state"]["ema"]
    assert_same(saved, average)
    assert unique_storages(saved) == unique_storages(average)
    assert_restored(name, hub_model(name, folders[name], tmp_path / "ema.pt"), tmp_path / "ema.pt")
    found, other = (evaluate(name, folders[name], path) for path in (tmp_path / "ema.pt", source))
    assert found.keys() == other.keys() and found["validate"] != other["validate"]


@EVERY_FAMILY
def test_a_moving_average_seeds_another(name, folders, interrupted, tmp_path):
    source = interrupted[name, "one run"] / "checkpoint_last.pt"
    flags = ["--store-ema", "--ema-decay", 0.75, "--ema-seed-model", source, "--max-update", 1]
    run_train(configure(FAMILIES[name], folders[name], tmp_path, *FAMILIES[name].sets(2), *flags))
    state, seed = load_whole(tmp_path / "checkpoint_last.pt"), load_whole(source)["extra_state"]["ema"]
    for key, tensor in state["model"].items():
        if "version" not in key and not key.endswith("_float_tensor"):
            assert torch.equal(state["extra_state"]["ema"][key], (seed[key] * 0.75).add_(tensor, alpha=0.25)), key


@EVERY_FAMILY
@pytest.mark.parametrize("source", ["without an average", "averaged"])
def test_a_moving_average_starts_from_what_was_loaded(name, source, folders, trained, interrupted, tmp_path, caplog):
    """Where --store-ema comes after resuming, and from averaged checkpoints, which hold no moving average of theirs."""
    path = trained[name, "shared"]
    if source == "averaged":
        path = tmp_path / "averaged.pt"
        folder = interrupted[name, "one run"]
        files = [str(each) for each in (folder / "checkpoint1.pt", folder / "checkpoint_last.pt")]
        assert main(["average", "--inputs", *files, "--output", str(path)]) == 0
        old = load_whole(files[0])
        assert {key for key in old["extra_state"] if key.startswith("ema")}
        kept = load_whole(path)["extra_state"]
        assert_same(kept, {key: value for key, value in old["extra_state"].items() if not key.startswith("ema")})
    before = load_whole(path)
    done = 0 if source == "averaged" else count_updates(before)  # fairseq counts on with the optimizer's state only
    average = ["--store-ema", "--ema-decay", 0.75, *(["--ema-fp32"] if source == "averaged" else [])]
    rate = ["--lr-scheduler", "fixed", "--reset-lr-scheduler"]  # the other begins with an update at rate 0
    flags = [*average, *rate, "--max-update", done + 1, "--restore-file", path]
    run_train(configure(FAMILIES[name], folders[name], tmp_path / "save", *FAMILIES[name].sets(2), *flags))
    assert f"{path} holds no moving average: --store-ema starts one from the parameters just loaded" in caplog.messages
    after = load_whole(tmp_path / "save" / "checkpoint_last.pt")
    assert count_updates(after) == done + 1
    for key, tensor in after["model"].items():
        if "version" not in key and not key.endswith("_float_tensor"):
            expected = (before["model"][key] * 0.75).add_(tensor, alpha=0.25)
            assert torch.equal(after["extra_state"]["ema"][key], expected), key
    assert not torch.equal(before["model"][key], tensor)


# --- earlier versions, and strangers ---

KEPT = {name: REPOSITORY / "tests" / "data" / name.split()[0] for name in FAMILIES}


def copy_kept(name: str, folder):
    """Copy a kept checkpoint and its data; what the manifests of speech say of clips holds in the folder above."""
    copied = shutil.copytree(KEPT[name], folder / KEPT[name].name)
    for manifest in copied.glob("*.tsv"):
        manifest.write_text(manifest.read_text("utf-8").replace("speech/", f"{copied}/"), encoding="utf-8")
    return copied


@EVERY_FAMILY
def test_an_old_checkpoint_computes_what_it_did(name, tmp_path):
    """Scores, losses and symbols of version 0.1.0 (see tests/data/README.md)."""
    folder = copy_kept(name, tmp_path)
    found = evaluate(name, folder, folder / "model.pt")
    expected = json.loads((folder / "expected.json").read_text("utf-8"))
    assert found.keys() == expected.keys()
    for command, numbers in expected.items():
        assert found[command] == pytest.approx(numbers, abs=2e-3), command


def test_no_class_is_allowed_without_need(folders, tmp_path):
    """Training with --eval-bleu leaves arrays in the meters, criteria that count with numpy (F1) leave scalars."""
    family, paths = FAMILIES["translation"], [tmp_path / "checkpoint_last.pt", tmp_path / "f1.pt"]
    bleu = ["--eval-bleu", "--eval-bleu-args", '{"beam": 1, "max_len_b": 3}', "--best-checkpoint-metric", "bleu"]
    run_train(configure(family, folders["translation"], tmp_path, *family.sets(2), *bleu, "--max-update", 5))
    torch.save({**load_whole(paths[0]), "f1": [np.float64(0.5), np.int64(3)]}, paths[1])
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        checkpoint_files.allow_checkpoint_classes()
        allowed = torch.serialization.get_safe_globals()
        for each in allowed:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals([other for other in allowed if other is not each])
            with pytest.raises(pickle.UnpicklingError):
                [load_whole(path) for path in paths]
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
    assert len(allowed) == 7 and [load_whole(path) for path in paths]


def test_training_goes_on_from_an_old_checkpoint(tmp_path):
    folder = copy_kept("language model", tmp_path)
    family = FAMILIES["language model"]
    for suffix in ("bin", "idx"):
        shutil.copyfile(folder / f"test.{suffix}", folder / f"train.{suffix}")
    before = load_whole(folder / "model.pt")
    updates = count_updates(before)
    flags = ["--decoder-layers", 3, "--decoder-ffn-embed-dim", 16, "--max-update", updates + 1, "--reset-dataloader"]
    run_train(
        configure(family, folder, tmp_path / "save", *family.sets(2), *flags, "--restore-file", folder / "model.pt")
    )
    after = load_whole(tmp_path / "save" / "checkpoint_last.pt")
    assert count_updates(after) == updates + 1 and after["model"].keys() == before["model"].keys()
    assert after["last_optimizer_state"]["state"][0]["step"] == updates + 1


class Payload:
    """A pickle that would create a file when loaded without care."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize(("name", "place"), zip(FAMILIES, ["cfg", "model"] * 2, strict=True))
def test_a_hostile_checkpoint_does_not_run_anywhere(name, place, folders, trained, tmp_path):
    """In training, the commands, the hub and the tools: refused, be the payload in the place of cfg or of a tensor."""
    ran, path = tmp_path / "ran", tmp_path / "hostile.pt"
    state = load_whole(trained[name, "shared"])
    torch.save(
        {**state, place: {**state["model"], "payload": Payload(ran)} if place == "model" else Payload(ran)}, path
    )
    family = FAMILIES[name]
    config = configure(family, folders[name], tmp_path / "save", *family.sets(2), "--restore-file", path)
    for load in (
        lambda: checkpoint_utils.load_checkpoint(config.checkpoint, build_trainer(config)),
        lambda: evaluate(name, folders[name], path),
        lambda: hub_model(name, folders[name], path),
        lambda: checkpoint_utils.load_ema_from_checkpoint(str(path)),
        lambda: load_checkpoint(str(path)),
    ):
        with pytest.raises((pickle.UnpicklingError, ValueError), match=r"GLOBAL _?io\.open"):
            load()
    assert not ran.exists()
    torch.load(path, weights_only=False)["cfg"]  # the payload itself works
    assert ran.exists()
