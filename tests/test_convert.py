"""`fairseq-sharing init` and `untie` on models of all four families that fairseq-train has trained."""

import doctest
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import prepare_speech
import pytest
import torch
from conftest import FOUR_FROM_TWO, PLUGIN, REPOSITORY, TINY, build, parse, run
from fairseq.checkpoint_utils import load_model_ensemble

from fairseq_sharing.strategies import owners
from fairseq_sharing.tools import convert
from fairseq_sharing.tools.convert import expand
from fairseq_sharing.tools.cost import measure
from fairseq_sharing.tools.main import main
from fairseq_sharing.tools.model import paths_of, read_architecture, read_checkpoint

CLIPS = REPOSITORY / "examples" / "speech_to_text" / "data"
BOTH = [*TINY, "--encoder-layers", "4", "--decoder-layers", "4"]
LAYERS = [*BOTH, "--encoder-normalize-before", "--decoder-normalize-before"]


@dataclass
class Family:
    """How a family is trained, from fairseq's architecture and from ours."""

    stock: str
    shared: str
    task: list[str]
    sizes: list[str]  # what both have in common
    ours: list[str]  # what makes ours fairseq's, apart from sharing
    stacks: tuple[str, ...]


FAMILIES = {
    "translation": Family(
        "transformer",
        "transformer_shared_cycle_rev",
        ["--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1"],
        [*LAYERS, "--share-all-embeddings"],
        [],
        ("encoder", "decoder"),
    ),
    "language modelling": Family(
        "transformer_lm",
        "transformer_lm_shared_cycle_rev",
        ["--task", "language_modeling", "--tokens-per-sample", "32"],
        [
            *("--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "32", "--decoder-attention-heads", "2"),
            *("--decoder-layers", "4", "--decoder-input-dim", "16", "--decoder-output-dim", "16"),
            *("--decoder-normalize-before", "--share-decoder-input-output-embed"),
        ],
        [],
        ("decoder",),
    ),
    "speech": Family(
        "s2t_transformer",
        "s2t_transformer_shared_cycle_rev",
        ["--task", "speech_to_text", "--criterion", "label_smoothed_cross_entropy"],
        [*BOTH, "--conv-channels", "24"],
        [],
        ("encoder", "decoder"),
    ),
    "masked language modelling": Family(
        "roberta",
        "albert_encoder",
        ["--task", "masked_lm", "--criterion", "masked_lm", "--tokens-per-sample", "64"],
        [
            *("--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "32", "--encoder-attention-heads", "2"),
            *("--encoder-layers", "4", "--activation-fn", "gelu", "--max-positions", "64"),
        ],
        ["--factorized-embed-dim", "16", "--layernorm-eps", "1e-5", "--encoder-sharing", "cycle_rev"],
        ("encoder",),
    ),
}


@pytest.fixture(scope="module")
def folders(data, tmp_path_factory) -> dict[str, Path]:
    """Real data for each family: English-German text, its English side alone, and four clips of speech."""
    text = tmp_path_factory.mktemp("english")
    shutil.copy(data / "dict.en.txt", text / "dict.txt")
    for split in ("train", "valid"):
        for kind in ("bin", "idx"):
            shutil.copy(data / f"{split}.en-de.en.{kind}", text / f"{split}.{kind}")
    speech = tmp_path_factory.mktemp("speech")
    lines = (CLIPS / "train.tsv").read_text("utf-8").splitlines()[:5]
    (speech / "clips.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    parts = [word for part in ("train", "valid") for word in (f"--{part}", str(speech / "clips.tsv"))]
    flags = ["--audio-root", str(CLIPS), *parts, "--vocab-type", "char", "--out", str(speech / "data")]
    assert prepare_speech.main([*flags, "--specaugment", "none"]) == 0
    return {
        "translation": data,
        "language modelling": text,
        "speech": speech / "data",
        "masked language modelling": text,
    }


def train(folder: Path, save_dir: Path, family: Family, arch: str, *flags, updates: int = 3) -> str:
    return run(
        [
            *("fairseq-train", folder, "--user-dir", PLUGIN, "--arch", arch, "--save-dir", save_dir, "--cpu"),
            *("--optimizer", "adam", "--lr", "0.01", "--max-update", updates, "--max-tokens", 2000, "--dropout", 0),
            *("--no-epoch-checkpoints", "--no-progress-bar", "--num-workers", 0, *family.task, *family.sizes, *flags),
        ]
    )


def sharing_flags(family: Family, unique: int = 2) -> list[str]:
    return [*family.ours, *(word for stack in family.stacks for word in (f"--{stack}-unique-layers", str(unique)))]


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):
    """Return a function that trains fairseq's own model of a family once: the checkpoint and the log."""
    known = {}

    def get(name: str) -> tuple[Path, str]:
        if name not in known:
            save_dir = tmp_path_factory.mktemp("trained")
            log = train(folders[name], save_dir, FAMILIES[name], FAMILIES[name].stock)
            known[name] = save_dir / "checkpoint_last.pt", log
        return known[name]

    return get


def load(path) -> dict:
    return torch.load(path, weights_only=True)


def scores(path, name: str) -> torch.Tensor:
    """Return the model's scores as fairseq loads it."""
    (model,), _ = load_model_ensemble([str(path)])
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, 30, (3, 8), generator=generator)
    lengths = torch.tensor([8, 8, 8])
    model.eval()
    if name == "translation":
        return model(tokens, lengths, tokens.flip(1))[0]
    if name == "speech":
        return model(torch.randn(3, 50, 80, generator=generator), torch.tensor([50, 50, 50]), tokens % 15)[0]
    return model(tokens)[0]


def flags_of(name: str, arch: str, *more) -> list[str]:
    return ["--arch", arch, *FAMILIES[name].sizes, *more]


SLOW = ("language modelling", "speech")  # the two that add least to the others


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in FAMILIES])
def test_from_unshared_to_shared_and_back(folders, trained, tmp_path, capsys, name):
    """A trained model of fairseq's is shared, trains on, and is untied again, to ours and to fairseq's."""
    family = FAMILIES[name]
    unshared, log = trained(name)
    shared = tmp_path / "shared.pt"
    flags = flags_of(name, family.shared, *sharing_flags(family))
    data = ["--data", str(folders[name])]
    assert main(["init", "--from", str(unshared), *flags, "--rule", "mean", "--out", str(shared), *data]) == 0
    shown = capsys.readouterr().out
    for stack in family.stacks:
        assert f"{stack}: 4 layers, unshared -> 4 layers from 2 parameter sets (0 1 1 0)\n" in shown
    assert shown.count("  set 0: mean of layers 0, 3\n  set 1: mean of layers 1, 2\n") == len(family.stacks)
    moved = re.search(r"validation loss on valid \(.*\): ([\d.]+) before, ([\d.]+) after: (.*)", shown)
    logged = re.findall(r"valid on 'valid' subset.*? \| (?:nll_)?loss ([\d.]+)(?: \| nll_loss ([\d.]+))?", log)[-1]
    assert float(moved[1]) == pytest.approx(float(logged[1] or logged[0]), abs=2e-3)  # what fairseq-train printed
    assert float(moved[2]) != float(moved[1]) and moved[3].startswith("moved by ")

    before, after = load(unshared)["model"], load(shared)["model"]
    subject = read_checkpoint(str(shared))
    full = expand(after, subject.model)
    for path in paths_of(subject.model).values():
        for key in (key for key in before if key.startswith(f"{path}.0.")):
            leaf = key.removeprefix(f"{path}.0.")
            for pair in ((0, 3), (1, 2)):
                mean = sum(before[f"{path}.{layer}.{leaf}"].double() for layer in pair) / 2
                assert all(torch.equal(full[f"{path}.{layer}.{leaf}"], mean.float()) for layer in pair), key

    save_dir = tmp_path / "save"
    tuned = train(
        folders[name],
        save_dir,
        family,
        family.shared,
        *sharing_flags(family),
        "--finetune-from-model",
        shared,
        updates=2,
    )
    assert f"loading pretrained model from {shared}" in tuned and "num_updates 2" in tuned
    trained_on = save_dir / "checkpoint_last.pt"
    check_bytes(trained_on)

    expected = scores(trained_on, name)
    for kind, arch in (("own", family.shared), ("stock", family.stock)):
        out = tmp_path / f"{kind}.pt"
        command = ["untie", "--from", str(trained_on), "--to", kind, "--out", str(out)]
        assert main([*command, *data] if kind == "own" else command) == 0
        shown = capsys.readouterr().out
        assert "-> 4 layers, unshared\n" in shown and f"--arch {arch}" in shown
        assert ("did not move" if kind == "own" else "was not measured") in shown
        assert torch.equal(scores(out, name), expected)
        state = load(out)
        assert "last_optimizer_state" not in state and not any("sharing_version" in key for key in state["model"])
        matrices = [key for key in state["model"] if re.search(r"layers\.\d+\.fc1\.weight$", key)]
        assert len({state["model"][key].data_ptr() for key in matrices}) == len(matrices) == 4 * len(family.stacks)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.pt", "save", "shared.pt", "stock.pt"]


def check_bytes(path) -> None:
    """What `show` says of a checkpoint's size is what its tensors take, each once."""
    state, figures = load(path), measure(read_checkpoint(str(path)))
    tensors = {value.data_ptr(): value.numel() * value.element_size() for value in state["model"].values()}
    assert sum(tensors.values()) == figures.checkpoint["model"]
    moments = [
        each[name] for each in state["last_optimizer_state"]["state"].values() for name in ("exp_avg", "exp_avg_sq")
    ]
    size = sum(value.numel() * value.element_size() for value in moments)
    assert figures.checkpoint["with optimizer"] == figures.checkpoint["model"] + size
    assert size == figures.memory["fp32"]["Adam's moments"]


def test_show_takes_the_dictionaries_of_the_data(folders):
    """With fairseq's four symbols, and the mask where the task adds it."""
    for name, family in FAMILIES.items():
        (file, *_) = sorted(folders[name].glob("dict*.txt"))
        symbols = len(file.read_text("utf-8").splitlines()) + 4 + (name == "masked language modelling")
        assert read_architecture(family.stock, family.sizes, data=str(folders[name])).sizes == (symbols, symbols)


# --- rules, on models that were never trained ---

REV = ("transformer_shared_cycle_rev", *TINY, *FOUR_FROM_TWO)


def save(path, arch: str, *flags, **more) -> str:
    """Write an untrained model as fairseq's trainer does, as far as the tools read it."""
    args = parse(arch, *flags)
    args._name = arch
    torch.save({"cfg": {"model": args}, "model": build(arch, *flags).state_dict(), "extra_state": {}, **more}, path)
    return str(path)


def initialise(source, out, rule: str, *flags) -> dict:
    """Run `init`; return every layer's tensors."""
    assert main(["init", "--from", str(source), *flags, "--rule", rule, "--out", str(out), "--force"]) == 0
    return expand(load(out)["model"], read_checkpoint(str(out)).model)


def is_in(part: str, name: str) -> bool:
    words = {"attention": ("self_attn.", "encoder_attn."), "ffn": ("fc1", "fc2"), "norm": ("layer_norm",)}
    return any(word in name for word in words[part])


@pytest.mark.parametrize("rule", ["first", "mean", "stepwise"])
@pytest.mark.parametrize("parts", ["attention,ffn,norm", "attention,ffn"])
def test_rules(tmp_path, rule, parts):
    """Each set takes what the rule says; what is not shared stays with its layer."""
    source = save(tmp_path / "a.pt", "transformer", *TINY, "--encoder-layers", "6", "--decoder-layers", "6")
    before = load(source)["model"]
    flags = [
        "--arch",
        "transformer_shared_cycle",
        *TINY,
        "--encoder-assignment",
        "0,1,2,2,1,0",
        "--encoder-layers",
        "6",
    ]
    flags += ["--decoder-layers", "6", "--decoder-assignment", "1,1,1,0,0,2", "--sharing-parts", parts]
    after = initialise(source, tmp_path / "b.pt", rule, *flags)
    taken = {  # layers of the source, by stack and layer
        "first": {"encoder": [[0], [1], [2], [2], [1], [0]], "decoder": [[0], [0], [0], [3], [3], [5]]},
        "mean": {
            "encoder": [[0, 5], [1, 4], [2, 3], [2, 3], [1, 4], [0, 5]],
            "decoder": [[0, 1, 2]] * 3 + [[3, 4]] * 2 + [[5]],
        },
        # round(j 5 / 2) for the first, second and third set used: 0, 2.5 to the even 2, 5
        "stepwise": {"encoder": [[0], [2], [5], [5], [2], [0]], "decoder": [[0], [0], [0], [2], [2], [5]]},
    }[rule]
    for stack, layers in taken.items():
        for layer, sources in enumerate(layers):
            prefix = f"{stack}.layers.{layer}."
            for key in (key for key in before if key.startswith(prefix)):
                name = key.removeprefix(prefix)
                shared = any(is_in(part, name) for part in parts.split(","))
                found = [before[f"{stack}.layers.{each}.{name}"].double() for each in (sources if shared else [layer])]
                assert torch.equal(after[key], (sum(found) / len(found)).float()), key
    assert torch.equal(after["encoder.embed_tokens.weight"], before["encoder.embed_tokens.weight"])


def test_stepwise_changes_the_depth(tmp_path):
    source = save(tmp_path / "a.pt", *REV)  # 0 1 1 0
    before = expand(load(source)["model"], read_checkpoint(source).model)
    after = initialise(source, tmp_path / "b.pt", "stepwise", "--arch", "transformer_shared_sequence", *TINY)
    steps = [0, 1, 1, 2, 2, 3]  # round(j 3 / 5)
    for layer in range(12):  # 0 0 1 1 2 2 3 3 4 4 5 5
        key = "decoder.layers.{}.encoder_attn.v_proj.weight"
        assert torch.equal(after[key.format(layer)], before[key.format(steps[layer // 2])])
    one = ["--arch", "transformer_shared_universal", *TINY, "--encoder-layers", "9", "--decoder-layers", "2"]
    after = initialise(source, tmp_path / "b.pt", "stepwise", *one)
    assert torch.equal(after["encoder.layers.8.fc1.weight"], before["encoder.layers.0.fc1.weight"])


def test_the_examples_of_the_rules():
    found = doctest.testmod(convert)
    assert found.attempted > 0 and found.failed == 0


def test_from_another_sharing(tmp_path, capsys):
    """Each layer of the source counts with what it uses: 0 1 1 0 to 0 0 1 1."""
    source = save(tmp_path / "a.pt", *REV)
    before = expand(load(source)["model"], read_checkpoint(source).model)
    flags = ["--arch", "transformer_shared_sequence", *TINY, *FOUR_FROM_TWO]
    after = initialise(source, tmp_path / "b.pt", "mean", *flags)
    assert "encoder: 4 layers from 2 parameter sets (0 1 1 0) -> 4 layers from 2 parameter sets (0 0 1 1)" in (
        capsys.readouterr().out
    )
    for layer, owner in enumerate(owners([0, 0, 1, 1])):
        found = [before[f"encoder.layers.{each}.fc2.bias"].double() for each in (owner, owner + 1)]
        assert torch.equal(after[f"encoder.layers.{layer}.fc2.bias"], (sum(found) / 2).float())


def test_what_belongs_to_the_old_training_is_left_out(tmp_path):
    ema = {"ema": {"w": torch.ones(1)}, "ema_fp32_params": {"w": torch.ones(1)}, "epoch": 3}
    source = save(tmp_path / "a.pt", *REV, last_optimizer_state={"state": {}}, optimizer_history=[{}])
    torch.save({**load(source), "extra_state": ema}, source)
    assert main(["untie", "--from", source, "--out", str(tmp_path / "b.pt")]) == 0
    state = load(tmp_path / "b.pt")
    assert state["extra_state"] == {"epoch": 3} and "last_optimizer_state" not in state
    assert state["optimizer_history"] == [{}]
    assert state["cfg"]["model"].encoder_sharing == "none"


# --- refusals ---


def fails(capsys, *argv) -> str:
    """Run a command that must fail with one sentence; return the sentence."""
    assert main(list(map(str, argv))) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.strip().splitlines()) == 1
    return captured.err.strip()


def test_refusals(tmp_path, capsys):
    source = save(tmp_path / "a.pt", *REV)
    plain = save(tmp_path / "plain.pt", "transformer", *BOTH)
    narrow = save(tmp_path / "narrow.pt", *REV, "--factorized-embed-dim", "8")
    (tmp_path / "text.pt").write_text("no checkpoint")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:5000])
    files = sorted(path.name for path in tmp_path.iterdir())
    out = tmp_path / "out.pt"
    flags = ["--arch", "transformer_shared_cycle", *TINY, *FOUR_FROM_TWO]

    def init(*words, start=source, to=out, rule="mean") -> str:
        return fails(capsys, "init", "--from", start, "--rule", rule, "--out", to, *(words or flags))

    assert "there is no file" in init(start=tmp_path / "missing.pt")
    assert "is no checkpoint" in init(start=tmp_path / "text.pt")
    assert "truncated" in init(start=tmp_path / "cut.pt")
    assert "--out" in init(to=source) and "exists: remove it or add --force" in init(to=source)
    assert "there is no folder" in init(to=tmp_path / "no" / "out.pt")
    assert "--arch spiral is not known" in init("--arch", "spiral")
    assert "--arch transformer_shared_cycle has no --no-such-flag" in init(*flags, "--no-such-flag", "1")
    assert "of another family than transformer_shared_cycle_rev" in init("--arch", "transformer_lm_shared_cycle")
    sentence = init(*flags, "--encoder-layers", "6", "--encoder-unique-layers", "3")
    assert "--rule mean needs equally many layers" in sentence and "--encoder-layers 6" in sentence
    sentence = init(*flags, "--encoder-attention-heads", "4")  # which no tensor's shape tells
    assert f"--encoder-attention-heads is 4 in the new model and 2 in {source}" in sentence
    assert "--encoder-ffn-embed-dim is 64" in init(*flags, "--encoder-ffn-embed-dim", "64")
    assert "--encoder-normalize-before is True" in init(*flags, "--encoder-normalize-before")
    assert "--layernorm-embedding is True" in init(*flags, "--layernorm-embedding")
    assert "does not say which task" in init(*flags, "--data", tmp_path / "none")
    more = load(source)
    more["model"]["encoder.layers.0.gate"] = torch.ones(1)  # of a later version, say
    torch.save(more, tmp_path / "cut.pt")
    assert "has encoder.layers.*.gate, for which the new model has no place" in init(start=tmp_path / "cut.pt")
    untie = ("untie", "--out", out, "--from")
    assert "shares nothing" in fails(capsys, *untie, plain)
    sentence = fails(capsys, *untie, narrow, "--to", "stock")
    assert "--factorized-embed-dim 8, for which fairseq's transformer has no place" in sentence
    assert files == sorted(path.name for path in tmp_path.iterdir())


def test_data_of_another_model_is_refused(data, trained, folders, tmp_path, capsys):
    checkpoint, _ = trained("translation")
    flags = flags_of("translation", "transformer_shared_cycle", *sharing_flags(FAMILIES["translation"]))
    command = ["init", "--from", checkpoint, *flags, "--rule", "first", "--out", tmp_path / "out.pt"]
    other = tmp_path / "other"
    shutil.copytree(data, other)
    for language in ("en", "de"):
        with (other / f"dict.{language}.txt").open("a", encoding="utf-8") as file:
            file.write("another 1\n")
    symbols = sum(1 for _ in (data / "dict.en.txt").open(encoding="utf-8")) + 4
    assert f"dictionaries of {symbols + 1:,} and {symbols + 1:,} symbols" in fails(capsys, *command, "--data", other)
    sentence = fails(capsys, *command, "--data", data, "--valid-subset", "nothing")
    assert "--data has no --valid-subset nothing" in sentence
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


def test_a_full_disk_leaves_nothing(trained, tmp_path):
    """A limit on the size of files stands for the full disk: the write fails half-way."""
    checkpoint, _ = trained("translation")
    flags = flags_of("translation", "transformer_shared_cycle", *sharing_flags(FAMILIES["translation"]))
    command = ["fairseq-sharing", "init", "--from", checkpoint, *flags, "--rule", "first", "--out", tmp_path / "out.pt"]
    output = run(command, largest_file=4000, check=False)
    assert "fairseq-sharing init: error: cannot write" in output and "Traceback" not in output
    assert not list(tmp_path.iterdir())
