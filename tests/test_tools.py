"""The command ``fairseq-sharing``: what it prints, what it writes, and how it fails."""

import math
import re
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from commands import environment
from conftest import FOUR_FROM_TWO, PLUGIN, REPOSITORY, TINY, build, parse
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder
from fairseq.models import ARCH_MODEL_REGISTRY
from families import EVERY_FAMILY, FAMILIES, build_trainer, configure, make_data

from fairseq_sharing.checkpoint import RECORD
from fairseq_sharing.models.transformer_shared import PRESETS, SIZES
from fairseq_sharing.tools import unigram
from fairseq_sharing.tools.main import COMMANDS, main
from fairseq_sharing.tools.model import build_without_memory, parse_architecture
from fairseq_sharing.tools.progress import progress
from fairseq_sharing.tools.sizes import count_components

REV = ("transformer_shared_cycle_rev", *TINY, *FOUR_FROM_TWO)


def save(model, path, arch_flags=REV, **more):
    """Write what fairseq's trainer writes, as far as the tools read it."""
    args = parse(*arch_flags)
    args._name = arch_flags[0]
    torch.save({"cfg": {"model": args}, "model": model.state_dict(), "extra_state": {}, **more}, path)
    return str(path)


def fails(capsys, *argv) -> str:
    """Run a command that must fail with one sentence; return the sentence."""
    assert main(list(map(str, argv))) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.strip().splitlines()) == 1
    return captured.err.strip()


def counted(counts: dict) -> tuple[str, str]:
    """Return unique parameters and those without sharing as the tables write them."""
    return tuple(f"{sum(row[column] for row in counts.values()):,}" for column in ("unique", "without sharing"))


# --- path ---


def test_path_is_the_folder_for_user_dir(capsys):
    assert main(["path"]) == 0
    assert capsys.readouterr().out == f"{PLUGIN}\n"


# --- show ---


def test_show_an_architecture(capsys):
    assert main(["show", "--arch", "transformer_shared_cycle_rev", "--share-all-embeddings"]) == 0
    shown = capsys.readouterr().out
    assert "encoder: 12 layers from 6 parameter sets" in shown
    assert "set    0  1  2  3  4  5  5  4  3  2  1  0" in shown
    total = next(line for line in shown.splitlines() if line.startswith("total")).split()
    assert total[:3] == ["total", "60,915,712", "105,054,208"]
    assert "58.0% of the parameters of the same depth without sharing." in shown


def test_show_takes_training_flags_and_a_vocabulary(capsys):
    flags = ["--encoder-layers", "9", "--encoder-unique-layers", "3", "--sharing-parts", "ffn"]
    assert main(["show", "--arch", "transformer_shared_cycle", "--vocab-size", "8000", *flags]) == 0
    shown = capsys.readouterr().out
    assert "set   0 1 2 0 1 2 0 1 2" in shown and "V=8,000" in shown and "sharing only ffn" in shown
    rows = {line.split("  ")[0]: line.split() for line in shown.splitlines()}
    assert rows["embeddings"][1] == f"{2 * 8000 * 512:,}" and rows["head"][1] == f"{8000 * 512:,}"


def test_show_does_not_ask_how_many_processes_there_are():
    """On a machine with two GPUs, or started by torchrun, training so is refused with fairseq's default backend."""
    program = "import sys, torch; torch.cuda.device_count = lambda: 2; from fairseq_sharing.tools.main import main"
    flags = ["show", "--arch", "transformer_shared_cycle_rev", "--encoder-layerdrop", "0.1"]

    def show(*more: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", f"{program}; sys.exit(main(sys.argv[1:]))", *flags, *more]
        return subprocess.run(command, env=environment(WORLD_SIZE="2"), capture_output=True, text=True, cwd=REPOSITORY)

    assert show().returncode == 0
    refused = show("--distributed-world-size", "2")
    assert refused.returncode == 2 and "--encoder-layerdrop 0.1 brings about" in refused.stderr


@pytest.mark.parametrize("arch", ["transformer", "transformer_iwslt_de_en"])
def test_show_a_stock_architecture(capsys, arch):
    assert main(["show", "--arch", arch]) == 0
    assert "encoder: 6 layers, each with its own parameters" in capsys.readouterr().out


def test_show_components_add_up(capsys):
    for flags in (
        ["--encoder-normalize-before", "--decoder-normalize-before"],
        ["--layernorm-embedding"],
        ["--encoder-learned-pos"],
    ):
        assert main(["show", "--arch", *REV, "--vocab-size", "40", *flags]) == 0
        shown = capsys.readouterr().out
        total = next(line for line in shown.splitlines() if line.startswith("total")).split()[1]
        expected = sum(parameter.numel() for parameter in build(*REV, *flags).parameters())
        assert total == f"{expected:,}"


def test_show_a_checkpoint(tmp_path, capsys):
    model = build(*REV)
    path = save(model, tmp_path / "a.pt")
    assert main(["show", "--path", path]) == 0
    shown = capsys.readouterr().out
    assert "0 1 1 0" in shown and path in shown and "V=40" in shown
    total = next(line for line in shown.splitlines() if line.startswith("total")).split()[1]
    assert total == f"{sum(parameter.numel() for parameter in model.parameters()):,}"


def test_show_refuses(tmp_path, capsys):
    text = tmp_path / "text.pt"
    text.write_text("no checkpoint")
    other = tmp_path / "other.pt"
    torch.save({"weights": 1}, other)
    truncated = tmp_path / "truncated.pt"
    whole = save(build(*REV), tmp_path / "whole.pt")
    truncated.write_bytes((tmp_path / "whole.pt").read_bytes()[:5000])
    assert "no file" in fails(capsys, "show", "--path", tmp_path / "missing.pt")
    assert "is no checkpoint" in fails(capsys, "show", "--path", text)
    assert "holds no 'model' with tensors" in fails(capsys, "show", "--path", other)
    assert "truncated" in fails(capsys, "show", "--path", truncated)
    truncated.write_bytes(b"")
    assert "truncated" in fails(capsys, "show", "--path", truncated)
    for model in ([1], {"a": 3}, {}):
        torch.save({"model": model}, other)
        assert "no 'model' with tensors" in fails(capsys, "show", "--path", other)
        assert "no 'model' with tensors" in fails(capsys, "average", "--inputs", other, "--output", tmp_path / "x")
    torch.save({"model": {"w": torch.ones(1)}, "cfg": {"model": {"_name": "lstm"}}}, other)
    assert "architecture lstm: only Transformers" in fails(capsys, "show", "--path", other)
    sentence = fails(capsys, "show", "--arch", "transformer_shared_cycle", "data-bin", "--lr", "1")
    assert "leave out the data folder data-bin" in sentence
    sentence = fails(capsys, "show", "--arch", "transformer_shared_cycle", "--no-such-flag", "1")
    assert "--arch transformer_shared_cycle has no --no-such-flag" in sentence
    assert "--path takes no further flags" in fails(capsys, "show", "--path", whole, "--encoder-layers", "3")
    assert "--arch spiral is not known" in fails(capsys, "show", "--arch", "spiral")
    assert "--vocab-size 3 must be at least 5" in fails(capsys, "show", "--arch", "transformer", "--vocab-size", "3")
    sentence = fails(capsys, "show", "--arch", "transformer_shared_cycle", "--encoder-unique-layers", "40")
    assert "--encoder-unique-layers 40 must be between 1 and --encoder-layers 12" in sentence


def rows_of(family: str) -> list[tuple[str, list[str]]]:
    """Return the architectures of a family with the other cells of their rows in docs/architectures.md."""
    tables = (REPOSITORY / "docs" / "architectures.md").read_text("utf-8")
    rows = re.findall(rf"^\| `({family}\w*)` \|(.*)\|$", tables, re.MULTILINE)
    return [(arch, [cell.strip() for cell in cells.split("|")]) for arch, cells in rows]


def test_the_table_of_architectures_is_true():
    rows = rows_of("transformer_shared_")
    assert len(rows) == len(PRESETS) * len(SIZES)
    for arch, (layers, sets, widths, heads, unique, unshared) in rows:
        args = parse_architecture(arch, ["--share-all-embeddings"])
        assert (layers, sets) == (str(args.decoder_layers), str(args.decoder_unique_layers))
        assert widths == f"{args.decoder_embed_dim} / {args.decoder_ffn_embed_dim}"
        assert heads == str(args.decoder_attention_heads)
        counts = count_components(build_without_memory(args, 32768, 32768))
        assert (unique, unshared) == counted(counts)


def test_the_table_of_language_models_is_true():
    rows = rows_of("transformer_lm_shared_")
    assert len(rows) == 7
    for arch, (layers, sets, widths, heads, vocabulary, unique, unshared) in rows:
        config = parse_architecture(arch, [] if arch.endswith("wiki103") else ["--share-decoder-input-output-embed"])
        assert (layers, sets) == (str(config.decoder_layers), str(config.decoder_unique_layers))
        assert widths == f"{config.decoder_embed_dim} / {config.decoder_ffn_embed_dim}"
        assert heads == str(config.decoder_attention_heads)
        counts = count_components(build_without_memory(config, *[int(vocabulary.replace(",", ""))] * 2))
        assert (unique, unshared) == counted(counts)


def test_the_table_of_speech_models_is_true():
    rows = rows_of("s2t_transformer_shared_")
    assert {arch for arch, _ in rows} == {
        name for name in ARCH_MODEL_REGISTRY if name.startswith("s2t_transformer_shared_")
    }
    for arch, (layers, sets, widths, heads, unique, unshared) in rows:
        config = parse_architecture(arch, ["--share-decoder-input-output-embed"])
        assert layers == f"{config.encoder_layers} + {config.decoder_layers}"
        assert sets == f"{config.encoder_unique_layers} + {config.decoder_unique_layers}"
        assert widths == f"{config.decoder_embed_dim} / {config.decoder_ffn_embed_dim}"
        assert (config.encoder_embed_dim, config.encoder_ffn_embed_dim) == tuple(map(int, widths.split(" / ")))
        assert heads == str(config.encoder_attention_heads) == str(config.decoder_attention_heads)
        counts = count_components(build_without_memory(config, 10000, 10000))
        assert (unique, unshared) == counted(counts)


def test_show_speech_to_text(tmp_path, capsys):
    assert main(["show", "--arch", "s2t_transformer_shared_sequence_librispeech", "--vocab-size", "10000"]) == 0
    shown = capsys.readouterr().out
    assert "encoder: 16 layers from 8 parameter sets" in shown and "decoder: 8 layers from 4 parameter sets" in shown
    rows = {re.split("  +", line)[0]: line.split()[1:] for line in shown.splitlines()}
    assert rows["convolutions"][:2] == ["3,033,088"] * 2 and rows["total"][0] == "50,190,336"
    assert main(["show", "--arch", "s2t_transformer_s", "--vocab-size", "1000"]) == 0
    assert "encoder: 12 layers, each with its own parameters" in capsys.readouterr().out


def test_the_table_of_masked_language_models_is_true():
    rows = rows_of("albert_encoder")
    assert len(rows) == 5
    for arch, (layers, sets, widths, heads, embed, unique, unshared) in rows:
        args = parse_architecture(arch, [])
        assert (layers, sets) == (str(args.encoder_layers), str(args.encoder_unique_layers))
        assert widths == f"{args.encoder_embed_dim} / {args.encoder_ffn_embed_dim}"
        assert (heads, embed) == (str(args.encoder_attention_heads), str(args.factorized_embed_dim))
        counts = count_components(build_without_memory(args, 30_000, 30_000))
        assert (unique, unshared) == counted(counts)


@pytest.mark.parametrize("arch", ["albert_encoder", "albert_encoder_large"])
def test_show_a_masked_language_model(capsys, arch):
    """RoBERTa keeps its layers elsewhere."""
    assert main(["show", "--arch", arch, "--encoder-layers", "6", "--encoder-unique-layers", "3"]) == 0
    shown = capsys.readouterr().out
    assert "encoder: 6 layers from 3 parameter sets" in shown and "set   0 0 1 1 2 2" in shown
    assert "decoder" not in shown and "embeddings" in shown


def test_show_leaves_the_log_alone(capsys, caplog):
    fails(capsys, "show", "--arch", "transformer_shared_cycle", "--encoder-unique-layers", "40")
    assert not caplog.messages
    with pytest.raises(ValueError):
        parse("transformer_shared_cycle", "--encoder-unique-layers", "40")
    assert len(caplog.messages) == 1


def test_show_notices_a_record_that_contradicts_the_configuration(tmp_path, capsys):
    path = save(build(*REV), tmp_path / "a.pt", ("transformer_shared_cycle", *REV[1:]))
    sentence = fails(capsys, "show", "--path", path)
    assert "were saved shared as 0 1 1 0, its configuration says 0 1 0 1" in sentence


# --- unigram ---


@pytest.fixture
def binarised(tmp_path):
    """Seven tokens to count from, six to measure: `a a b </s> a c </s>` and `a d </s> c b </s>`, where d is unknown."""
    dictionary = Dictionary()
    for symbol in "abc":
        dictionary.add_symbol(symbol)
    dictionary.save(str(tmp_path / "dict.txt"))
    for split, lines in (("train", ["a a b", "a c"]), ("valid", ["a d", "c b"]), ("test", [])):
        builder = MMapIndexedDatasetBuilder(str(tmp_path / f"{split}.bin"), dtype=np.uint16)
        for line in lines:
            builder.add_item(dictionary.encode_line(line, add_if_not_exist=False, line_tokenizer=str.split))
        builder.finalize(str(tmp_path / f"{split}.idx"))
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "tokens", "probabilities"),
    [
        # V = 7: <s>, <pad>, </s>, <unk>, a, b, c; each count of the training part raised by one, over 7 + 7
        ([], 6, [4 / 14, 1 / 14, 3 / 14, 2 / 14, 2 / 14, 3 / 14]),
        (["--begin"], 8, [3 / 16, 4 / 16, 1 / 16, 3 / 16, 3 / 16, 2 / 16, 2 / 16, 3 / 16]),
    ],
)
@pytest.mark.parametrize("lines", [1, 2, 1000])
def test_unigram_perplexity_by_hand(binarised, capsys, monkeypatch, lines, flags, tokens, probabilities):
    monkeypatch.setattr(unigram, "LINES", lines)
    assert main(["unigram", str(binarised), *flags]) == 0
    perplexity = math.prod(probabilities) ** (-1 / tokens)
    bits = f"({math.log2(perplexity):.3f} bits per token)"
    assert capsys.readouterr().out == f"valid: {tokens} tokens, unigram perplexity {perplexity:.2f} {bits}\n"


def test_unigram_refuses(binarised, capsys):
    assert "there is no" in fails(capsys, "unigram", binarised / "no")
    assert "has no part dev" in fails(capsys, "unigram", binarised, "--subsets", "dev")
    assert "part test is empty" in fails(capsys, "unigram", binarised, "--subsets", "test")


# --- average ---


@pytest.fixture
def folder(tmp_path):
    """Epoch and update checkpoints 1..4 of a shared model with tied embeddings."""
    for number in range(1, 5):
        model = build(*REV, "--share-all-embeddings", seed=number)
        save(model, tmp_path / f"checkpoint{number}.pt", last_optimizer_state={"big": torch.ones(1000)})
        save(model, tmp_path / f"checkpoint_1_{number * 100}.pt")
    return tmp_path


def reference(folder, numbers):
    models = [torch.load(folder / f"checkpoint{number}.pt", weights_only=True)["model"] for number in numbers]
    return {
        key: torch.stack([model[key].double() for model in models]).mean(0).float()
        for key, value in models[0].items()
        if value.is_floating_point()
    }


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        (["--num-epoch-checkpoints", "3"], (4, 3, 2)),
        (["--num-epoch-checkpoints", "2", "--checkpoint-upper-bound", "3"], (3, 2)),
        (["--num-update-checkpoints", "2"], (4, 3)),
        (["--num-update-checkpoints", "2", "--checkpoint-upper-bound", "399"], (3, 2)),
    ],
)
def test_average_is_exact(folder, capsys, flags, numbers):
    output = folder / "averaged.pt"
    assert main(["average", "--inputs", str(folder), "--output", str(output), *flags]) == 0
    state = torch.load(output, weights_only=True)
    expected = reference(folder, numbers)
    for key, value in expected.items():
        assert torch.equal(state["model"][key], value), key
    assert state["model"].keys() - expected.keys() == {f"{stack}.layers.{RECORD}" for stack in ("encoder", "decoder")}
    assert "last_optimizer_state" not in state
    assert (
        state["model"]["decoder.embed_tokens.weight"].data_ptr()
        == state["model"]["encoder.embed_tokens.weight"].data_ptr()
    )
    build(*REV, "--share-all-embeddings").load_state_dict(state["model"])
    assert [path.name for path in folder.iterdir() if path.suffix == ".tmp"] == []


def test_average_of_files_by_name(folder):
    files = [str(folder / f"checkpoint{number}.pt") for number in (1, 4)]
    assert main(["average", "--inputs", *files, "--output", str(folder / "averaged.pt")]) == 0
    state = torch.load(folder / "averaged.pt", weights_only=True)
    assert all(torch.equal(state["model"][key], value) for key, value in reference(folder, (1, 4)).items())


def test_average_of_models_that_number_their_sets_differently(tmp_path):
    arch = REV[0]
    swapped = (arch, *TINY, "--encoder-layers", "4", "--decoder-layers", "4", "--decoder-unique-layers", "2")
    swapped = (*swapped, "--encoder-assignment", "1,0,0,1")
    paths = [save(build(*REV), tmp_path / "a.pt"), save(build(*swapped, seed=2), tmp_path / "b.pt", swapped)]
    assert main(["average", "--inputs", *paths, "--output", str(tmp_path / "averaged.pt")]) == 0
    build(*REV).load_state_dict(torch.load(tmp_path / "averaged.pt", weights_only=True)["model"])


def test_average_ties_only_what_is_equal(tmp_path):
    """Embeddings that are one tensor in the first file and two in the second stay two."""
    tied = build(*REV, "--share-all-embeddings")
    first = save(tied, tmp_path / "a.pt")
    state = {key: value.clone() for key, value in tied.state_dict().items()}
    state["decoder.embed_tokens.weight"] += 1
    torch.save({"model": state}, tmp_path / "b.pt")
    assert main(["average", "--inputs", first, str(tmp_path / "b.pt"), "--output", str(tmp_path / "c.pt")]) == 0
    averaged = torch.load(tmp_path / "c.pt", weights_only=True)["model"]
    difference = averaged["decoder.embed_tokens.weight"] - averaged["encoder.embed_tokens.weight"]
    assert torch.allclose(difference, torch.full_like(difference, 0.5), atol=1e-6)


def test_average_converts_half_precision_once(tmp_path):
    paths = []
    for number in (1, 2):
        paths.append(save(build(*REV, seed=number).half(), tmp_path / f"{number}.pt"))
    assert main(["average", "--inputs", *paths, "--output", str(tmp_path / "averaged.pt")]) == 0
    averaged = torch.load(tmp_path / "averaged.pt", weights_only=True)["model"]
    first, second = (torch.load(path, weights_only=True)["model"] for path in paths)
    key = "encoder.layers.0.fc1.weight"
    assert averaged[key].dtype == torch.float32
    assert torch.equal(averaged[key], ((first[key].double() + second[key].double()) / 2).float())


def test_average_refuses(folder, capsys):
    arch, *common = REV
    cycle = (arch, *common, "--encoder-sharing", "cycle")
    wide = (arch, *common, "--encoder-ffn-embed-dim", "48")
    save(build(*cycle, "--share-all-embeddings"), folder / "cycle.pt", cycle)
    save(build(*wide, "--share-all-embeddings"), folder / "wide.pt", wide)
    first, out = folder / "checkpoint1.pt", folder / "out.pt"
    inputs = ("average", "--inputs")
    assert "encoder.layers is shared as 0 1 1 0 in" in fails(
        capsys, *inputs, first, folder / "cycle.pt", "--output", out
    )
    assert "differ in" in fails(capsys, *inputs, first, folder / "wide.pt", "--output", out)
    assert "is a folder: say which" in fails(capsys, *inputs, folder, "--output", out)
    assert "found only 4 such" in fails(capsys, *inputs, folder, "--output", out, "--num-epoch-checkpoints", "5")
    assert "0 must be at least 1" in fails(capsys, *inputs, folder, "--output", out, "--num-epoch-checkpoints", "0")
    assert "to be one folder" in fails(capsys, *inputs, first, "--output", out, "--num-epoch-checkpoints", "1")
    assert "exists: remove it or add --force" in fails(capsys, *inputs, first, "--output", first)
    assert "there is no folder" in fails(capsys, *inputs, first, "--output", folder / "no" / "out.pt")
    assert "no file" in fails(capsys, *inputs, folder / "missing.pt", "--output", out)
    assert not out.exists()


def write_model(path, **tensors) -> str:
    """Write a checkpoint of these tensors; its name is kept where fairseq keeps the state of a run."""
    model = {name: torch.as_tensor(value) for name, value in tensors.items()}
    torch.save({"model": model, "extra_state": {"from": path.name}}, path)
    return str(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_average_is_right_to_the_last_bit(tmp_path, dtype):
    """Numbers of which a sum in fp32 loses the small ones; the reference is exact."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(7, 500, generator=generator, dtype=torch.float64) * 10.0 ** torch.arange(-3, 4)[:, None]
    values = values.to(dtype)
    paths = [write_model(tmp_path / f"{number}.pt", w=row) for number, row in enumerate(values)]
    assert main(["average", "--inputs", *paths, "--output", str(tmp_path / "out.pt")]) == 0
    average = torch.load(tmp_path / "out.pt", weights_only=True)["model"]["w"]
    expected = [float(sum(map(Fraction, column), Fraction(0)) / 7) for column in values.double().T.tolist()]
    assert torch.equal(average, torch.tensor(expected, dtype=torch.float64).float())
    if dtype == torch.float32:  # which fairseq's script would miss
        assert not torch.equal(values.sum(0).div(7), average)


def test_average_of_whole_numbers(tmp_path):
    """They stay whole and of their kind, as in fairseq's script."""
    counts = [
        (torch.tensor([5, -3], dtype=kind), torch.tensor([8, -4], dtype=kind)) for kind in (torch.int64, torch.int8)
    ]
    first = write_model(tmp_path / "a.pt", n=counts[0][0], small=counts[1][0])
    second = write_model(tmp_path / "b.pt", n=counts[0][1], small=counts[1][1])
    assert main(["average", "--inputs", first, second, "--output", str(tmp_path / "out.pt")]) == 0
    model = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    assert model["n"].tolist() == model["small"].tolist() == [6, -4]
    assert (model["n"].dtype, model["small"].dtype) == (torch.int64, torch.int8)


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        (["--num-epoch-checkpoints", "2"], (11, 10)),
        (["--num-epoch-checkpoints", "2", "--checkpoint-upper-bound", "10"], (10, 9)),
        (["--num-update-checkpoints", "3"], (1100, 1000, 900)),
        (["--num-update-checkpoints", "1", "--checkpoint-upper-bound", "1099"], (1000,)),
    ],
)
def test_average_counts_as_fairseqs_script(tmp_path, flags, numbers):
    """Numbers are compared as numbers; other files of the folder do not count; the newest one lends its other state."""
    for number in (9, 10, 11):
        write_model(tmp_path / f"checkpoint{number}.pt", w=[float(number)])
        write_model(tmp_path / f"checkpoint_2_{number * 100}.pt", w=[number * 100.0])
    for name in ("checkpoint_last.pt", "checkpoint_best.pt", "checkpoint12.pt.tmp", "checkpoint.best_loss_3.100.pt"):
        write_model(tmp_path / name, w=[1e9])
    assert main(["average", "--inputs", str(tmp_path), "--output", str(tmp_path / "out.pt"), *flags]) == 0
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    assert state["model"]["w"].tolist() == [sum(numbers) / len(numbers)]
    newest = f"checkpoint_2_{numbers[0]}.pt" if numbers[0] > 100 else f"checkpoint{numbers[0]}.pt"
    assert state["extra_state"] == {"from": newest}


@EVERY_FAMILY
def test_average_of_every_family(name, tmp_path, capsys):
    """Each tensor once, equal to the mean; a model of that family loads it; another sharing is refused."""
    family, data = FAMILIES[name], make_data(tmp_path / "data", sentences=8)[name]
    trainers = [build_trainer(configure(family, data, tmp_path, *family.sets(2)), seed) for seed in (1, 2)]
    states = [trainer.get_model().state_dict() for trainer in trainers]
    paths = [write_model(tmp_path / f"{number}.pt", **state) for number, state in enumerate(states)]
    assert main(["average", "--inputs", *paths, "--output", str(tmp_path / "out.pt")]) == 0
    average = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    for key, tensor in states[0].items():
        if tensor.is_floating_point() and not key.endswith("_float_tensor"):
            assert torch.equal(average[key], ((tensor.double() + states[1][key].double()) / 2).float()), key
    unique = sum(parameter.numel() for parameter in trainers[0].model.parameters())
    floats = [tensor for tensor in average.values() if tensor.is_floating_point() and tensor.numel() > 1]
    assert sum({tensor.data_ptr(): tensor.numel() for tensor in floats}.values()) == unique
    trainers[1].get_model().load_state_dict(average)

    capsys.readouterr()
    other = build_trainer(configure(family, data, tmp_path, *family.sets(3))).get_model()
    odd = write_model(tmp_path / "odd.pt", **other.state_dict())
    sentence = fails(capsys, "average", "--inputs", paths[0], odd, "--output", tmp_path / "no.pt")
    mine, theirs = (
        model.get_submodule(next(iter(family.stacks.values()))).sharing for model in (trainers[0].model, other)
    )
    assert f"is shared as {mine} in" in sentence and f"and shared as {theirs} in" in sentence
    assert not (tmp_path / "no.pt").exists()


# --- the command itself ---


def test_every_command_has_help_with_an_example(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        shown = capsys.readouterr().out
        assert caught.value.code == 0 and "Example" in shown, command


def test_long_work_shows_a_bar_on_a_terminal_and_few_lines_elsewhere(capsys, monkeypatch):
    assert list(progress(range(1000), "working")) == list(range(1000))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10 and lines[-1] == "working: 1000 of 1000"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(progress(range(3), "working")) == [0, 1, 2]
    assert "working:   0%" in capsys.readouterr().err


def test_unknown_flags_are_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["average", "--inputs", "a", "--output", "b", "--foo"])
    assert caught.value.code == 2 and "unrecognized arguments: --foo" in capsys.readouterr().err
