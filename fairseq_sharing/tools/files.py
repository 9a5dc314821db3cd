"""Reading checkpoints and writing results so that a mistake costs one sentence and no file."""

import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from ..upstream import first_line


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
