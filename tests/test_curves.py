"""Learning curves and scores: what `fairseq-sharing curves` reads, draws and refuses."""

import json
from pathlib import Path

import pytest
from conftest import FOUR_FROM_TWO, run, train_command
from torch.utils.tensorboard import SummaryWriter

from fairseq_sharing.tools.curves import Result, draw_results, name_runs, read_results
from fairseq_sharing.tools.logs import interval_median, read_validations, unique_parameters
from fairseq_sharing.tools.main import main
from fairseq_sharing.tools.picture import drawing


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    return path


def fails(capsys, *argv) -> str:
    """Run a command that must fail with one sentence; return the sentence."""
    assert main(["curves", *map(str, argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.strip().splitlines()) == 1
    return captured.err.strip()


SIMPLE = r"""
10:00:00 | INFO | train_inner | epoch 001: 10 / 99 loss=9, nll_loss=8, num_updates=10, lr=0, wall=60
10:00:30 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 9.1 | nll_loss 8.0 | ppl 256 | num_updates 10
10:00:30 | INFO | other | epoch 001 | valid on 'valid1' subset | loss 5.1 | nll_loss 4.0 | ppl 16 | num_updates 10
10:01:00 | INFO | train_inner | epoch 001: 20 / 99 loss=9, nll_loss=8, num_updates=20, lr=0, wall=120
10:01:00 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 8.1 | nll_loss 7.0 | ppl 128 | num_updates 20
15:00:00 | INFO | fairseq.trainer | Loaded checkpoint c/checkpoint_last.pt (epoch 1 @ 10 updates)
15:00:40 | INFO | train_inner | epoch 001: 20 / 99 loss=9, nll_loss=8, num_updates=20, lr=0, wall=0
15:01:00 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 7.9 | nll_loss 6.5 | ppl 90.5 | num_updates 20
15:01:00 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 7.9 | nll_lo
""".strip().replace("\n", "\n2026-01-01 ")
SIMPLE = f"2026-01-01 {SIMPLE}"
JSON = """{"epoch": 1, "update": 0.1, "loss": "9", "nll_loss": "8", "num_updates": "10", "wall": "90"}
2026-01-01 10:00:30 | INFO | valid | {"epoch": 1, "valid_loss": "9.1", "valid_nll_loss": "8.0", "valid_ppl": "256", \
"valid_num_updates": "10"}
"""


def test_curves_reads_simple_and_json_logs(tmp_path):
    simple = read_validations(write(tmp_path / "simple.log", SIMPLE.splitlines()))
    # The break of five hours is no training time, fairseq's "wall" is not believed after it, the update validated twice
    # counts once, the cut line not at all.
    assert [(v.updates, v.loss, v.minutes) for v in simple] == [(10, 8.0, 1.5), (20, 6.5, 2.5)]
    (only,) = read_validations(write(tmp_path / "json.log", JSON.splitlines()))
    assert (only.updates, only.loss, only.in_bits, only.minutes) == (10, 8.0, True, 1.5)


def test_curves_names_runs_by_what_differs():
    assert name_runs([Path("/r/a/train.log"), Path("/r/b/train.log")]) == ["a", "b"]
    assert name_runs([Path("/r/a.log"), Path("/r/b.log")]) == ["a", "b"]


def test_a_picture_or_a_sentence(tmp_path, capsys):
    first = write(tmp_path / "a.log", SIMPLE.splitlines())
    second = write(tmp_path / "b.log", JSON.splitlines())
    png, svg = tmp_path / "curve.png", tmp_path / "curve.svg"
    assert main(["curves", str(first), str(second), "--out", str(png), "--out", str(svg)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG") and "</svg>" in svg.read_text("utf-8")
    capsys.readouterr()
    empty = write(tmp_path / "empty.log", ["nothing"])
    (tmp_path / "folder").mkdir()
    new = tmp_path / "new.png"
    for logs, target, words in (
        ([first], png, "exists: remove it or add --force"),
        ([empty], new, "no validation line"),
        ([tmp_path / "folder"], new, "is no folder of --tensorboard-logdir"),
        ([tmp_path / "no.log"], new, "no.log"),
        ([first], tmp_path / "no" / "new.png", "there is no folder"),
        ([first], tmp_path / "new.pdf", ".png or .svg"),
        ([first, first], new, "twice"),
        ([], new, "nothing to draw"),
    ):
        assert words in fails(capsys, *logs, "--out", target)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["a.log", "b.log", "curve.png", "curve.svg", "empty.log", "folder"]


def test_a_log_without_time_stamps_is_added_up(tmp_path):
    """As in --log-file: fairseq's clock starts again, and no line says that the run was resumed."""
    lines = [line.split("| ", 3)[-1] for line in SIMPLE.splitlines() if "Loaded" not in line]
    lines = [line.replace("wall=0", "wall=50") for line in lines]
    read = read_validations(write(tmp_path / "simple.log", lines))
    assert [(each.updates, each.minutes) for each in read] == [(10, 1.0), (20, pytest.approx(110 / 60))]


@pytest.mark.parametrize("style", ["json", "simple"])
def test_a_million_updates_and_seconds(style, tmp_path):
    """Which fairseq writes as 1e+06, and larger numbers with six digits."""
    lines = []
    for updates, wall, loss in ((999_000, "999000", 4.5), (1_000_000, "1e+06", 4.4), (1_500_000, "1.5e+06", 4.25)):
        count = f"{updates:g}"
        if style == "json":
            lines.append(f'{{"epoch": 1, "num_updates": "{count}", "wall": "{wall}"}}')
            lines.append(f'{{"epoch": 1, "valid_loss": "{loss}", "valid_ppl": "9", "valid_num_updates": "{count}"}}')
        else:
            lines.append(f"epoch 001: 9 / 9 loss=4, num_updates={count}, lr=0.1, wall={wall}")
            lines.append(f"valid | epoch 001 | valid on 'valid' subset | loss {loss} | ppl 9 | num_updates {count}")
    read = read_validations(write(tmp_path / "train.log", lines))
    assert [(each.updates, each.loss) for each in read] == [(999_000, 4.5), (1_000_000, 4.4), (1_500_000, 4.25)]
    assert [each.minutes * 60 for each in read] == pytest.approx([999_000, 1_000_000, 1_500_000])


def test_tensorboard_tells_what_the_log_tells(data, tmp_path):
    """A real run; that a resumed one is one run is tested below, with times that are known."""
    command = [
        *train_command(data, tmp_path / "save", "transformer_shared_cycle_rev", *FOUR_FROM_TWO),
        *("--tensorboard-logdir", tmp_path / "tb", "--log-interval", 1, "--log-file", tmp_path / "log"),
        *("--validate-interval-updates", 2, "--max-tokens", 800, "--dropout", 0, "--no-epoch-checkpoints"),
    ]
    run([*command, "--max-update", 4])
    read = read_validations(tmp_path / "log")
    events = read_validations(tmp_path / "tb")
    assert [each.updates for each in events] == [each.updates for each in read] == [2, 4]
    assert [each.loss for each in events] == pytest.approx([each.loss for each in read], abs=1e-3)
    assert all(each.in_bits for each in events)
    minutes = [each.minutes for each in events]
    assert minutes == pytest.approx([each.minutes for each in read], abs=2 / 60)  # the log has whole seconds
    assert minutes == sorted(minutes)
    out = tmp_path / "curve.svg"
    assert main(["curves", str(tmp_path / "tb"), str(tmp_path / "log"), "--out", str(out)]) == 0
    assert "</svg>" in out.read_text("utf-8")


def test_time_in_tensorboard_leaves_out_what_lies_between(tmp_path):
    """The first process starts at 1000 seconds; the second, an hour later, resumes at update 10 of 20."""

    def process(number: int, entries: list):
        for kind, updates, second, values in entries:
            with SummaryWriter(tmp_path / "tb" / kind) as writer:
                for tag, value in values.items():
                    writer.add_scalar(tag, value, updates, walltime=second)
            for file in (tmp_path / "tb" / kind).glob("*tfevents*"):
                if ".somewhere." not in file.name:
                    file.rename(file.with_name(f"events.out.tfevents.{second}.somewhere.{number}.{updates}"))

    process(7, [("train_inner", 10, 1060, {"wall": 60.0}), ("valid", 10, 1090, {"nll_loss": 8.0, "ppl": 256.0})])
    process(7, [("train_inner", 20, 1150, {"wall": 150.0}), ("valid", 20, 1180, {"nll_loss": 7.0, "ppl": 128.0})])
    process(
        8, [("train_inner", 20, 5000, {"wall": 70.0, "ups": 0.5}), ("valid", 20, 5030, {"nll_loss": 6.5, "ppl": 90.5})]
    )
    found = [(each.updates, each.loss, each.minutes) for each in read_validations(tmp_path / "tb")]
    # 90 seconds until the validation at 10, then ten updates of two seconds and 30 of validation.
    assert found == [(10, 8.0, 1.5), (20, 6.5, pytest.approx((90 + 20 + 30) / 60))]


SCORES = """name,BLEU,parameters,speed (relative)
Vanilla,27.13,61M,1.00
CYCLE,27.91,"60915712",0.63
CYCLE,28.14,60_915_712,0.47
"""


def test_costs_that_hardly_differ_look_so():
    results = [Result("Vanilla", 16.8, 479_232, 9672), Result("CYCLE", 16.3, 480_192, 6394)]
    with drawing() as pyplot:
        _, axes = pyplot.subplots(1, 2)
        draw_results(list(axes), ["parameters", "speed"], results, "BLEU", "tokens per second")
        parameters, speed = (axis.get_xlim() for axis in axes)
    assert parameters[0] == 0 < 0.48 < parameters[1] < 0.7  # millions
    assert 5000 < speed[0] < 6394


def test_scores_in_three_formats(tmp_path, capsys):
    table = [line.replace('"', "").split(",") for line in SCORES.splitlines()]
    (tmp_path / "a.csv").write_text(SCORES)
    (tmp_path / "a.tsv").write_text(SCORES.replace(",", "\t"))
    yaml = "".join(
        "- {" + ", ".join(f"{name}: {value}" for name, value in zip(table[0], row, strict=True)) + "}\n"
        for row in table[1:]
    )
    (tmp_path / "a.yaml").write_text(yaml)
    for kind in ("csv", "tsv", "yaml"):
        results, score, speed = read_results(tmp_path / f"a.{kind}")
        assert (score, speed) == ("BLEU", "speed (relative)")
        found = [(each.name, each.score, each.parameters, each.speed) for each in results]
        assert found == [
            ("Vanilla", 27.13, 61e6, 1.0),
            ("CYCLE", 27.91, 60915712, 0.63),
            ("CYCLE", 28.14, 60915712, 0.47),
        ]
    log = write(tmp_path / "a.log", SIMPLE.splitlines())
    for logs in ([], [log]):
        out = tmp_path / f"scores{len(logs)}.png"
        assert main(["curves", *map(str, logs), "--results", str(tmp_path / "a.csv"), "--out", str(out)]) == 0
        assert out.read_bytes().startswith(b"\x89PNG")
    wer = write(tmp_path / "wer.csv", ["name,wer,speed", "a,3.2,100"])
    assert read_results(wer)[1] == "WER (lower is better)"
    assert main(["curves", "--results", str(wer), "--out", str(tmp_path / "wer.svg")]) == 0
    capsys.readouterr()
    for name, text, words in (
        ("b.csv", "name,bleu\na,1\n", "needs columns name, one of bleu, chrf, wer"),
        ("b.csv", "name,speed\na,1\n", "it has name, speed"),
        ("b.csv", "", "it has no rows"),
        ("b.csv", "name,bleu,speed\na,1\n", "line 2 has not as many fields"),
        ("b.csv", "name,bleu,speed\na,1,fast\n", "speed of a is fast"),
        ("b.yaml", "- [1", "is no YAML"),
        ("b.yaml", "a: 1", "must be a list"),
        ("b.txt", "x", "must end in .csv, .tsv, .yaml or .yml"),
    ):
        (tmp_path / name).write_text(text)
        assert words in fails(capsys, "--results", tmp_path / name, "--out", tmp_path / "no.png")
    assert "cannot read" in fails(capsys, "--results", tmp_path / "none.csv", "--out", tmp_path / "no.png")
    assert not (tmp_path / "no.png").exists()


def test_pace_and_parameters_of_a_log():
    """In both formats; what validation logs under a like name does not count."""
    head = ["fairseq_cli.train | num. shared model params: 478,208 (num. trained: 478,208)"]
    paces = ((10, 1), (1e6, 3), (20, 5))
    simple = [f"train_inner | epoch 001: loss=9, wps={wps}, ups={ups}, wpb=1" for wps, ups in paces]
    records = [json.dumps({"epoch": 1, "wps": str(wps), "ups": str(ups)}) for wps, ups in paces]
    valid = json.dumps({"epoch": 1, "valid_wps": "70", "valid_num_updates": "5"})
    for lines in (simple, [*records, valid, '{"epoch": 1, "wps": "7']):
        assert unique_parameters(head + lines) == 478208
        assert (interval_median(lines, "wps"), interval_median(lines, "ups")) == (20, 3)
        with pytest.raises(ValueError, match="no line with the number of parameters"):
            unique_parameters(lines)
        with pytest.raises(ValueError, match="no ups of an interval: training was shorter than --log-interval"):
            interval_median(head, "ups")
