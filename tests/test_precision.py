"""Precision, batches and conversions: what is shared stays shared, and trains as it should, in every family."""

import copy
import pickle
import re

import pytest
import torch
from conftest import parse
from test_sharing import PART_SETS
from training import build, builder, check_gpu, train_here

from fairseq_sharing.sharing import tied_names
from fairseq_sharing.upstream import hooks

FAMILIES = list(check_gpu.FAMILIES)
STACKS = {"translation": ("encoder", "decoder"), "language_modeling": ("decoder",), "masked_lm": ("encoder",)}


def command(tiny, family: str, *flags, name: str = "unused") -> list:
    """Return fairseq-train on the CPU with these flags; the check's name says where its checkpoint goes."""
    return [*check_gpu.train_command(family, tiny.folder, tiny.checkpoint(family, name).parent), "--cpu", *flags]


def saved(tiny, family: str, name: str) -> dict:
    return torch.load(tiny.checkpoint(family, name), weights_only=True)


def largest_difference(tiny, family: str, one: str, other: str) -> float:
    return check_gpu.largest_difference(tiny.checkpoint(family, one), tiny.checkpoint(family, other))


def last_loss(log: str) -> float:
    return float(re.findall(r"epoch \d+:.*? loss=([\d.]+)", log)[-1])


# --- lower precision ---


@pytest.mark.parametrize("name", ["--bf16", "--memory-efficient-bf16", "--amp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_cpu_trains_in_lower_precision(tiny, family, name):
    """Each tensor is stored once and has one moment; on the CPU --amp is fp32, as torch's warning says."""
    checks = {check.name: check for check in check_gpu.list_checks([family], cpu=True)}
    tiny.train(checks["fp32"])
    tiny.train(checks[name])
    passed, found = tiny.judge(checks[name])
    assert passed, found
    difference = largest_difference(tiny, family, "fp32", name)
    assert (difference == 0) == (name == "--amp") and difference < 0.05


FP16 = {
    "flat": {},
    "not flat": {"fp16_no_flatten_grads": True},
    "memory efficient": {"memory_efficient_fp16": True},
}


@pytest.mark.parametrize("kind", FP16)
@pytest.mark.parametrize("family", FAMILIES)
def test_fp16_optimizers_hold_unique_parameters(tiny, family, kind, monkeypatch):
    """The trainer in half precision, without the check that refuses it on the CPU."""
    # The index of the GPU is the key of the flat copies; on the CPU it is None, as a parameter's device.index is there.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(hooks, "TRAINING_CHECKS", [])
    # Half precision on the CPU stores 1 / sqrt(1e-12) of a row of padding as infinity; a GPU stores it in fp32.
    epsilon = ["--layernorm-eps", 1e-5] if family == "masked_lm" else []
    reference = train_here(command(tiny, family, *epsilon, name=f"fp32 for {kind}"))
    log = train_here(command(tiny, family, *epsilon, name=kind), fp16=True, **FP16[kind])
    assert abs(last_loss(log) - last_loss(reference)) < 0.05
    stored, unique, moments = check_gpu.count_stored(tiny.checkpoint(family, kind))
    number = int(re.search(r"num. shared model params: ([\d,]+)", log)[1].replace(",", ""))
    assert stored == unique == moments == number
    states = saved(tiny, family, kind)["last_optimizer_state"]["state"]
    assert len(states) == 1 if kind == "flat" else len(states) > 10
    assert all(state["exp_avg"].dtype == torch.float32 for state in states.values())


@pytest.mark.parametrize("flag", ["--fp16", "--memory-efficient-fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp16_without_a_gpu_is_refused_when_training(tiny, family, flag, monkeypatch):
    """Before --save-dir is made; as a flag that a model is only looked at with, it passes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = [word for word in command(tiny, family, flag, name=f"refused {flag}") if word != "--cpu"]
    assert build(words)
    with pytest.raises(ValueError, match=f"^{flag} needs a GPU, and torch sees none on this machine: use --.*bf16$"):
        train_here(words)
    assert not tiny.checkpoint(family, f"refused {flag}").parent.exists()


def test_bf16_is_for_tpus_only_where_there_is_torch_xla(monkeypatch):
    assert parse("transformer_shared_cycle", "--bf16").tpu is False
    assert parse("transformer_shared_cycle", "--tpu").tpu is True
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert parse("transformer_shared_cycle", "--bf16").tpu is True


# --- batches ---


@pytest.fixture(scope="module")
def alike(tiny):
    """A part of the speech data whose clips are equally long: fairseq's convolutions see the padding of a batch."""
    header, first, *rest = (tiny.folder / "speech" / "valid.tsv").read_text("utf-8").splitlines()
    columns = header.split("\t")
    same = [columns.index(name) for name in ("audio", "n_frames")]
    rows = [first.split("\t"), *(row.split("\t") for row in rest)]
    for row in rows[1:]:
        for column in same:
            row[column] = rows[0][column]
    lines = [header, *("\t".join(row) for row in rows)]
    (tiny.folder / "speech" / "train_alike.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(rows)


UPDATES = 4
BY_TOKEN = [(family, []) for family in FAMILIES]
# The criterion of masked language models counts masked tokens, whatever the flag says.
BY_SENTENCE = [(family, ["--sentence-avg"]) for family in FAMILIES if family != "masked_lm"]


@pytest.mark.parametrize(("family", "flags"), BY_TOKEN + BY_SENTENCE, ids=str)
def test_four_batches_per_update_are_one_of_four_times_the_size(tiny, alike, family, flags):
    part, sentences = ("train_alike", alike) if family == "speech_to_text" else ("valid", 8)
    assert sentences % 4 == 0
    names = [f"{kind} {flags}" for kind in ("four", "one")]
    for name, batch in zip(names, (["--update-freq", 4], []), strict=True):
        size = sentences // 4 if batch else sentences
        # An update is an epoch here.
        words = ["--train-subset", part, "--batch-size", size, "--max-update", UPDATES, *batch, *flags]
        train_here(command(tiny, family, *words, name=name))
        assert saved(tiny, family, name)["optimizer_history"][-1]["num_updates"] == UPDATES
    assert largest_difference(tiny, family, *names) < 1e-5


@pytest.mark.parametrize("updates", [1, 2])
def test_the_encoder_learns_once_it_is_no_longer_frozen(tiny, monkeypatch, updates):
    """With --amp, on the CPU in bfloat16: what autocast keeps from the frozen updates must not outlive them."""
    used = []

    def autocast(enabled):
        used.append(enabled)
        return torch.autocast("cpu", torch.bfloat16, enabled=enabled)

    monkeypatch.setattr(torch.cuda.amp, "autocast", autocast)
    names = {}
    for last in (0, 2, 3):
        names[last] = f"frozen {last} {updates}"
        rate = ["--lr", 0, "--max-update", 1] if last == 0 else ["--max-update", last]
        flags = ["--amp", "--encoder-freezing-updates", 2, "--update-freq", updates, *rate]
        train_here(command(tiny, "speech_to_text", *flags, name=names[last]))
    assert used and all(used)
    begin, frozen, free = (saved(tiny, "speech_to_text", name)["model"] for name in names.values())
    encoder = [name for name in begin if name.startswith("encoder.") and begin[name].numel() > 1]
    encoder = [name for name in encoder if "version" not in name]
    assert all(torch.equal(begin[name], frozen[name]) for name in encoder)
    still = [name for name in encoder if torch.equal(frozen[name], free[name])]
    assert len(encoder) > 20 and not still
    assert any(not torch.equal(begin[name], frozen[name]) for name in begin if name.startswith("decoder."))


# --- LayerDrop ---


def layers_of(model) -> dict:
    """Return the stacks of a model by the name of their flags."""
    return {stack: model.get_submodule(path) for stack, path in model.STACKS.items()}


def used_layers(model, inputs: dict, seed: int) -> dict[str, list[int]]:
    """Return which layers a forward pass in training uses, by stack."""
    used = {stack: [] for stack in model.STACKS}
    handles = [
        layers[index].register_forward_pre_hook(lambda *_, found=used[stack], index=index: found.append(index))
        for stack, layers in layers_of(model).items()
        for index in range(len(layers))
    ]
    torch.manual_seed(seed)
    model.train()(**inputs)
    for handle in handles:
        handle.remove()
    return used


@pytest.mark.parametrize("family", check_gpu.LAYERDROP)
def test_layerdrop_draws_by_position(tiny, family):
    """The layers left out are those of fairseq's model without sharing, whatever sets they use."""
    stacks = STACKS[family]
    drop = [word for stack in stacks for word in (f"--{stack}-layerdrop", 0.5)]
    none = [word for stack in stacks for word in (f"--{stack}-sharing", "none", f"--{stack}-unique-layers", 4)]
    shared, unshared = build(command(tiny, family, *drop)), build(command(tiny, family, *drop, *none))
    tokens = torch.randint(4, 100, (2, 5), generator=torch.Generator().manual_seed(0))
    inputs = {"src_tokens": tokens, "src_lengths": torch.tensor([5, 5]), "prev_output_tokens": tokens}
    if family == "masked_lm":
        inputs = {"src_tokens": tokens}
    elif family == "language_modeling":
        inputs.pop("prev_output_tokens")
    split = 0
    for seed in range(12):
        used = used_layers(shared, inputs, seed)
        assert used == used_layers(unshared, inputs, seed)
        for stack, layers in layers_of(shared).items():
            assignment = layers.sharing.assignment
            kept = {assignment[index] for index in used[stack]}
            split += any(assignment[index] in kept for index in set(range(4)) - set(used[stack]))
    assert split  # one layer of a set was used while another was not


# --- conversions of a model ---

TIED = {
    "translation": [
        ["--share-all-embeddings"],
        ["--share-all-embeddings", "--factorized-embed-dim", 8],
        ["--encoder-layerdrop", 0.1, "--decoder-layerdrop", 0.1],
    ],
    "language_modeling": [
        ["--share-decoder-input-output-embed"],
        ["--factorized-embed-dim", 8],
        [
            *("--adaptive-input", "--adaptive-input-cutoff", "50,100", "--adaptive-softmax-cutoff", "50,100"),
            *("--tie-adaptive-weights", "--criterion", "adaptive_loss"),
        ],
    ],
    "speech_to_text": [
        ["--share-decoder-input-output-embed"],
        ["--share-decoder-input-output-embed", "--factorized-embed-dim", 8],
    ],
    "masked_lm": [[], ["--encoder-layerdrop", 0.1], ["--untie-weights-roberta"]],
}
MODELS = [(family, flags) for family, choices in TIED.items() for flags in choices]
MODELS += [(family, ["--sharing-parts", ",".join(parts)]) for family in FAMILIES for parts in PART_SETS[:-1]]


def overwrite(model):
    """Convert while torch makes new parameters in place of writing into the old ones."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return model.half().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def swap(model):
    """Convert while torch swaps the parameters' contents."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.half().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


CONVERSIONS = {
    "to a dtype": lambda model: model.to(torch.float64),
    "half": lambda model: model.half(),
    "float": lambda model: model.double().float(),
    "bfloat16": lambda model: model.bfloat16(),
    "to a device": lambda model: model.to("meta"),
    "to_empty": lambda model: model.to("meta").to_empty(device="cpu"),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "share_memory": lambda model: model.share_memory(),
    "overwriting": overwrite,
    "swapping": swap,
}


def flags_of(tiny, family, flags) -> list:
    """Return the command with these flags; another kind of embedding takes the place of the family's tied one."""
    words = command(tiny, family, *flags)
    if "--adaptive-input" in flags:
        words.remove("--share-decoder-input-output-embed")
    return words


@pytest.mark.parametrize(
    ("family", "flags"),
    MODELS,
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value)) or "plain",
)
def test_ties_survive(tiny, family, flags):
    """Layers, parts of layers, embeddings and factors: what was one parameter is one after every conversion."""
    build_one = builder(flags_of(tiny, family, flags))
    model = build_one()
    expected = tied_names(model)
    borrowed = sum(len(group) - 1 for group in expected)
    assert borrowed > 0
    for name, convert in CONVERSIONS.items():
        if name == "pickle" and family == "language_modeling":  # nor does fairseq's, whose options are nameless classes
            with pytest.raises(pickle.PicklingError, match="Can.t pickle"):
                convert(build_one())
            continue
        converted = convert(build_one())
        assert tied_names(converted) == expected, name
        converted.state_dict()  # which looks at every tie of the layers
        if name in ("deepcopy", "pickle", "overwriting", "swapping"):
            with torch.no_grad():
                for parameter in converted.parameters():
                    parameter.add_(1)
            model.load_state_dict(converted.state_dict())
            assert tied_names(model) == expected
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), converted.parameters(), strict=True))
            for stack, layers in layers_of(converted).items():  # a copy's hooks are its own
                layers.sharing = type(layers.sharing)(layers.sharing.assignment[::-1] + (0,), layers.sharing.parts)
                assert layers_of(model)[stack].sharing is not layers.sharing


@pytest.mark.parametrize("family", FAMILIES)
def test_a_part_of_a_model_that_lost_its_ties_is_not_saved(tiny, family):
    """Torch can be told to make new parameters; converting less than the model then breaks its ties."""
    model = build(command(tiny, family))
    overwrite(next(iter(layers_of(model).values())))
    with pytest.raises(ValueError, match="no longer is the same tensor"):
        model.state_dict()


def test_torchscript_keeps_ties(tiny):
    """Of translation models; fairseq's others use what torch.jit.script does not take."""
    model = build(command(tiny, "translation")).eval()
    scripted = torch.jit.script(model)
    addresses = {name: tensor.data_ptr() for name, tensor in scripted.named_parameters(remove_duplicate=False)}
    for names in tied_names(model):
        assert len({addresses[name] for name in names}) == 1, names
