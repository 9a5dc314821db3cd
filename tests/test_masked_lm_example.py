"""The masked-LM example: what its data script writes, how it chooses, and its whole run."""

import itertools
import lzma
import re
import subprocess
import sys
from collections import Counter

import pytest
from commands import environment
from conftest import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "masked_lm"
sys.path.insert(0, str(EXAMPLE))
import compare  # noqa: E402
import prepare  # noqa: E402
import runs  # noqa: E402


def log_line(epoch: int, part: str, accuracy: float) -> str:
    return f"| INFO | valid | epoch {epoch:03d} | valid on '{part}' subset | loss 0.9 | accuracy {accuracy} | wps 9\n"


def write_run(folder, rate: str, seed: int, *epochs: tuple[float, float], done: bool = True):
    name = f"tune-novels-pretrained-{rate}-seed{seed}"
    lines = (
        log_line(epoch, part, accuracy)
        for epoch, pair in enumerate(epochs, 1)
        for part, accuracy in zip(("valid", "test"), pair, strict=True)
    )
    (folder / f"{name}.log").write_text("".join(lines), encoding="utf-8")
    if done:
        (folder / f"{name}.done").touch()


def test_choices_are_made_on_valid_only(tmp_path):
    write_run(tmp_path, "1e-3", 1, (70, 99), (75, 60), (74, 98))  # the second epoch, whatever its test accuracy
    write_run(tmp_path, "3e-4", 1, (73, 97))
    write_run(tmp_path, "1e-3", 2, (71, 62))
    write_run(tmp_path, "3e-4", 2, (99, 99), done=False)
    (tmp_path / "tune-novels-unpretrained-1e-3-seed3.done").touch()
    found = runs.read_runs(tmp_path, "novels", "pretrained")
    assert found == {"1e-3": {1: (75, 60), 2: (71, 62)}, "3e-4": {1: (73, 97)}}
    assert runs.best_rate(found) == "1e-3"
    assert runs.mean_and_spread([60.0, 62.0]) == "61.0 ± 1.4"
    with pytest.raises(ValueError, match="no seed was run with every learning rate"):
        runs.best_rate({"1e-3": {1: (75, 60)}, "3e-4": {2: (73, 97)}})


def test_a_resumed_epoch_counts_once_and_an_unfinished_one_not(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "".join(log_line(*line) for line in [(1, "valid", 60), (1, "test", 50), (1, "valid", 61), (1, "test", 51)])
        + log_line(2, "valid", 90),
        encoding="utf-8",
    )
    assert runs.read_scores(log) == (61, 51)


def pretraining_log(loss: float) -> str:
    """3,000 updates at two a second, of which one interval was disturbed."""
    step = "epoch 001: 9 / 9 loss=7, wps={}, ups={}, wpb=900, num_updates={}, train_wall=9, wall={}"
    lines = ["num. shared model params: 1,234 (num. trained: 1,234)"]
    for number, (wps, ups) in enumerate(((2000, 2), (200, 0.2), (2000.5, 2)), 1):
        lines.append(f"| INFO | train_inner | {step.format(wps, ups, 1000 * number, 500 * number)}")
        lines.append(f"| INFO | valid | epoch 001 | valid on 'valid' subset | loss {loss + 3 - number} | ppl 9 | ")
        lines[-1] += f"num_updates {1000 * number}"
    return "\n".join(lines)


def test_the_table_of_what_is_shared(tmp_path):
    """Wide embeddings first, in the order of ALBERT's table; what has not ended its pretraining is left out."""
    for name, loss in (("none-32", 6.1), ("all-32", 6.4), ("all-128", 6.3), ("ffn-32", None)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "pretrain.log").write_text(pretraining_log(loss or 7), encoding="utf-8")
        if loss:
            (folder / "pretrain.done").touch()
        write_run(folder, "1e-3", 1, (70, 61))
        write_run(folder, "1e-3", 2, (70, 63))
    for log in (tmp_path / "all-32").glob("*.log"):  # as sharing.sh leaves them for others
        log.with_suffix(".log.xz").write_bytes(lzma.compress(log.read_bytes()))
        log.with_suffix(".done").unlink()
        log.unlink()
    command = [sys.executable, EXAMPLE / "sharing.py", tmp_path]

    def table(*flags) -> list[list[str]]:
        lines = subprocess.run([*command, *flags], capture_output=True, text=True, check=True).stdout.splitlines()
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

    cells = table()
    assert cells[0][:6] == ["shared", "E", "parameters", "pieces/s", "minutes", "masked-LM loss (bits)"]
    assert cells[0][6:] == ["novels, accuracy (%)", "novels, by seed"]
    assert [row[:6] for row in cells[2:]] == [
        ["all", "128", "1,234", "2,000", "25", "6.300"],
        ["all", "32", "1,234", "2,000", "25", "6.400"],
        ["nothing", "32", "1,234", "2,000", "25", "6.100"],
    ]
    assert all(row[6:] == ["62.0 ± 1.4", "61.0 63.0"] for row in cells[2:])
    heading, _, *rows = table("--watts", "6")
    assert heading[5] == "Wh" and [row[5] for row in rows] == ["2.5", "2.5", "2.5"]
    table("--picture", str(tmp_path / "sharing.png"))
    assert (tmp_path / "sharing.png").read_bytes().startswith(b"\x89PNG")
    refused = subprocess.run([*command[:2], tmp_path / "all-32"], capture_output=True, text=True)
    assert refused.returncode == 2 and "holds no finished pretraining" in refused.stderr


def test_a_packed_log_does_not_stand_for_one_that_is_written_anew(tmp_path):
    write_run(tmp_path, "1e-3", 1, (70, 60), done=False)
    (tmp_path / "tune-novels-pretrained-1e-3-seed1.log.xz").write_bytes(lzma.compress(b"what was before"))
    assert runs.read_runs(tmp_path, "novels", "pretrained") == {}


def test_a_run_without_results_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare.py", "--run", str(tmp_path), "--set", "novels"])
    (tmp_path / "novels.train.label").write_text("emma\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        compare.main()
    assert f"--run {tmp_path}: no seed was run with every learning rate" in capsys.readouterr().err


def test_what_is_tested_with_is_not_in_the_text_for_pretraining():
    trained = {*prepare.read_sentences("train"), *prepare.read_reviews("train", None)[1]}
    for name in ("novels", "reviews"):
        parts = prepare.read_labelled(name, 1000)
        assert set(parts["train"][1]) <= trained
        for part in ("valid", "test"):
            sentences = parts[part][1]
            assert len(sentences) >= 1000
            # Both books say "what do you mean by that?" more than once.
            assert sum(sentence in trained for sentence in sentences) <= 0.005 * len(sentences)


def test_novels_are_told_apart_where_they_begin_and_end():
    """The people of a book are named in its lines, in each part, and hardly in those of another."""
    people = {
        "moby-dick": ("ahab", "queequeg", "starbuck", "stubb"),
        "emma": ("emma", "knightley", "harriet", "elton"),
        "mansfield-park": ("rushworth", "edmund", "crawford", "bertram"),
        "pride-and-prejudice": ("darcy", "bingley", "wickham", "bennet"),
        "sense-and-sensibility": ("elinor", "marianne", "willoughby", "dashwood"),
    }
    assert list(people) == list(prepare.NOVELS)
    for part in prepare.SPLITS:
        novels, sentences = prepare.read_novels(part, None)
        named = Counter(
            (novel, other)
            for novel, sentence in zip(novels, sentences, strict=True)
            for other, names in people.items()
            if any(re.search(rf"\b{name}\b", sentence) for name in names)
        )
        for novel, other in itertools.product(people, repeat=2):
            if novel == other:
                assert named[novel, novel] >= 0.05 * novels.count(novel)
            else:
                assert named[novel, other] <= 1


def test_bag_of_words_beats_the_majority():
    parts = prepare.read_labelled("reviews", 500)
    assert [len(labels) for labels, _ in parts.values()] == [500, 1014, 1003]
    name, valid, _ = compare.best_bag_of_words(parts)
    assert re.match("naive Bayes|logistic regression|linear SVM", name)
    assert valid > compare.majority(parts["valid"][0]) + 5
    assert compare.majority(["1", "0", "0", "0"]) == 75


@pytest.mark.slow
def test_the_run_learns_and_beats_the_majority(tmp_path):
    """The whole script, shortened: 1.5 bits below the unigram entropy, then better than guessing one class."""
    settings = {"RUN": tmp_path / "run", "UPDATES": 4000, "SETS": "novels", "TUNE_RATES": "1e-3", "SEEDS": "1"}
    values = environment(**{name: str(value) for name, value in settings.items()})

    def run():
        return subprocess.run([EXAMPLE / "run.sh"], env=values, capture_output=True, text=True, check=False)

    done = run()
    assert done.returncode == 0, done.stderr[-2000:]
    entropy = float(re.search(r"^valid: .* entropy ([\d.]+)", done.stdout, re.MULTILINE).group(1))
    pretraining = done.stdout.split("== pretrain")[1].split("== tune")[0]
    loss = float(re.findall(r"valid on 'valid' subset \| loss ([\d.]+)", pretraining)[-1])
    assert loss < entropy - 1.5
    table = done.stdout[done.stdout.index("novels: 1,000 labelled sentences, 5 classes") :]
    accuracy = float(re.search(r"albert_encoder, pretrained +1e-3 +[\d.]+ +([\d.]+)", table).group(1))
    majority = float(re.search(r"majority class +[\d.]+ +([\d.]+)", table).group(1))
    assert accuracy > majority + 5
    again = run()
    assert again.stdout.endswith(table) and "train_inner" not in again.stdout.replace(pretraining, "")
    assert again.stdout.count("already done") >= len(list((tmp_path / "run").glob("*.done"))) >= 4
