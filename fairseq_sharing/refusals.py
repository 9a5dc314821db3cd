"""fairseq's ways to train and to change a model that cannot be right with shared layers, or on this machine."""

import logging
import os

import torch

from .sharing import Sharing

logger = logging.getLogger(__name__)


def refuse(sentence: str) -> None:
    """Log what is wrong with the flags, then raise it."""
    logger.error(sentence)
    raise ValueError(sentence)


def as_text(value) -> str | None:
    """Return a list, as YAML and fairseq's own flags have it, as the text that is typed."""
    return value if value is None or isinstance(value, str) else ",".join(map(str, value))


def check_neighbours(args, stack: str, sharing: Sharing) -> None:
    """Refuse fairseq's options that cannot be right when layers share parameters."""
    keep = getattr(args, f"{stack}_layers_to_keep", None)
    if keep:
        refuse(
            f"--{stack}-layers-to-keep {as_text(keep)} cannot prune layers that share parameters ({stack}: {sharing})"
        )
    for name, problem in (
        ("quant_noise_pq", "would disturb a parameter set once for each layer that uses it"),
        ("quant_noise_scalar", "would quantise only the first layer of each parameter set"),
        ("quantization_config_path", "would quantise only the first layer of each parameter set"),
    ):
        if getattr(args, name, None):
            refuse(
                f"--{name.replace('_', '-')} {getattr(args, name)} {problem} "
                f"({stack}: {sharing}) and cannot be combined with sharing"
            )
    if getattr(args, "base_layers", 0):
        refuse(
            f"--base-layers {args.base_layers} cannot be combined with --{stack}-sharing "
            f"{getattr(args, f'{stack}_sharing')}: BASE layers are no part of the assignment"
        )


def check_training(args, stack: str, sharing: Sharing) -> None:
    """Refuse ways to train that cannot be right when layers share parameters, and name the option to use instead."""
    shared = f"({stack}: {sharing})"
    backend = getattr(args, "ddp_backend", None)
    if backend in ("fully_sharded", "slowmo"):
        reason = {
            "fully_sharded": "wraps each layer by itself and cannot share parameters across layers",
            "slowmo": "has never been tried with layers that share parameters",
        }[backend]
        refuse(f"--ddp-backend {backend} {reason} {shared}: use --ddp-backend legacy_ddp")
    if getattr(args, "pipeline_model_parallel", False):
        refuse(
            "--pipeline-model-parallel puts layers on different devices, where they cannot share parameters "
            f"{shared}: use --ddp-backend legacy_ddp"
        )
    parallel = getattr(args, "model_parallel_size", 1)
    if parallel > 1:
        refuse(
            f"--model-parallel-size {parallel} needs Megatron's layers, which do not share parameters {shared}: "
            "use --ddp-backend legacy_ddp and leave it at 1"
        )
    processes = max(getattr(args, "distributed_world_size", 1), int(os.environ.get("WORLD_SIZE", 1)))  # or torchrun's
    if processes == 1 or backend not in ("pytorch_ddp", "c10d") or getattr(args, "use_bmuf", False):
        return
    if getattr(args, "checkpoint_activations", False) or getattr(args, "offload_activations", False):
        refuse(
            f"--ddp-backend {backend} stops with 'marked ready twice' when {processes} processes train "
            f"layers that share parameters {shared} with --checkpoint-activations: use --ddp-backend legacy_ddp"
        )
    if getattr(args, "find_unused_parameters", False):
        return
    for name in (f"{stack}_layerdrop", "encoder_freezing_updates"):
        if getattr(args, name, None):
            refuse(
                f"--ddp-backend {backend} stops when one of {processes} processes has no gradient for a parameter set "
                f"{shared}, which --{name.replace('_', '-')} {getattr(args, name)} brings about: "
                "use --ddp-backend legacy_ddp, or add --find-unused-parameters"
            )


def check_precision(args, training: bool = False) -> None:
    """Refuse fp16 without a GPU, whatever is shared: fairseq's optimizer and its trainer, at an overflow, need one.

    Args:
        args: settings ``fp16``, ``memory_efficient_fp16``, ``cpu`` and ``tpu``.
        training: whether this machine shall train now; otherwise only the flags are held against each other.

    Raises:
        ValueError: with the precision to use instead.
    """
    for name in ("memory_efficient_fp16", "fp16"):  # the first implies the second
        if not getattr(args, name, False):
            continue
        flag = f"--{name.replace('_', '-')}"
        if getattr(args, "cpu", False):
            refuse(f"{flag} needs a GPU and cannot be combined with --cpu: use {flag.replace('fp16', 'bf16')}")
        if training and not torch.cuda.is_available() and not getattr(args, "tpu", False):
            refuse(f"{flag} needs a GPU, and torch sees none on this machine: use {flag.replace('fp16', 'bf16')}")
