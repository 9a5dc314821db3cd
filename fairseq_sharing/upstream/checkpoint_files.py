"""Checkpoint files: what loads, what is written, and the sentence where either fails."""

import argparse
import logging
import os
import shutil

import numpy as np
import torch
from fairseq import utils
from fairseq.file_io import PathManager

logger = logging.getLogger(__name__)


def allow_checkpoint_classes() -> None:
    """Let fairseq's checkpoints load while torch's ``weights_only=True`` stays on.

    A checkpoint holds its arguments as a Namespace and, after training with --eval-bleu, numpy scalars in the meters.
    Nothing else is allowed, so a file that wants to run code is still refused.
    """
    multiarray = getattr(np, "_core", None) or np.core
    torch.serialization.add_safe_globals(
        [
            argparse.Namespace,
            np.ndarray,
            np.dtype,
            type(np.dtype(np.int64)),
            type(np.dtype(np.float64)),
            multiarray.multiarray.scalar,
            multiarray.multiarray._reconstruct,
        ]
    )


def place_of(tensor: torch.Tensor):
    """Return what all names of one tensor have in common, and no other tensor has while these are there."""
    address = tensor.data_ptr() if tensor.layout == torch.strided and tensor.numel() else 0
    if not address:
        return id(tensor)  # sparse, empty, or on a device that gives no addresses, such as a TPU
    return address, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def move_to_cpu(_, sample):
    """Move to the CPU in fp32 as fairseq does, but keep two names of one tensor one tensor.

    Upstream copies tensor by tensor: from a GPU or in half precision a tied embedding is written once per name.
    """
    moved = {}

    def move(tensor):
        place = place_of(tensor)
        if place not in moved:
            half = tensor.dtype in {torch.bfloat16, torch.float16}
            moved[place] = (tensor.to(dtype=torch.float32) if half else tensor).cpu()
        return moved[place]

    return utils.apply_to_sample(move, sample)


def copy_atomically(copy, src_path: str, dst_path: str, overwrite: bool = False):
    """Copy under a temporary name and rename: checkpoint_last.pt and checkpoint_best.pt are copies.

    Upstream overwrites them in place, so a kill or a full disk in between leaves a truncated checkpoint.
    """
    if PathManager.path_requires_pathmanager(dst_path):
        return copy(src_path, dst_path, overwrite)
    target = os.path.realpath(dst_path)  # through a link, as upstream
    temporary = f"{target}.tmp"
    try:
        shutil.copyfile(src_path, temporary)
        os.replace(temporary, target)
    except OSError as error:
        report_failed_write(dst_path, temporary, error)
        raise
    return dst_path


def save_or_explain(save, obj, filename, *args, **kwargs):
    """Say in one sentence why a checkpoint could not be written, and leave no half-written file behind."""
    try:
        return save(obj, filename, *args, **kwargs)
    except (OSError, RuntimeError) as error:
        report_failed_write(filename, f"{filename}.tmp", error)
        raise


def first_line(error: Exception) -> str:
    """Return what an error says first, or its kind when it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def report_failed_write(path: str, temporary: str, error: Exception) -> None:
    """Log the sentence and remove the temporary file."""
    if os.path.exists(temporary):
        os.remove(temporary)
    folder = os.path.dirname(os.path.abspath(path))
    free = (
        f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB are free there"
        if os.path.isdir(folder)
        else "no such folder"
    )
    logger.error(
        f"cannot write checkpoint {path}: {first_line(error)}; {free}; checkpoints written before are untouched"
    )


def tell_why_loading_failed(load_checkpoint, self, *args, **kwargs):
    """Put the reason behind the trainer's own words, where it is read.

    Upstream replaces every error by "please ensure that the architectures match", many lines below the reason.
    """
    try:
        return load_checkpoint(self, *args, **kwargs)
    except Exception as error:
        if error.__context__ is not None:
            error.add_note(f"The reason: {error.__context__}")
        raise
