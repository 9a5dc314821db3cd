"""The benchmark program: whose turn it is, what it divides, and that it measures what it says."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY

sys.path.append(str(REPOSITORY / "scripts"))
import benchmark
import benchmark_scaling

SMALL = ["--layers", "4", "--sets", "2", "--width", "64", "--vocab-size", "50", "--batch", "2x4"]
SMALL += ["--repeats", "2", "--turns", "2"]


def parameters(vocabulary: int, width: int, encoder: int, decoder: int) -> int:
    """One tied embedding, sinusoidal positions, Post-LN, an FFN four times as wide; so many layers of each kind."""
    attention, norm = 4 * (width * width + width), 2 * width
    ffn = 8 * width * width + 4 * width + width
    return vocabulary * width + encoder * (attention + ffn + 2 * norm) + decoder * (2 * attention + ffn + 3 * norm)


def test_turns_alternate():
    order = []
    times = benchmark.take_turns({name: lambda name=name: order.append(name) or len(order) for name in "ab"}, 3)
    assert [order[index : index + 2] for index in range(0, 8, 2)] == [["b", "a"], ["a", "b"], ["b", "a"], ["a", "b"]]
    assert times == {"a": [3, 6, 7], "b": [4, 5, 8]}  # not those of the first turn


class Parent:
    """What a benchmark has in a process of its own; tells the number of that process."""

    def number(self) -> int:
        return os.getpid()


def test_no_model_outlives_the_benchmark(tmp_path):
    """Killed, it has no time to end them."""
    code = "import test_benchmark as t\nprint(t.benchmark.Process(t.Parent).call('number'), flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        child = int(started.stdout.readline())
        started.kill()
    for _ in range(100):
        try:
            if re.search(r"\) Z ", Path(f"/proc/{child}/stat").read_text()):
                return  # nobody has asked what became of it
        except OSError:
            return
        time.sleep(0.1)
    pytest.fail(f"process {child} is still there")


@pytest.mark.parametrize(("kind", "expected"), [(benchmark.TIME, (0.5, 0.375, 0.75)), (benchmark.SPEED, (2, 1.5, 3))])
def test_a_ratio_is_that_of_a_turn(kind, expected):
    """The machine was four times as slow in the last turn; that is in no ratio."""
    ours = [{"wall": seconds, "cpu": 1.0} for seconds in (1.0, 1.0, 4.0)]
    theirs = [{"wall": seconds, "cpu": 1.0} for seconds in (1.0, 4.0, 8.0)]
    row = benchmark.compare("pair", "what", kind, {"ours": ours, "theirs": theirs})
    assert (row["wall"]["ratio"], row["wall"]["low"], row["wall"]["high"]) == expected
    assert row["cpu"]["ratio"] == 1 and row["wall_seconds"] == [1, 4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--decode", "8"], "--decode 8 must be sentences and a length of at least 2"),
        (["--batch", "0x3"], "--batch 0x3 must be"),
        (["--sets", "13"], "--sets 13 must be between 1 and --layers 12"),
        (["--width", "100"], "--width 100 must be a multiple of 64"),
        (["--turns", "1"], "--turns 1 must be at least 2"),
        (["--repeats", "0"], "--repeats 0 must be at least 1"),
        (["--measure", "ctranslate2"], "--measure ctranslate2 needs --checkpoint and --data"),
        (["--data", "bin"], "--checkpoint and --data go together"),
    ],
)
def test_wrong_arguments(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.parse_arguments(words)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_the_table_and_its_numbers(tmp_path, capsys):
    """Sizes are those of the formula: 4 bytes for each of parameter, gradient and two moments."""
    measures = ["train", "optimizer", "decode", "cache", "memory", "checkpoint"]
    words = ["--pair", "same depth", "--measure", *measures, "--decode", "2x3", "--out", str(tmp_path / "found")]
    benchmark.main([*SMALL, *words])
    rows = {row["what"]: row for row in json.loads((tmp_path / "found.json").read_text("utf-8"))["rows"]}
    assert [row.partition(",")[0] for row in rows] == [
        *("training step", "optimizer step", "parameters", "checkpoint with optimizer", "checkpoint"),
        *("loading the model", "decoding", "caches of the source in decoding"),
    ]
    assert rows["parameters, gradients and Adam"]["bytes"] == [
        16 * parameters(50, 64, layers, layers) for layers in (2, 4)
    ]
    assert rows["caches of the source in decoding"]["ratio"] == 2 / 4
    for what, row in rows.items():
        if "turns" in row:
            assert {len(turns) for turns in row["turns"].values()} == {4} and row["wall"]["ratio"] > 0, what
    table = (tmp_path / "found.md").read_text("utf-8")
    assert table.count("| same depth |") == len(rows) and table in capsys.readouterr().out


def test_every_pair_has_the_models_that_it_names():
    """Built without memory: depth, sharing and size."""
    from fairseq_sharing.tools.model import build_without_memory, parse_architecture, sharing_of

    args = benchmark.parse_arguments(SMALL)
    expected = {  # name -> layers, sets of the decoder
        **dict.fromkeys(("cycle_rev", "sequence", "cycle"), (4, 2)),
        **{"stock": (4, 4), "none": (4, 4), "stock M": (2, 2), "universal": (2, 1), "cycle_rev deeper": (6, 2)},
    }
    assert {name for ours, theirs, _ in benchmark.PAIRS.values() for name in (ours, theirs)} == set(expected)
    for name, (layers, sets) in expected.items():
        model = build_without_memory(parse_architecture(*benchmark.flags_of(name, args)), 50, 50)
        sharing = sharing_of(model.decoder.layers)
        assert (len(sharing.assignment), len(set(sharing.owners))) == (layers, sets), name


@pytest.mark.parametrize(("vocabulary", "width"), [(8000, 1152), (32768, 1024)])
def test_universal_has_as_many_parameters(vocabulary, width):
    """By the formula, since the models are large; with the paper's vocabulary it is the paper's width."""
    assert benchmark.universal_width(benchmark.parse_arguments(["--vocab-size", str(vocabulary)])) == width
    ratio = parameters(vocabulary, width, 1, 1) / parameters(vocabulary, 512, 6, 6)
    assert 0.95 < ratio < 1.05


@pytest.mark.slow
def test_import_and_albert(monkeypatch):
    small = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    monkeypatch.setattr(benchmark, "ALBERT", {**benchmark.ALBERT, **small, "vocab_size": 100})
    args = benchmark.parse_arguments(["--repeats", "1", "--turns", "2"])
    assert [row["pair"] for row in benchmark.measure_albert(args)] == ["albert"] * 3
    (row,) = benchmark.measure_import(args)
    assert row["added_seconds"]["cpu"] == row["cpu_seconds"][0] - row["cpu_seconds"][1]


def test_what_grows_must_be_possible(capsys):
    for words, message in (
        (["--grow", "M", "--values", "7"], "--sets 7 must be between 1 and --layers 6"),
        (["--values", "7"], "--values goes with one --grow"),
    ):
        with pytest.raises(SystemExit):
            benchmark_scaling.parse_arguments([*words, "--out", "x"])
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_what_grows_is_measured_and_drawn(tmp_path):
    """Memory is that of the formula; what shares nothing does not grow with M."""
    words = [
        "--grow",
        "M",
        "--values",
        "1",
        "2",
        "--layers",
        "4",
        "--width",
        "64",
        "--vocab-size",
        "50",
        "--length",
        "4",
    ]
    benchmark_scaling.main([*words, "--turns", "2", "--out", str(tmp_path / "found")])
    points = json.loads((tmp_path / "found.json").read_text("utf-8"))["points"]["M"]
    for value, point in points.items():
        sets = int(value)
        assert point["cycle_rev"]["memory"] == 16 * parameters(50, 64, sets, sets) / 1e6
        assert point["stock"]["memory"] == 16 * parameters(50, 64, 4, 4) / 1e6
        assert all(each[what] > 0 for each in point.values() for what in ("step", "decoding"))
    assert (tmp_path / "found-M.png").stat().st_size > 5000
