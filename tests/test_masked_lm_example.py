"""The masked-LM example: what its data script writes, how it chooses, and its whole run."""

import os
import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "masked_lm"
sys.path.insert(0, str(EXAMPLE))
import compare  # noqa: E402
import prepare  # noqa: E402


def log_line(epoch: int, part: str, accuracy: float) -> str:
    return f"| INFO | valid | epoch {epoch:03d} | valid on '{part}' subset | loss 0.9 | accuracy {accuracy} | wps 9\n"


def write_run(folder, rate: str, seed: int, *epochs: tuple[float, float], done: bool = True):
    folder = folder / f"rate{rate}-seed{seed}"
    folder.mkdir(parents=True)
    lines = (
        log_line(epoch, part, accuracy)
        for epoch, pair in enumerate(epochs, 1)
        for part, accuracy in zip(("valid", "test"), pair, strict=True)
    )
    (folder / "train.log").write_text("".join(lines), encoding="utf-8")
    if done:
        (folder / "done").touch()


def test_choices_are_made_on_valid_only(tmp_path):
    write_run(tmp_path, "1e-3", 1, (70, 99), (75, 60), (74, 98))  # the second epoch, whatever its test accuracy
    write_run(tmp_path, "3e-4", 1, (73, 97))
    write_run(tmp_path, "1e-3", 2, (71, 62))
    write_run(tmp_path, "3e-4", 2, (99, 99), done=False)
    runs = compare.read_runs(tmp_path)
    assert runs == {"1e-3": {1: (75, 60), 2: (71, 62)}, "3e-4": {1: (73, 97)}}
    assert compare.best_rate(runs) == "1e-3"
    assert compare.mean_and_spread([60.0, 62.0]) == "61.0 ± 1.4"
    with pytest.raises(ValueError, match="no seed was run with every learning rate"):
        compare.best_rate({"1e-3": {1: (75, 60)}, "3e-4": {2: (73, 97)}})


def test_a_resumed_epoch_counts_once_and_an_unfinished_one_not(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "".join(log_line(*line) for line in [(1, "valid", 60), (1, "test", 50), (1, "valid", 61), (1, "test", 51)])
        + log_line(2, "valid", 90),
        encoding="utf-8",
    )
    assert compare.read_accuracy(log) == (61, 51)


def test_a_run_without_results_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare.py", "--run", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        compare.main()
    assert f"--run {tmp_path}: no seed was run with every learning rate" in capsys.readouterr().err


def test_reviews_of_valid_and_test_are_not_in_the_text_for_pretraining():
    parts = {part: set(prepare.read_reviews(part, None)[1]) for part in prepare.SPLITS}
    assert all(len(reviews) >= 1000 for reviews in parts.values())
    trained = parts["train"].union(prepare.read_help("train", None))
    assert not trained & parts["valid"] and not trained & parts["test"]


def test_bag_of_words_beats_the_majority():
    reviews = {part: prepare.read_reviews(part, 500) for part in prepare.SPLITS}
    assert [len(labels) for labels, _ in reviews.values()] == [500] * 3
    name, valid, _ = compare.best_bag_of_words(reviews)
    assert re.match("naive Bayes|logistic regression|linear SVM", name)
    assert valid > compare.majority(reviews["valid"][0]) + 5
    assert compare.majority(["1", "0", "0", "0"]) == 75


@pytest.mark.slow
def test_the_run_learns_and_beats_the_majority(tmp_path):
    """The whole script, shortened: 1.5 bits below the unigram entropy, then better than guessing one class."""
    settings = {"RUN": str(tmp_path / "run"), "UPDATES": "2500", "TUNE_EPOCHS": "4", "SEEDS": "1"}
    done = subprocess.run(
        [EXAMPLE / "run.sh"], env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    entropy = float(re.search(r"^valid: .* entropy ([\d.]+)", done.stdout, re.MULTILINE).group(1))
    loss = float(re.findall(r"valid on 'valid' subset \| loss ([\d.]+)", done.stdout.split("== 3/4")[0])[-1])
    assert loss < entropy - 1.5
    table = done.stdout.split("== 4/4")[1]
    accuracy = float(re.search(r"albert_encoder, pretrained +1e-3 +[\d.]+ +([\d.]+)", table).group(1))
    majority = float(re.search(r"majority class +[\d.]+ +([\d.]+)", table).group(1))
    assert accuracy > majority + 5
    again = subprocess.run(
        [EXAMPLE / "run.sh"], env={**os.environ, **settings}, capture_output=True, text=True, check=True
    )
    assert again.stdout.split("== 4/4")[1] == table and "train_inner" not in again.stdout  # nothing is done twice
