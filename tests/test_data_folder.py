"""Data folders that cannot be trained on: the sentences, and where they come."""

import argparse
import re
from pathlib import Path

import pytest
from conftest import PLUGIN, run
from fairseq import options
from fairseq.tasks import TASK_REGISTRY

from fairseq_sharing.upstream.data_folder import DATA_CHECKS, check_data_folder, check_labelled_folder


@pytest.mark.parametrize(
    ("files", "languages", "sentence"),
    [
        (None, (None, None), "does not exist: give the --destdir of fairseq-preprocess"),
        ([], ("en", "de"), "holds no dictionary"),
        (["dict.en.txt"], (None, None), "holds no file <split>"),
        (["dict.en.txt", "train.en-de.en.idx"], (None, None), None),
        (["dict.en.txt", "dict.de.txt"], ("en", "de"), None),  # enough for fairseq-interactive
        (["dict.en.txt", "train.en-de.en.idx", ":"], (None, None), None),  # a second shard that is not there yet
    ],
)
def test_data_folders(tmp_path, files, languages, sentence):
    folder = tmp_path / "bin"
    if files is not None:
        folder.mkdir()
        for name in files:
            if name != ":":
                (folder / name).touch()
    data = f"{folder}:{tmp_path}/later" if files and ":" in files else str(folder)
    args = argparse.Namespace(data=data, source_lang=languages[0], target_lang=languages[1])
    if sentence is None:
        check_data_folder(args)
    else:
        with pytest.raises(ValueError, match=f"{folder} {sentence}"):
            check_data_folder(args)


@pytest.mark.parametrize("task", ["language_modeling", "masked_lm"])
def test_text_folders(tmp_path, task):
    _, check = DATA_CHECKS[task]
    folder = tmp_path / "bin"
    args = argparse.Namespace(data=f"{folder}:{tmp_path}/later")
    with pytest.raises(ValueError, match=f"{folder} does not exist: give the --destdir of fairseq-preprocess"):
        check(args)
    folder.mkdir()
    with pytest.raises(ValueError, match=f"{folder} holds no dictionary dict.txt"):
        check(args)
    (folder / "dict.txt").touch()
    check(args)
    check(argparse.Namespace(data=""))  # only a model is wanted


def write_labelled_folder(folder: Path, labels: list[str] | None = None, text: bool = True) -> Path:
    """Write dictionaries as fairseq-preprocess does, with words that fill up to a multiple of eight."""
    if text:
        (folder / "input0").mkdir(parents=True)
        (folder / "input0" / "dict.txt").write_text("good 3\nbad 2\n", encoding="utf-8")
    if labels is not None:
        (folder / "label").mkdir(parents=True)
        lines = [*(f"{label} 1" for label in labels), "madeupword0000 0", "madeupword0001 0"]
        (folder / "label" / "dict.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("written", "settings", "sentence"),
    [
        (None, {}, "does not exist: give the --destdir of fairseq-preprocess"),
        ({"text": False, "labels": ["1", "0"]}, {}, "holds no dictionary input0/dict.txt: make it with fairseq-prepr"),
        ({}, {}, "holds no dictionary label/dict.txt: make it with fairseq-preprocess --only-source … --destdir"),
        ({"labels": ["1", "0", "?"]}, {}, "has 3 labels in label/dict.txt, more than --num-classes 2: give the right"),
        ({"labels": ["1", "0"]}, {}, None),
        ({"labels": ["1", "0"]}, {"num_classes": 5}, None),
        ({}, {"regression_target": True, "num_classes": 1}, None),  # numbers have no dictionary
    ],
)
def test_labelled_folders(tmp_path, written, settings, sentence, caplog):
    folder = tmp_path / "reviews" if written is None else write_labelled_folder(tmp_path / "reviews", **written)
    args = argparse.Namespace(**{"data": str(folder), "num_classes": 2, "regression_target": False, **settings})
    if sentence is None:
        check_labelled_folder(args)
    else:
        with pytest.raises(ValueError, match=re.escape(f"data folder {folder} {sentence}")) as caught:
            check_labelled_folder(args)
        assert str(caught.value) in caplog.messages


@pytest.mark.parametrize(
    ("task", "flags", "sentence"),
    [
        ("masked_lm", ["--arch", "albert_encoder"], "holds no dictionary dict.txt"),
        ("language_modeling", ["--arch", "transformer_lm_shared_cycle"], "holds no dictionary dict.txt"),
        (
            "sentence_prediction",
            ["--arch", "albert_encoder", "--criterion", "sentence_prediction", "--num-classes", "2"],
            "holds no dictionary label/dict.txt",
        ),
    ],
)
def test_wrong_data_is_refused_while_parsing_and_by_the_task(tmp_path, task, flags, sentence):
    data = write_labelled_folder(tmp_path / "data")
    arguments = [str(data), "--task", task, *flags]
    with pytest.raises(ValueError, match=f"data folder {data} {sentence}"):
        options.parse_args_and_arch(options.get_training_parser(), arguments)
    with pytest.raises(ValueError, match=f"data folder {data} {sentence}"):
        TASK_REGISTRY[task].setup_task(argparse.Namespace(data=str(data), num_classes=2))


def test_training_without_labels_says_so(tmp_path):
    output = run(
        [
            *("fairseq-train", write_labelled_folder(tmp_path / "data"), "--user-dir", PLUGIN),
            *("--task", "sentence_prediction", "--criterion", "sentence_prediction", "--num-classes", 2),
            *("--arch", "albert_encoder", "--save-dir", tmp_path / "save", "--optimizer", "adam", "--cpu"),
        ],
        check=False,
    )
    assert f"data folder {tmp_path / 'data'} holds no dictionary label/dict.txt" in output
    assert not (tmp_path / "save").exists()


def test_decoding_without_data_says_so(tmp_path):
    output = run(["fairseq-generate", tmp_path / "no", "--path", "x.pt", "--user-dir", PLUGIN], check=False)
    assert f"data folder {tmp_path / 'no'} does not exist" in output
