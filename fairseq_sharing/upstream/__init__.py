"""The only place where fairseq itself is changed: `apply` lists every change, and one file for each kind gives reasons.

    checkpoint_files   what loads, what is written, and the sentence where either fails
    moving_average     --store-ema: tied tensors, buffers, resuming
    batches            no sentence lost; after resuming the same batches, masked as they would have been
    speech             augmentation by seed, epoch and clip
    devices            several processes and --bf16 without GPU or TPU
    decoding           diverse beams, and language models with numpy 2
    hooks              where the plugin looks before loading, before training and after an update
    data_folder        a sentence for data that fairseq could not train on

Nothing here depends on sharing: each change mends a fault that a stock model has too on today's torch or numpy. It is
a function that is called in the place of an upstream one, which it gets as its first argument. A function that upstream
no longer has is left alone. Importing the package applies the changes once.
"""

import functools
import inspect
import sys

import torch  # noqa: F401  torch.jit.script compiles a search that `replace` has wrapped with the names found here
from fairseq import checkpoint_utils, options, search, utils
from fairseq.data import EpochBatchIterator, MaskTokensDataset, data_utils
from fairseq.data.audio.speech_to_text_dataset import SpeechToTextDataset, SpeechToTextDatasetCreator
from fairseq.dataclass import initialize
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.models import BaseFairseqModel, distributed_fairseq_model
from fairseq.models.ema.ema import EMA
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer

from . import batches, checkpoint_files, data_folder, decoding, devices, hooks, moving_average, speech


def replace(owner, name: str, *changes) -> None:
    """Put changes in the place of an upstream function, once, if upstream has it.

    Args:
        owner: the module or class that has the function.
        name: the function's name there.
        changes: each is called with what it takes the place of, then with the arguments; the second takes the place
            of the first, and so on.
    """
    held = inspect.getattr_static(owner, name, None)
    kind = type(held) if isinstance(held, (staticmethod, classmethod)) else None
    function = held.__func__ if kind else held
    if function is None or getattr(function, "patched_by_fairseq_sharing", False):
        return
    for change in changes:
        function = put_around(function, change)
    function.patched_by_fairseq_sharing = True
    setattr(owner, name, kind(function) if kind else function)


def put_around(function, change):
    """Return a function like this one, whose calls go to ``change(function, ...)``."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return change(function, *args, **kwargs)

    return wrapper


def apply() -> None:
    """Apply every change; a second call changes nothing."""
    checkpoint_files.allow_checkpoint_classes()
    decoding.restore_numpy_name()
    replace(utils, "move_to_cpu", checkpoint_files.move_to_cpu)
    replace(PathManager, "copy", checkpoint_files.copy_atomically)
    replace(checkpoint_utils, "torch_persistent_save", checkpoint_files.save_or_explain)
    replace(distributed_utils, "_broadcast_object_slow", devices.broadcast_with_torch)
    replace(options, "parse_args_and_arch", devices.parse_bf16_without_tpu)
    replace(distributed_fairseq_model, "DistributedDataParallel", devices.wrap_on_the_cpu)
    replace(data_utils, "batch_by_size", batches.keep_the_last_batch)
    replace(getattr(search, "DiverseBeamSearch", None), "step", decoding.find_rows_of_the_batch)
    replace(EMA, "restore", moving_average.restore_with_versions)
    replace(EMA, "_step_internal", moving_average.decay_each_tensor_once)
    replace(EMA, "build_fp32_params", moving_average.keep_fp32_once)
    replace(Trainer, "train_step", hooks.tell_model_about_update)
    replace(checkpoint_utils, "load_ema_from_checkpoint", moving_average.keep_aliases_of_average)
    replace(FairseqTask, "get_batch_iterator", batches.batch_as_in_the_first_epoch)
    replace(Trainer, "get_train_iterator", batches.tell_task_about_seed)
    replace(EpochBatchIterator, "_get_iterator_for_epoch", batches.renew_data_workers)
    replace(MaskTokensDataset, "set_epoch", batches.forget_masks_of_the_last_epoch)
    replace(SpeechToTextDataset, "__getitem__", speech.augment_by_epoch_and_clip)
    replace(SpeechToTextDataset, "set_epoch", speech.set_epoch_of_clips)
    replace(SpeechToTextDatasetCreator, "from_tsv", speech.pass_seed_to_clips)
    replace(BaseFairseqModel, "load_state_dict", hooks.check_before_loading)
    for module in (initialize, sys.modules.get("fairseq_cli.train"), sys.modules.get("__main__")):
        if getattr(getattr(module, "add_defaults", None), "__module__", None) == initialize.__name__:
            replace(module, "add_defaults", hooks.check_before_training)  # who imported it has it under its own name
    replace(
        Trainer, "load_checkpoint", checkpoint_files.tell_why_loading_failed, moving_average.load_average_after_model
    )
    for task, check in data_folder.DATA_CHECKS.values():
        replace(task, "setup_task", functools.partial(data_folder.check_first, check))
