"""The recipes at full size: their smoke runs, the models of their rows, what they refuse, and how they download."""

import argparse
import gzip
import hashlib
import http.server
import importlib.util
import lzma
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest
import sentencepiece
import torch
from commands import command_lines, environment
from conftest import REPOSITORY, read_corpus
from conftest import run as run_command
from fairseq.data import Dictionary
from fairseq.data.data_utils import load_indexed_dataset

from fairseq_sharing.tools.model import read_architecture

EXAMPLES = REPOSITORY / "examples"
WMT = EXAMPLES / "translation" / "wmt.sh"
LIBRISPEECH = EXAMPLES / "speech_to_text" / "librispeech.sh"
WIKITEXT = EXAMPLES / "language_modeling" / "wikitext103.sh"
ALBERT = EXAMPLES / "masked_lm" / "albert.sh"


def load(script: Path):
    """Import the Python program beside a recipe."""
    spec = importlib.util.spec_from_file_location(script.stem, script.with_suffix(".py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module  # dataclasses ask for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def archives():
    load(WMT)  # which finds it
    return sys.modules["archives"]


def call(script: Path, *options: str, cwd=None, **changes: str) -> subprocess.CompletedProcess:
    return subprocess.run([script, *options], env=environment(**changes), capture_output=True, text=True, cwd=cwd)


# --- smoke runs


def smoke(script: Path, work: Path, data_steps: list[str], more_steps: list[str], stop=False, **changes: str) -> str:
    """Run every step, after a call that cannot download and, if asked for, one that is stopped while it trains.

    Stopping is done by what the recipes have in common, so that one of them shows it for all.

    Returns:
        Standard output of the call that ends.
    """
    values, ready, nowhere = {"WORK": work.name, **changes}, 0, work.as_uri() + "/nowhere"
    if "download" in data_steps:
        failed = call(script, "--smoke", cwd=work.parent, **values, MIRROR=nowhere)
        assert failed.returncode == 2 and f"error: cannot download {nowhere}/" in failed.stderr
        ready = data_steps.index("download")
    if stop:
        values["WORK"] = str(work)  # which shows what belongs to it among all processes
        stop_training(script, work, values)
        ready = len(data_steps)
    done = call(script, "--smoke", cwd=work.parent, **values)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.findall(r"^== (\S+)$", done.stdout, re.MULTILINE) == [*data_steps, *more_steps]
    assert done.stdout.count("already done") == ready
    again = call(script, "--smoke", cwd=work.parent, **values)
    assert again.returncode == 0 and again.stdout.count("already done") == len(data_steps) + len(more_steps)
    assert again.stdout.rpartition("== ")[2] == done.stdout.rpartition("== ")[2]
    return done.stdout


def stop_training(script: Path, work: Path, values: dict[str, str]) -> None:
    """Stop a smoke run while it trains, and ask for what its settings refuse."""
    with subprocess.Popen(
        [script, "--smoke"], env=environment(**values, UPDATES="1000000"), stdout=subprocess.PIPE, text=True
    ) as stopped:
        deadline = time.monotonic() + 600
        while not any("begin training epoch 1" in log.read_text("utf-8") for log in work.glob("*/train.log")):
            assert stopped.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        stopped.send_signal(signal.SIGTERM)
        assert stopped.wait() == 143
    (settings,) = {path.parent for path in work.glob("*/train.log")}
    assert not (settings / "train.done").exists()
    assert not any(os.fsencode(work) in line for line in command_lines())
    refused = call(script, "--smoke", **values)
    assert refused.returncode == 2 and re.search(
        r"was made with UPDATES=1000000, and now UPDATES=\d+ is asked for", refused.stderr
    )
    text = (settings / "settings.txt").read_text("utf-8")
    updates = re.search(r"now UPDATES=(\d+)", refused.stderr)[1]
    (settings / "settings.txt").write_text(text.replace("UPDATES=1000000", f"UPDATES={updates}"), "utf-8")


TRANSLATION = (
    ["imitate", "download", "text", "vocabulary", "binarise"],
    ["train", "average", "decode-wmt14", "score-wmt14"],
)


def test_wmt_smoke_runs_every_step_once(tmp_path):
    printed = smoke(WMT, tmp_path / "wmt", *TRANSLATION)
    # The one training command took Admin's profile, 2 + 3 residual sublayers for each of 4 layers, and kept it.
    run = tmp_path / "wmt" / "en-de-cycle_rev-4-seed1"
    profiles = re.findall(
        r"(\w+): residual scalings measured on the first batch: (.*)", (run / "train.log").read_text()
    )
    assert {stack: len(numbers.split()) for stack, numbers in profiles} == {"encoder": 8, "decoder": 12}
    averaged = torch.load(run / "checkpoints" / "averaged.pt", weights_only=True)["model"]
    assert averaged["encoder.layers.3.final_layer_norm.residual_scale"] > 1
    # What is scored is what was in the archive, in its order.
    sources = read_corpus("test", "en")[10:20]
    assert (tmp_path / "wmt" / "en-de" / "text" / "wmt14.en").read_text("utf-8").splitlines() == sources
    assert len((run / "wmt14.de").read_text("utf-8").splitlines()) == 10
    assert re.search(r"wmt14  BLEU\|nrefs:1\|case:mixed\|.*\|tok:13a\|.* = \d", printed)


def test_wmt_high_resource_smoke_reads_shard_after_shard(tmp_path):
    smoke(WMT, tmp_path / "wmt", *TRANSLATION, SHARDS="3")
    data, run = (tmp_path / "wmt" / f"en-de-synthetic{name}" for name in ("", "-cycle_rev-4-seed1"))
    kept = re.findall(r"^(train1?): (\d+) of 180 pairs", (data / "binarise.log").read_text("utf-8"), re.MULTILINE)
    log = (run / "train.log").read_text("utf-8")
    shards = re.findall(r"bin/(\d) (train1?) en-de (\d+) examples", log)
    assert [shard[:2] for shard in shards] == [(str(shard), part) for shard in range(3) for part, _ in kept]
    assert [(part, str(sum(int(n) for _, other, n in shards if other == part))) for part, _ in kept] == kept
    assert log.count("begin training epoch") == 3


def test_librispeech_smoke_runs_every_step_once(tmp_path):
    printed = smoke(
        LIBRISPEECH,
        tmp_path / "speech",
        ["imitate", "download", "unpack", "manifests", "prepare"],
        ["train", "average", "decode-test-clean"],
    )
    assert re.search(r"parameters  [\d,]+\ntest-clean  WER \d+\.\d\d\n$", printed)
    data = tmp_path / "speech" / "data"
    texts = {
        part: [line.split("\t")[3] for line in (data / "features" / f"{part}.tsv").read_text("utf-8").splitlines()[1:]]
        for part in ("train", "dev-clean", "dev-other", "test-clean")
    }
    assert {part: len(lines) for part, lines in texts.items()} == {
        **{"train": 20, "dev-clean": 2, "dev-other": 2, "test-clean": 2}
    }
    rows = (LIBRISPEECH.parent / "data" / "valid.tsv").read_text("utf-8").splitlines()[1:]
    for turn, part in enumerate(("dev-clean", "dev-other")):  # which were in capitals in the archives
        assert texts[part] == [row.split("\t")[1].lower() for row in rows[turn::2]]
    config = (data / "features" / "config.yaml").read_text("utf-8")
    assert "utterance_cmvn" in config and "freq_mask_N: 2" in config and "time_mask_N: 2" in config
    averaged = torch.load(
        tmp_path / "speech" / "sequence-4-4-seed1" / "checkpoints" / "averaged.pt", weights_only=True
    )["model"]
    assert sum(".final_layer_norm.weight" in name for name in averaged) == 2 + 2


def test_wikitext_smoke_runs_every_step_once(tmp_path):
    printed = smoke(
        WIKITEXT,
        tmp_path / "wikitext",
        ["imitate", "download", "text", "binarise"],
        ["train", "evaluate-valid", "evaluate-test"],
        stop=True,
    )
    assert re.search(
        r"parameters  [\d,]+\nvalid       perplexity \d+\.\d\d\ntest        perplexity \d+\.\d\d\n$", printed
    )
    with lzma.open(WIKITEXT.parent / "data" / "test.txt.xz", "rt", encoding="utf-8") as file:
        words = file.read().split()[:1000]
    data = tmp_path / "wikitext" / "data"
    assert (data / "text" / "wiki.test.tokens").read_text("utf-8").split() == words
    log = (tmp_path / "wikitext" / "sequence-4-seed1" / "evaluate-test.log").read_text("utf-8")
    assert f"Evaluated {len(words) + 50:,} tokens" in log  # and the ends of 50 lines


def test_albert_smoke_runs_every_step_once(tmp_path):
    data_steps, tune = ["imitate", "vocabulary", "text", "mrpc"], "tune-mrpc-pretrained-1e-3-seed1"
    printed = smoke(ALBERT, tmp_path / "albert", data_steps, ["train", tune])
    assert re.search(
        r"head for masked language modelling: [\d,]+\n"
        r"rate +acc_and_f1 on dev +by seed\n[- ]+\n1e-3 +([\d.]+) +\1\n$",
        printed,
    )
    folder = tmp_path / "albert" / "base-all-E16-seed1"
    assert "base-all-E16-seed1/checkpoints/checkpoint_last.pt (epoch" in (folder / "mrpc" / f"{tune}.log").read_text()
    pretrained, tuned = (
        torch.load(path / "checkpoint_last.pt", weights_only=True)["model"]
        for path in (folder / "checkpoints", folder / "mrpc" / tune)
    )
    assert {name for name in tuned if "classification_heads" not in name} == set(pretrained)


# --- rows


def commands_of(script: Path, folder: Path, **changes: str) -> list[list[str]]:
    """Return what the recipe would do; it does nothing."""
    printed = call(script, "--dry-run", cwd=folder, WORK=str(folder / "work"), **changes)
    assert printed.returncode == 0, printed.stderr
    assert list(folder.iterdir()) == []
    return [shlex.split(line) for line in printed.stdout.splitlines() if line.startswith("python")]


def training_of(commands: list[list[str]]) -> tuple[str, list[str]]:
    """Return architecture and flags of the one training command, without those that name folders."""
    (train,) = [command for command in commands if "fairseq_cli.train" in command]
    flags = train[4:]
    values = {name: flags[flags.index(name) + 1] for name in ("--arch", "--user-dir", "--task", "--save-dir")}
    for name, value in values.items():
        flags.remove(name)
        flags.remove(value)
    return values["--arch"], flags


def value_of(flags: list[str], *names: str) -> list[str]:
    return [flags[flags.index(name) + 1] for name in names]


# An encoder layer of width d and FFN f: four projections with biases, two matrices with biases, two LayerNorms.
# A decoder layer has four more projections and one more LayerNorm.
def count_layers(d: int, f: int, encoder_sets: int, decoder_sets: int) -> int:
    attention, ffn, norm = 4 * (d * d + d), 2 * d * f + d + f, 2 * d
    return encoder_sets * (attention + ffn + 2 * norm) + decoder_sets * (2 * attention + ffn + 3 * norm)


@pytest.mark.parametrize(
    "system, layers, width, ffn, sets",
    [
        ("vanilla", None, 512, 2048, 6),
        ("admin", None, 512, 2048, 6),
        ("vanilla_big", None, 1024, 4096, 6),
        ("universal", None, 1024, 4096, 1),
        ("sequence", None, 512, 2048, 6),
        ("cycle", "18", 512, 2048, 6),
        ("cycle_rev", "18", 512, 2048, 6),
    ],
)
def test_wmt_rows_are_the_published_models(tmp_path, system, layers, width, ffn, sets):
    commands = commands_of(WMT, tmp_path, SYSTEM=system, **({"N": layers} if layers else {}))
    arch, flags = training_of(commands)  # one, whatever needs a profile
    assert value_of(flags, "--max-tokens", "--update-freq", "--distributed-world-size") == ["3584", "32", "4"]
    depth = int(layers or (12 if system == "sequence" else 6))
    model = read_architecture(arch, [flag for flag in flags if flag not in ("-s", "-t", "en", "de")]).model
    assert len(model.encoder.layers) == len(model.decoder.layers) == depth
    scalings = 5 * depth * width if system in ("admin", "sequence", "cycle", "cycle_rev") else 0
    expected = 32768 * width + count_layers(width, ffn, sets, sets) + scalings
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    penalties = {
        command[command.index("--gen-subset") + 1]: command[command.index("--lenpen") + 1]
        for command in commands
        if "--lenpen" in command
    }
    assert penalties == {"test": "1.0", **{f"test{i}": "0.6" if i == 4 else "1.0" for i in range(1, 7)}}


def test_wmt_high_resource_is_read_from_shards(tmp_path):
    changes = {"GENUINE": "mine more", "SYNTHETIC": "back-translated"}
    commands = commands_of(WMT, tmp_path, **changes)
    (text,), (binarise,) = ([command for command in commands if command[2] == step] for step in ("text", "binarise"))
    assert text[text.index("--further") + 1 :][:3] == ["mine", "more", "--sacrebleu"]
    assert value_of(binarise, "--synthetic", "--shards") == ["back-translated", "64"]
    (train,) = [command for command in commands if "fairseq_cli.train" in command]
    assert train[3].split(":") == [f"{binarise[-1]}/{shard}" for shard in range(64)]
    assert value_of(train, "--arch", "--encoder-layers", "--encoder-unique-layers", "--upsample-primary") == [
        *("transformer_shared_cycle_rev_wmt_en_de", "12", "6", "6")
    ]
    plain = commands_of(WMT, tmp_path)
    assert not any("--upsample-primary" in command or "--synthetic" in command for command in plain)


@pytest.mark.parametrize(
    "system, width, layers, sets",
    [
        ("vanilla", 512, (6, 6), (6, 6)),
        ("universal", 1088, (6, 6), (1, 1)),
        ("sequence", 512, (16, 8), (8, 4)),
        ("cycle", 512, (16, 8), (8, 4)),
        ("cycle_rev", 512, (16, 8), (8, 4)),
    ],
)
def test_librispeech_rows_are_the_published_models(tmp_path, system, width, layers, sets):
    commands = commands_of(LIBRISPEECH, tmp_path, SYSTEM=system)
    arch, flags = training_of(commands)
    frames, batches, gpus = map(int, value_of(flags, "--max-tokens", "--update-freq", "--distributed-world-size"))
    assert frames * batches * gpus == 8 * 40000
    assert value_of(flags, "--train-subset", "--valid-subset") == ["train", "dev-clean,dev-other"]
    model = read_architecture(arch, flags, vocab_size=10000).model
    assert (len(model.encoder.transformer_layers), len(model.decoder.layers)) == layers
    assert model.encoder.layer_norm is not None and model.decoder.layer_norm is not None  # Pre-LN
    assert model.encoder.transformer_layers[0].dropout_module.p == 0.15
    subsampler = (80 * 1024 * 5 + 1024) + (512 * 2 * width * 5 + 2 * width)  # convolutions, each behind a GLU
    expected = 10000 * width + subsampler + count_layers(width, 4 * width, *sets) + 2 * 2 * width
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    assert abs(expected / 50_190_336 - 1) < 0.05
    decoded = [value_of(command, "--gen-subset", "--beam") for command in commands if "--gen-subset" in command]
    assert decoded == [[name, "5"] for name in ("dev-clean", "dev-other", "test-clean", "test-other")]


@pytest.mark.parametrize(
    "system, width, layers, sets",
    [
        ("vanilla", 1024, 6, 6),
        ("universal", 1808, 6, 1),
        ("sequence", 1024, 12, 6),
        ("cycle", 1024, 12, 6),
        ("cycle_rev", 1024, 12, 6),
    ],
)
def test_wikitext_rows_are_the_published_models(tmp_path, system, width, layers, sets):
    commands = commands_of(WIKITEXT, tmp_path, SYSTEM=system)
    arch, flags = training_of(commands)
    assert value_of(flags, "--tokens-per-sample", "--max-tokens", "--update-freq") == ["3072", "3072", "3"]
    assert value_of(flags, "--max-update", "--lr-period-updates", "--clip-norm") == ["50000", "34000", "0.1"]
    model = read_architecture(arch, flags, vocab_size=267744).model
    assert len(model.decoder.layers) == layers and model.decoder.layers[0].normalize_before
    # Words of three bands, of width d, d / 4 and d / 16, with a projection each, and two rows that stand for bands.
    bands = sum(words * (width // factor) for words, factor in ((20000, 1), (40000, 4), (207744, 16)))
    projections = sum(width * (width // factor) for factor in (1, 4, 16)) + 2 * width
    expected = bands + projections + count_layers(width, 4 * width, sets, 0)  # its layers are those of an encoder
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    assert round(expected / 10**6) == 121
    evaluated = [
        value_of(command, "--gen-subset", "--context-window") for command in commands if "--gen-subset" in command
    ]
    assert evaluated == [["valid", "2560"], ["test", "2560"]]


# Shared, E, and how many attention and FFN sublayers of the twelve are stored, each with its LayerNorm.
@pytest.mark.parametrize("embed", [128, 768])
@pytest.mark.parametrize(
    "shared, attentions, ffns", [("all", 1, 1), ("attention", 1, 12), ("ffn", 12, 1), ("none", 12, 12)]
)
def test_albert_rows_are_the_published_models(tmp_path, shared, embed, attentions, ffns):
    values = {"TEXT": "text", "GLUE_DIR": "glue", "TASK": "cola", "OPTIMIZER": "lamb"}
    commands = commands_of(ALBERT, tmp_path, SHARED=shared, E=str(embed), **values)
    pretrain, *tune = [command for command in commands if "fairseq_cli.train" in command]
    arch, flags = training_of([pretrain])
    assert value_of(flags, "--lr", "--warmup-updates", "--max-update", "--tokens-per-sample") == [
        *("0.00176", "3125", "125000", "512")
    ]
    blocks, batches, gpus = map(int, value_of(flags, "--max-sentences", "--update-freq", "--distributed-world-size"))
    assert blocks * batches * gpus == 4096 and "--fp16-no-flatten-grads" in flags
    model = read_architecture(arch, flags, vocab_size=30000).model
    width, positions = 768, 512 + 2
    attention, ffn = 4 * (width**2 + width) + 2 * width, 8 * width**2 + 5 * width + 2 * width
    below = 30000 * embed + positions * embed + 2 * embed + (embed * width + width if embed != width else 0)
    head = width * embed + embed + 2 * embed + 30000
    expected = below + attentions * attention + ffns * ffn + head
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    assert [value_of(command, "--lr", "--seed") for command in tune] == [
        *([rate, "1"] for rate in ("1e-5", "2e-5", "3e-5", "5e-5")),
        *(["BEST", seed] for seed in "23"),
    ]
    for command in tune:  # CoLA's, by the authors
        assert value_of(command, "--max-update", "--warmup-updates", "--max-sentences", "--arch") == [
            *("5336", "320", "16", arch)
        ]
        assert value_of(command, "--best-checkpoint-metric") == ["mcc"] and "--report-mcc" in command
        assert [flag for flag in command if flag in ("--sharing-parts", "--encoder-sharing")] == [
            flag for flag in flags if flag in ("--sharing-parts", "--encoder-sharing")
        ]


# --- what they refuse


@pytest.mark.parametrize(
    "script, changes, sentence",
    [
        (WMT, {"SYSTEM": "cycle_ref"}, "SYSTEM=cycle_ref is none of vanilla, admin"),
        (
            WMT,
            {"SYSTEM": "vanilla", "RESIDUAL": "admin"},
            "SYSTEM=vanilla has no scaled residual connections (RESIDUAL=admin)",
        ),
        (WMT, {"PAIR": "de-fr"}, "PAIR=de-fr is none of en-de, de-en, en-fr, fr-en"),
        (WMT, {"SYSTEM": "cycle", "RESIDUAL": "admim"}, "RESIDUAL=admim is none of none, admin, admin-static"),
        (WMT, {"N": "5"}, "M=6 must be between 1 and N=5"),
        (WMT, {"N": "twelve"}, "N=twelve must be a whole number"),
        (WMT, {"GPUS": "3"}, "BATCHES=128 must be a multiple of GPUS=3"),
        (WMT, {"GPUS": "0", "DISK": "1000000"}, "needs about 1000000 GB, and"),
        (WMT, {"GPUS": "0", "PATH": "{stubs}:/usr/bin:/bin"}, "has no fairseq: activate the environment first"),
        (WMT, {"SYNTHETIC": "no", "GPUS": "0"}, "SYNTHETIC: there is none of no.en, no.en.gz, no.en.xz"),
        (WMT, {"SHARDS": "0"}, "SHARDS=0 must be at least 1"),
        (WMT, {"SYNTHETIC": "no", "UPSAMPLE": "1.5"}, "UPSAMPLE=1.5 must be a whole number"),
        (LIBRISPEECH, {"SYSTEM": "admin"}, "SYSTEM=admin is none of vanilla, universal, sequence"),
        (LIBRISPEECH, {"DECODER_UNIQUE": "9"}, "DECODER_UNIQUE=9 must be between 1 and DECODER_LAYERS=8"),
        (LIBRISPEECH, {"GPUS": "3"}, "BATCHES=8 must be a multiple of GPUS=3"),
        (LIBRISPEECH, {"WIDTH": "5e2"}, "WIDTH=5e2 must be a whole number"),
        (LIBRISPEECH, {"GPUS": "0", "DISK": "1000000"}, "needs about 1000000 GB, and"),
        (LIBRISPEECH, {"GPUS": "0", "PATH": "{stubs}:/usr/bin:/bin"}, "has no fairseq: activate the environment first"),
        (WIKITEXT, {"SYSTEM": "deep"}, "SYSTEM=deep is none of vanilla, universal, sequence"),
        (WIKITEXT, {"N": "5"}, "M=6 must be between 1 and N=5"),
        (WIKITEXT, {"UPDATES": "100"}, "UPDATES=100 must be more than WARMUP=16000"),
        (WIKITEXT, {"WINDOW": "4000"}, "WINDOW=4000 must be less than CONTEXT=3072"),
        (WIKITEXT, {"GPUS": "0", "DISK": "1000000"}, "needs about 1000000 GB, and"),
        (ALBERT, {"SIZE": "small"}, "SIZE=small is none of base, large"),
        (ALBERT, {"SHARED": "norm"}, "SHARED=norm is none of all, attention, ffn, none"),
        (ALBERT, {"TASK": "stsb"}, "TASK=stsb is none of cola, sst2"),
        (ALBERT, {"OPTIMIZER": "nag"}, "OPTIMIZER=nag is neither lamb nor adam"),
        (ALBERT, {"OPTIMIZER": "lamb"}, "OPTIMIZER=lamb needs apex"),
        (ALBERT, {"UPDATES": "100"}, "UPDATES=100 must be more than WARMUP=3125"),
        (ALBERT, {"HELD_OUT": "1"}, "HELD_OUT=1 must be at least 2"),
        (ALBERT, {"GPUS": "3"}, "BATCHES=128 must be a multiple of GPUS=3"),
        (ALBERT, {"GPUS": "0"}, "TEXT= must name files or folders of plain text"),
        (ALBERT, {"GPUS": "0", "TEXT": "."}, "GLUE_DIR= must name the folder of GLUE's folders"),
        (ALBERT, {"GPUS": "0", "TEXT": ". nowhere", "TASK": ""}, "there is no nowhere"),
        (ALBERT, {"GPUS": "0", "TEXT": ".", "TASK": "", "DISK": "1000000"}, "needs about 1000000 GB, and"),
    ],
)
def test_refuses_with_one_sentence(tmp_path, script, changes, sentence):
    (tmp_path / "stubs").mkdir()
    (tmp_path / "stubs" / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "stubs" / "python").chmod(0o755)
    changes = {name: value.format(stubs=tmp_path / "stubs") for name, value in changes.items()}
    refused = call(script, **{"WORK": str(tmp_path / "work"), "DISK": "0", **changes})
    assert refused.returncode == 2 and sentence in refused.stderr and refused.stderr.count("\n") == 1
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("script", [WMT, LIBRISPEECH, WIKITEXT, ALBERT], ids=lambda script: script.stem)
def test_options(tmp_path, script):
    refused = call(script, "--smok")
    assert refused.returncode == 2 and refused.stderr.endswith(
        "--smok is not one of --dry-run --smoke --help: all else is set by variables\n"
    )
    shown = call(script, "--help").stdout
    assert shown.startswith("The published ") and "--dry-run" in shown and "set -" not in shown
    printed = call(script, "--dry-run", "--smoke", cwd=tmp_path)
    assert printed.returncode == 0 and "== imitate" in printed.stdout and list(tmp_path.iterdir()) == []


# --- download


class Server(http.server.ThreadingHTTPServer):
    """Serves bytes, as well as it is told to."""

    def __init__(self, content: bytes):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.most, self.ranges, self.asked = content, None, True, []
        self.url = f"http://127.0.0.1:{self.server_port}/corpus.tgz"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, asked = self.server, self.headers.get("Range")
        server.asked.append(asked)
        start = int(asked[len("bytes=") : -1]) if asked and server.ranges else 0
        if start >= len(server.content):
            self.send_error(416)
            return
        body = server.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.most])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server(bytes(range(256)) * 8000) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_download_goes_on_where_it_was_cut_off(archives, server, tmp_path):
    path = tmp_path / "corpus.tgz"
    checksum = f"sha256:{hashlib.sha256(server.content).hexdigest()}"
    server.most = 1_500_000
    with pytest.raises(ValueError, match=r"was cut off after 1,500,000 of 2,048,000 bytes: the same command goes on"):
        archives.fetch(server.url, path, checksum)
    assert not path.exists()
    server.most = None
    archives.fetch(server.url, path, checksum)
    assert path.read_bytes() == server.content and server.asked == [None, "bytes=1500000-"]

    path.rename(tmp_path / "corpus.tgz.partial")  # killed between the last byte and the name
    archives.fetch(server.url, path, checksum)
    assert path.read_bytes() == server.content
    path.unlink()
    (tmp_path / "corpus.tgz.partial").write_bytes(server.content[:10])
    server.ranges = False  # a server that starts from the first byte whatever it is asked for
    archives.fetch(server.url, path, checksum)
    assert path.read_bytes() == server.content


def test_download_refuses_what_is_not_the_file(archives, server, tmp_path, monkeypatch):
    path = tmp_path / "corpus.tgz"
    checksum = f"md5:{hashlib.md5(server.content).hexdigest()}"
    right, server.content = server.content, server.content[:-1] + b"x"
    with pytest.raises(ValueError, match=rf"is not what it was: .* and {checksum} is expected; it is deleted here"):
        archives.fetch(server.url, path, checksum)
    assert list(tmp_path.iterdir()) == []
    server.content = right
    with monkeypatch.context() as patch:
        patch.setattr(archives.shutil, "disk_usage", lambda _: argparse.Namespace(free=1_000_000))
        with pytest.raises(ValueError, match=r"has 0.00 GB to come, and .* has 0.00 GB free"):
            archives.fetch(server.url, path, checksum)
    archives.fetch(server.url, path, checksum)
    assert path.read_bytes() == right
    with pytest.raises(ValueError, match="cannot download http://127.0.0.1:1/x .*refused"):
        archives.fetch("http://127.0.0.1:1/x", tmp_path / "x", None)
    with pytest.raises(ValueError, match="cannot download file:///nowhere/x .*No such file"):
        archives.fetch("file:///nowhere/x", tmp_path / "x", None)


def test_wmt_text_of_french_with_a_kept_checksum(tmp_path, monkeypatch, capsys):
    """WMT14's archives: five of them, one with compressed texts; for two of them no checksum is known."""
    wmt = load(WMT)
    data, archives, mirror = tmp_path / "data", tmp_path / "archives", tmp_path / "mirror"
    data.mkdir()
    lines = [f"line {number}" for number in range(10)]
    lines[1], lines[3], lines[9] = (
        "",
        "a\u2028b\x85 c",
        "last",
    )  # an empty side; characters that some readers end lines at
    for language in ("en", "fr"):
        for part in ("train", "test"):
            with lzma.open(data / f"{part}.{language}.xz", "wt", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
    common = ["--pair", "en-fr", "--test-sets", "wmt14/full"]
    assert (
        wmt.main(["imitate", *common, "--data", str(data), "--out", str(mirror), "--pairs", "2", "--test-pairs", "4"])
        == 0
    )
    download = ["download", *common, "--out", str(archives), "--mirror", mirror.as_uri()]
    assert wmt.main(download) == 2
    assert "training-parallel-europarl-v7.tgz is not what it was" in capsys.readouterr().err
    sums = mirror / "SHA256SUMS"
    known = [line for line in sums.read_text().splitlines() if "giga-fren" not in line]
    sums.write_text("".join(f"{line}\n" for line in known))
    assert wmt.main([*download, "--checksums", str(sums)]) == 0
    assert "training-giga-fren.tar: 10,240 bytes, checksum kept" in capsys.readouterr().out
    text = ["text", *common, "--archives", str(archives), "--sacrebleu", str(tmp_path / "sacrebleu"), "--out"]
    assert wmt.main([*text, str(tmp_path / "text")]) == 0
    assert (tmp_path / "text" / "train.fr").read_text("utf-8").split("\n") == [
        *("line 0", "line 2", "a b c", *(f"line {number}" for number in range(4, 9)), "last", "")
    ]
    assert len((tmp_path / "text" / "wmt14.fr").read_text("utf-8").splitlines()) == 4

    # The kept checksum holds from then on: for a file that changed here, and for one that changed there.
    giga = archives / "training-giga-fren.tar"
    giga.write_bytes(giga.read_bytes() + b"x")
    assert wmt.main([*text, str(tmp_path / "text2")]) == 2
    assert f"{giga} has the checksum sha256:" in capsys.readouterr().err and not (tmp_path / "text2").exists()
    giga.unlink()
    there = mirror / "wmt10" / "training-giga-fren.tar"
    whole = there.read_bytes()
    there.write_bytes(whole + b"x")
    assert wmt.main([*download, "--checksums", str(sums)]) == 2
    assert "is not what it was" in capsys.readouterr().err
    there.write_bytes(whole)
    assert wmt.main([*download, "--checksums", str(sums)]) == 0


def test_wmt_texts_of_different_lengths_are_refused(tmp_path):
    wmt = load(WMT)
    name = "commoncrawl.de-en.{}"
    archive = wmt.write_archive(
        tmp_path, "https://x/a.tgz", {name.format("en"): ["one", "two"], name.format("de"): ["eins"]}
    )
    names = [name.format(language) for language in ("en", "de")]
    pairs = wmt.read_pairs([wmt.read_member(archive, each) for each in names], names)
    assert next(pairs) == ["one", "eins"]
    with pytest.raises(ValueError, match=f"{names[0]} and {names[1]} differ in length, from line 2 on"):
        next(pairs)
    archive.write_bytes(archive.read_bytes()[:60])
    with pytest.raises(ValueError, match=f"cannot read {names[0]} in "):
        list(wmt.read_member(archive, names[0]))


@pytest.fixture
def wmt_text(tmp_path):
    """Two hundred pairs and a test set, with a vocabulary; the same pairs, compressed, with one that is too unequal."""
    (tmp_path / "text").mkdir()
    for language, suffix, opener in (("en", "gz", gzip.open), ("de", "xz", lzma.open)):
        lines = read_corpus("train", language)[:200]
        (tmp_path / "text" / f"train.{language}").write_text("\n".join(lines) + "\n", "utf-8")
        with opener(tmp_path / f"back.{language}.{suffix}", "wt", encoding="utf-8") as file:
            file.write("\n".join([*lines, "word " * (100 if language == "en" else 1)]) + "\n")
        test = "\n".join(read_corpus("test", language)[:9]) + "\n"
        (tmp_path / "text" / f"wmt13.{language}").write_text(test, "utf-8")
    text, vocabulary = ["--text", str(tmp_path / "text")], str(tmp_path / "vocabulary")
    assert load(WMT).main(["vocabulary", *text, "--size", "400", "--out", vocabulary]) == 0
    return [*text, "--vocabulary", vocabulary, "--test-sets", "wmt13"]


def test_wmt_binarises_as_fairseq_does(tmp_path, wmt_text):
    arguments = [*wmt_text, "--synthetic", str(tmp_path / "back"), "--shards", "2", "--max-ratio", "9"]
    assert load(WMT).main(["binarise", *arguments, "--out", str(tmp_path / "bin")]) == 0
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "vocabulary" / "spm.model"))
    for language in ("en", "de"):
        for part in ("train", "wmt13"):
            lines = (tmp_path / "text" / f"{part}.{language}").read_text("utf-8").splitlines()
            lines = [" ".join(line) + "\n" for line in model.encode(lines, out_type=str)]
            (tmp_path / f"{part}.{language}").write_text("".join(lines[:: 2 if part == "train" else 1]), "utf-8")
    run_command(
        [
            *("fairseq-preprocess", "-s", "en", "-t", "de", "--joined-dictionary", "--destdir", tmp_path / "expected"),
            *("--srcdict", tmp_path / "vocabulary" / "dict.txt", "--trainpref", tmp_path / "train"),
            *("--validpref", tmp_path / "wmt13", "--testpref", tmp_path / "wmt13"),
        ]
    )
    first, second = tmp_path / "bin" / "0", tmp_path / "bin" / "1"
    expected = {path.name: path.read_bytes() for path in (tmp_path / "expected").glob("*.en-de.*")}
    assert len(expected) == 12
    for name, content in expected.items():
        assert (first / name).read_bytes() == content
    for part in ("train.en-de.en.bin", "train.en-de.en.idx", "train.en-de.de.bin", "train.en-de.de.idx"):
        assert (first / part.replace("train", "train1")).read_bytes() == expected[part]  # the unequal pair is left out
    assert {path.name for path in second.iterdir()} == {
        path.name for path in first.iterdir() if path.name.startswith("train")
    }


def test_wmt_binarise_refuses(tmp_path, wmt_text, capsys):
    binarise = ["binarise", *wmt_text, "--out", str(tmp_path / "bin")]
    assert load(WMT).main([*binarise, "--synthetic", str(tmp_path / "front")]) == 2
    assert f"there is none of {tmp_path}/front.en, {tmp_path}/front.en.gz, " in capsys.readouterr().err
    assert load(WMT).main([*binarise, "--shards", "300", "--max-ratio", "9"]) == 2
    assert "200 pairs of " in capsys.readouterr().err
    path = tmp_path / "back.de.xz"
    path.write_bytes(path.read_bytes()[:200])
    assert load(WMT).main([*binarise, "--synthetic", str(tmp_path / "back")]) == 2
    assert f"cannot read {path}: " in capsys.readouterr().err and not (tmp_path / "bin").exists()


def test_wmt_pairs_that_are_left_out():
    fits = load(WMT).fits
    assert fits(4, 6, 250, 1.5) and not fits(4, 7, 250, 1.5)
    assert fits(250, 250, 250, 1.5) and not fits(251, 250, 250, 1.5)
    assert not fits(0, 0, 250, 1.5)


@pytest.mark.parametrize(
    "script, archive, changed",
    [
        (LIBRISPEECH, "test-other.tar.gz", ["unpack", "--sets", "test-other"]),
        (WIKITEXT, "wikitext-103-v1.zip", ["text"]),
    ],
    ids=lambda value: getattr(value, "stem", None),
)
def test_changed_archives_are_refused(tmp_path, capsys, script, archive, changed):
    program, mirror, downloaded = load(script), tmp_path / "mirror", tmp_path / "archives"
    assert program.main(["imitate", "--data", str(script.parent / "data"), "--out", str(mirror)]) == 0
    download = ["download", "--out", str(downloaded), "--mirror", mirror.as_uri()]
    assert program.main(download) == 2  # what is known is the checksum of the real one
    assert "is not what it was" in capsys.readouterr().err
    assert program.main([*download, "--checksums", str(mirror / "SHA256SUMS")]) == 0
    path = downloaded / archive
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"x")
    step = [*changed, "--archives", str(downloaded), "--out", str(tmp_path / "out")]
    assert program.main(step) == 2
    assert f"{path} has the checksum sha256:" in capsys.readouterr().err
    path.write_bytes(whole[: len(whole) // 2])  # as damaged where it came from
    sums = downloaded / "SHA256SUMS"
    kept = hashlib.sha256(whole).hexdigest()
    sums.write_text(sums.read_text().replace(kept, hashlib.sha256(path.read_bytes()).hexdigest()))
    assert program.main(step) == 2
    assert re.search(rf"cannot (unpack|read .* in) {path}: ", capsys.readouterr().err)
    path.unlink()
    assert program.main(step) == 2
    assert f"has no {archive}: download it first" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_librispeech_is_unpacked_set_by_set(tmp_path, capsys):
    program, mirror, out = load(LIBRISPEECH), tmp_path / "mirror", tmp_path / "out"
    program.main(["imitate", "--data", str(LIBRISPEECH.parent / "data"), "--out", str(mirror)])
    sums = ["--checksums", str(mirror / "SHA256SUMS")]
    archives, sets = tmp_path / "archives", ["--sets", "dev-clean", "train-clean-100"]
    assert program.main(["download", *sets, "--mirror", mirror.as_uri(), *sums, "--out", str(archives)]) == 0
    unpack = ["unpack", *sets[:2], "--archives", str(archives), "--out", str(out)]
    assert program.main(unpack) == 0
    unpack[1:3] = sets
    assert program.main(unpack) == 0
    assert capsys.readouterr().out.endswith("dev-clean: 2 clips\ndev-clean: already there\ntrain-clean-100: 7 clips\n")
    assert program.main(["manifests", *sets[:2], "--audio", str(out), "--out", str(tmp_path / "tsv")]) == 2
    assert "--sets dev-clean: none of them is for training" in capsys.readouterr().err
    assert program.main(["manifests", "--audio", str(out), "--out", str(tmp_path / "tsv")]) == 2
    assert f"--audio {out} has no transcripts of train-clean-360: unpack it first" in capsys.readouterr().err
    assert program.main(["manifests", *sets, "--audio", str(out), "--out", str(tmp_path / "tsv")]) == 0
    first = (tmp_path / "tsv" / "train.tsv").read_text("utf-8").splitlines()[1].split("\t")
    assert first == ["train-clean-100/1/1/1-1-0000.flac", "agent logged in", "1"] and (out / first[0]).is_file()


def test_librispeech_keeps_within_its_folder(tmp_path):
    program = load(LIBRISPEECH)
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("LibriSpeech/dev-clean/../../../a.flac"))
    with pytest.raises(ValueError, match="which is outside of LibriSpeech/dev-clean"):
        program.unpack_set(path, "dev-clean", tmp_path / "out")
    with tarfile.open(path, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("LibriSpeech/dev-other/a.flac"))
    with pytest.raises(ValueError, match="has no clips in LibriSpeech/dev-clean"):
        program.unpack_set(path, "dev-clean", tmp_path / "out")


# --- ALBERT's text and tasks


# The first lines of the official files, and what is in the places of the sentences and the class.
GLUE = {
    "sst2": ("sentence\tlabel", ["a", "1"]),
    "mrpc": ("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", ["1", "7", "8", "a", "b"]),
    "qqp": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", ["1", "7", "8", "a", "b", "0"]),
    "qnli": ("index\tquestion\tsentence\tlabel", ["3", "a", "b", "entailment"]),
    "rte": ("index\tsentence1\tsentence2\tlabel", ["3", "a", "b", "not_entailment"]),
    "cola": (None, ["gj04", "0", "*", "a"]),
    "mnli": (
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
        "sentence2_parse\tsentence1\tsentence2\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label",
        [*"12345678", "a", "b", *["entailment"] * 5, "neutral"],
    ),
}


def test_albert_knows_when_its_data_are_others(tmp_path):
    """With a Python that does nothing: another GLUE_DIR is read anew; no model goes on with other pieces."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\ncase $* in *FusedLAMB*) exit 1 ;; esac\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    for name in ("a.txt", "b.txt", "one", "two"):
        (tmp_path / name).touch()
    path = f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"

    def start(**changes: str) -> subprocess.CompletedProcess:
        values = {"TEXT": "a.txt", "GLUE_DIR": "one", "TASK": "mrpc", "GPUS": "0", "DISK": "0", **changes}
        env = environment(**values, PATH=path)
        return subprocess.run([ALBERT], env=env, capture_output=True, text=True, cwd=tmp_path)

    def again(done: subprocess.CompletedProcess) -> bool:
        return "already done" in done.stdout.split("== mrpc\n")[1].split("\n==")[0]

    first = start()
    assert first.returncode == 0, first.stderr
    assert not again(first) and again(start(SHARED="attention"))
    assert not again(start(SHARED="ffn", GLUE_DIR="two")) and again(start(SHARED="none", GLUE_DIR="two"))
    shutil.rmtree(tmp_path / "albert" / "data")
    refused = start(TEXT="b.txt")
    assert refused.returncode == 2 and "was made with TEXT=a.txt, and now TEXT=b.txt is asked for" in refused.stderr


@pytest.mark.parametrize("task", GLUE)
def test_albert_reads_the_layout_of_a_task(tmp_path, task):
    albert = load(ALBERT)
    header, cells = GLUE[task]
    quoted = ['"' if cell == "a" else cell for cell in cells]
    lines = ["\t".join(line) for line in (cells, cells[:-1], quoted)]
    (tmp_path / "dev.tsv").write_text("\r\n".join([*([header] if header else []), *lines, ""]), "utf-8", newline="")
    rows, total = albert.read_rows(tmp_path / "dev.tsv", albert.TASKS[task])
    label = {"qqp": "0", "cola": "0", "mnli": "neutral", "qnli": "entailment", "rte": "not_entailment"}.get(task, "1")
    sentences = ("a", "b") if "b" in cells else ("a",)
    assert rows == [(*sentences, label), ('"', *sentences[1:], label)] and total == 3
    (tmp_path / "dev.tsv").write_text("some\tother\n1\t2\n", "utf-8")
    with pytest.raises(ValueError, match="has no (column|line)"):
        albert.read_rows(tmp_path / "dev.tsv", albert.TASKS[task])


def test_albert_text_is_read_from_folders_and_held_out_in_blocks(tmp_path, capsys):
    albert = load(ALBERT)
    lines = read_corpus("train", "en")[:450]
    (tmp_path / "books" / "a").mkdir(parents=True)
    (tmp_path / "books" / "a" / "1.txt").write_text("\n\n".join(lines[:250]), "utf-8")  # empty lines are none
    (tmp_path / "books" / "b.txt").write_bytes("\n".join(lines[250:400]).encode() + b"\n\xff\n")
    (tmp_path / "c").write_text("\n".join(lines[400:]), "utf-8")
    text = ["--text", str(tmp_path / "books"), str(tmp_path / "c")]
    vocabulary = ["--vocabulary", str(tmp_path / "v")]
    assert albert.main(["vocabulary", *text, "--size", "300", "--out", str(tmp_path / "v")]) == 0
    assert "297 pieces, 301 symbols" in capsys.readouterr().out
    (tmp_path / "d.xz").write_bytes(lzma.compress((tmp_path / "c").read_bytes()))  # read as what it holds
    packed = ["--text", str(tmp_path / "books"), str(tmp_path / "d.xz")]
    assert albert.main(["vocabulary", *packed, "--size", "300", "--out", str(tmp_path / "w")]) == 0
    pieces = [{line.split()[0] for line in (tmp_path / each / "dict.txt").open()} for each in "vw"]
    assert len(pieces[0] & pieces[1]) > 290
    capsys.readouterr()
    assert albert.main(["text", *text, *vocabulary, "--held-out", "3", "--out", str(tmp_path / "out")]) == 0
    assert re.search(r"train: 250 lines, .*\nvalid: 200 lines", capsys.readouterr().out)
    dictionary = Dictionary.load(str(tmp_path / "out" / "dict.txt"))
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "v" / "spm.model"))
    data = {part: load_indexed_dataset(str(tmp_path / "out" / part), dictionary) for part in ("train", "valid")}
    read = [dictionary.string(data["valid"][number]) for number in (0, 99, 100)] + [dictionary.string(data["train"][0])]
    expected = [" ".join(model.encode(lines[number], out_type=str)) for number in (0, 99, 300, 100)]
    assert read == expected and expected[0] == expected[0].lower() != lines[0]
    assert albert.main(["text", "--text", str(tmp_path / "c"), *vocabulary, "--out", str(tmp_path / "no")]) == 2
    assert "--text has 50 lines, and one block of 100 in --held-out 1000 is for validation" in capsys.readouterr().err
    assert albert.main(["text", "--text", str(tmp_path / "d"), *vocabulary, "--out", str(tmp_path / "no")]) == 2
    assert "there is no file" in capsys.readouterr().err and not (tmp_path / "no").exists()


def test_albert_table_is_chosen_on_dev_with_the_metric_of_the_task(tmp_path, capsys):
    albert = load(ALBERT)
    for rate, seed, *scores in (("1e-5", 1, -1.5, 3.0), ("2e-5", 1, 5.0, 4.0), ("2e-5", 2, 7.0), ("1e-5", 2, 99.0)):
        path = tmp_path / f"tune-cola-pretrained-{rate}-seed{seed}.log"
        lines = [
            f"valid | epoch {epoch:03d} | valid on 'valid' subset | loss 0.9 | accuracy 90 | mcc {score} | wps 9\n"
            for epoch, score in enumerate(scores, 1)
        ]
        path.write_text("".join(lines), "utf-8")
        if scores != [99.0]:
            path.with_suffix(".done").touch()
    assert albert.main(["table", "--task", "cola", "--run", str(tmp_path), "--best-rate"]) == 0
    assert albert.main(["table", "--task", "cola", "--run", str(tmp_path)]) == 0
    best, _, _, *rows = capsys.readouterr().out.splitlines()
    assert best == "2e-5" and [re.split("  +", row) for row in rows] == [
        ["1e-5", "3.0", "3.0"],
        ["2e-5", "6.0 ± 1.4", "5.0 7.0"],
    ]
    assert albert.main(["table", "--task", "sst2", "--run", str(tmp_path)]) == 2
    assert f"--run {tmp_path}: no seed was run with every learning rate" in capsys.readouterr().err
