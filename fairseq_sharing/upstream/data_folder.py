"""Data folders: one sentence before training, where upstream would fail later or without a reason."""

import logging
import os

from fairseq import utils
from fairseq.data import Dictionary, data_utils
from fairseq.file_io import PathManager
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.masked_lm import MaskedLMTask
from fairseq.tasks.sentence_prediction import SentencePredictionTask
from fairseq.tasks.translation import TranslationTask

logger = logging.getLogger(__name__)


def check_data_folder(args) -> None:
    """Say what is wrong with a translation task's data folder where fairseq would fail to infer a language pair.

    Args:
        args: configuration with ``data`` (one folder, or several joined by colons), ``source_lang``, ``target_lang``.

    Raises:
        ValueError: the first folder does not exist or was not made by fairseq-preprocess.
    """
    languages_given = args.source_lang is not None and args.target_lang is not None
    folder = first_data_folder(args)
    if folder is None:
        return
    if not any(name.startswith("dict.") for name in os.listdir(folder)):
        refuse_data_folder(folder, "holds no dictionary dict.<language>.txt, so its text is not binarised")
    if not languages_given and data_utils.infer_language_pair(folder) == (None, None):
        refuse_data_folder(
            folder, "holds no file <split>.<source>-<target>.<language>.idx, so its text is not binarised"
        )


def check_text_folder(args) -> None:
    """Say what is wrong with the data folder of a language model, masked or not.

    Args:
        args: configuration with ``data`` (one folder, or several joined by colons).

    Raises:
        ValueError: the first folder does not exist or holds no dictionary.
    """
    folder = first_data_folder(args)
    if folder is not None and not os.path.isfile(os.path.join(folder, "dict.txt")):
        refuse_data_folder(folder, "holds no dictionary dict.txt, so its text is not binarised")


def check_labelled_folder(args) -> None:
    """Say what is wrong with the data folder of sentence_prediction: dictionaries, and the number of classes.

    Upstream reports a missing dictionary as a missing file, and labels beyond --num-classes in the middle of training.

    Args:
        args: configuration with ``data``, ``num_classes`` and, for numbers as targets, ``regression_target``.

    Raises:
        ValueError: a dictionary is missing, or there are more labels than classes.
    """
    folder = first_data_folder(args)
    if folder is None:
        return
    labels = [] if getattr(args, "regression_target", False) else ["label"]
    for part in ("input0", *labels):
        if not os.path.isfile(os.path.join(folder, part, "dict.txt")):
            to_binarise = f"fairseq-preprocess --only-source … --destdir {os.path.join(folder, part)}"
            refuse_data_folder(folder, f"holds no dictionary {part}/dict.txt", f"make it with {to_binarise}")
    if labels:
        dictionary = Dictionary.load(os.path.join(folder, "label", "dict.txt"))
        names = [name for name in dictionary.symbols[dictionary.nspecial :] if not name.startswith("madeupword")]
        if len(names) > args.num_classes > 0:
            refuse_data_folder(
                folder,
                f"has {len(names)} labels in label/dict.txt, more than --num-classes {args.num_classes}",
                "give the right number, or the right labels",
            )


def first_data_folder(args) -> str | None:
    """Return the first of the folders joined by colons, or None when it cannot be looked into from here.

    Raises:
        ValueError: it does not exist.
    """
    if not args.data:
        return None
    folder = utils.split_paths(args.data)[0]  # further shards hold text only, and may come later
    if PathManager.path_requires_pathmanager(folder):
        return None
    if not os.path.isdir(folder):
        refuse_data_folder(folder, "does not exist")
    return folder


def refuse_data_folder(folder: str, problem: str, remedy: str = "give the --destdir of fairseq-preprocess") -> None:
    """Log the sentence, since fairseq surrounds it with a traceback, then raise it."""
    sentence = f"data folder {folder} {problem}: {remedy}"
    logger.error(sentence)
    raise ValueError(sentence)


# Tasks of the four families that read a folder of fairseq-preprocess.
DATA_CHECKS = {
    "translation": (TranslationTask, check_data_folder),
    "language_modeling": (LanguageModelingTask, check_text_folder),
    "masked_lm": (MaskedLMTask, check_text_folder),
    "sentence_prediction": (SentencePredictionTask, check_labelled_folder),
}


def check_data(args) -> None:
    """Look at the data folder while a command line is parsed, before fairseq makes --save-dir.

    A model that is rebuilt from its checkpoint has a ``_name``; its data may be elsewhere.
    """
    task = getattr(args, "task", None)
    if task in DATA_CHECKS and getattr(args, "data", None) and not hasattr(args, "_name"):
        DATA_CHECKS[task][1](args)


def check_first(check, setup_task, cls, cfg, **kwargs):
    """Look at the data folder before a task is set up."""
    check(cfg)
    return setup_task(cls, cfg, **kwargs)
