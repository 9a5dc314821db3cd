"""Reading checkpoints and writing results so that a mistake costs one sentence and no file."""

import contextlib
import importlib.util
import logging
import os
import pickle
import re
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ..upstream.checkpoint_files import first_line


def load_checkpoint(path: str) -> dict:
    """Return a fairseq checkpoint as saved, on the CPU, under torch's ``weights_only=True``.

    Raises:
        ValueError: there is no such file, or it is no whole fairseq checkpoint.
    """
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(
            r"WeightsUnpickler error: (.*?)(?:\. |$)", str(error), re.MULTILINE
        )  # below advice to trust it
        reason = found[1] if found else first_line(error)
        raise ValueError(f"{path} is no checkpoint that can be loaded safely: {reason}") from None
    except (RuntimeError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no checkpoint, or a truncated one: {first_line(error)}") from None
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(model, dict) or not model or not all(isinstance(value, torch.Tensor) for value in model.values()):
        raise ValueError(f"{path} is no fairseq checkpoint: it holds no 'model' with tensors")
    return state


def check_output(path: str, force: bool, flag: str = "--output") -> None:
    """Refuse an output that would be lost or could not be written, before any work is done.

    Args:
        path: the file to write.
        force: whether it may be there already.
        flag: how the user names it.

    Raises:
        ValueError: the file exists and --force was not given, or its folder does not exist.
    """
    if os.path.isdir(path):
        raise ValueError(f"{flag} {path} is a folder, not a file")
    if os.path.exists(path) and not force:
        raise ValueError(f"{flag} {path} exists: remove it or add --force")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {Path(path).absolute().parent}")


def write_atomically(path: str, write: Callable[[str], None]) -> None:
    """Call ``write`` with a temporary name beside ``path`` and rename: the file is there whole or not at all.

    Raises:
        ValueError: the file could not be written; nothing is left behind.
    """
    temporary = f"{path}.tmp"
    try:
        write(temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError when the disk is full
        raise ValueError(f"cannot write {path}: {first_line(error)}") from error
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def check_output_folder(path: str, force: bool) -> None:
    """Refuse a folder that would be lost or could not be written, before any work is done.

    Raises:
        ValueError: --out exists and --force was not given, is a file, or the folder above it does not exist.
    """
    target = Path(path).absolute()
    if target.exists() and not target.is_dir():
        raise ValueError(f"--out {path} is a file, not a folder")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise ValueError(f"--out {path} exists: remove it or add --force")
    if not target.parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {target.parent}")


def write_folder(path: str, write: Callable[[Path], None]) -> None:
    """Call ``write`` with an empty folder beside ``path`` and rename: the folder is there whole or not at all.

    A folder that is there already is replaced, unless it holds a file that the new one does not.

    Raises:
        ValueError: the folder could not be written, or would take another file with it; nothing is left behind.
    """
    target = Path(path).absolute()
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
            new, old = Path(scratch, "new"), Path(scratch, "old")
            new.mkdir()
            write(new)
            lost = sorted(names_in(target) - names_in(new))
            if lost:
                raise ValueError(f"--out {path} holds {lost[0]}, which --force would not replace: remove it yourself")
            if target.exists():
                target.rename(old)
            try:
                new.rename(target)
            except OSError:
                if old.exists():
                    old.rename(target)
                raise
    except Exception as error:
        # When the disk is full torch and CTranslate2 raise RuntimeError, safetensors an error of its own.
        if not isinstance(error, (OSError, RuntimeError)) and type(error).__name__ != "SafetensorError":
            raise
        raise ValueError(f"cannot write {path}: {first_line(error)}") from error


def names_in(folder: Path) -> set[str]:
    """Return the files of a folder, also those further down, by their relative names."""
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir()}


def need(package: str, flag: str) -> None:
    """Refuse a subcommand's option whose package, one of the extra ``export``, is not installed.

    Raises:
        ValueError: with the line that installs it.
    """
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{flag} needs the package {package}: install it with pip install {package}")


@contextlib.contextmanager
def quiet_log() -> Iterator[None]:
    """Leave an error's sentence to `main`, without this it would come twice, and fairseq's news out of the report."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hydra's, about its own future
            yield
    finally:
        logging.disable(before)
