"""The only place where fairseq itself is changed, each change with its reason.

Nothing here depends on sharing: each function mends a fault that a stock model has too on today's torch or numpy. A
function that upstream no longer has is left alone. Importing the package applies them once.
"""

import argparse
import functools
import importlib.util
import logging
import os
import shutil
import sys
import types

import numpy as np
import torch
from fairseq import checkpoint_utils, options, search, utils
from fairseq.data import Dictionary, LRUCacheDataset, MaskTokensDataset, data_utils
from fairseq.data.audio.speech_to_text_dataset import SpeechToTextDataset, SpeechToTextDatasetCreator
from fairseq.dataclass import initialize
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel, distributed_fairseq_model
from fairseq.models.ema.ema import EMA
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.masked_lm import MaskedLMTask
from fairseq.tasks.sentence_prediction import SentencePredictionTask
from fairseq.tasks.translation import TranslationTask
from fairseq.trainer import Trainer

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


def move_to_cpu(sample):
    """Move to the CPU in fp32 as fairseq does, but keep two names of one tensor one tensor.

    Upstream copies tensor by tensor: from a GPU or in half precision a tied embedding is written once per name.
    """
    moved = {}

    def move(tensor):
        if tensor.layout != torch.strided:
            return tensor.cpu()  # sparse tensors have no address to compare
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if key not in moved or tensor.numel() == 0:
            half = tensor.dtype in {torch.bfloat16, torch.float16}
            moved[key] = (tensor.to(dtype=torch.float32) if half else tensor).cpu()
        return moved[key]

    return utils.apply_to_sample(move, sample)


def copy_atomically(copy):
    """Copy under a temporary name and rename: checkpoint_last.pt and checkpoint_best.pt are copies.

    Upstream overwrites them in place, so a kill or a full disk in between leaves a truncated checkpoint.
    """

    @functools.wraps(copy)
    def wrapper(src_path: str, dst_path: str, overwrite: bool = False):
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

    return wrapper


def save_or_explain(save):
    """Say in one sentence why a checkpoint could not be written, and leave no half-written file behind."""

    @functools.wraps(save)
    def wrapper(obj, filename, *args, **kwargs):
        try:
            return save(obj, filename, *args, **kwargs)
        except (OSError, RuntimeError) as error:
            report_failed_write(filename, f"{filename}.tmp", error)
            raise

    return wrapper


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


def broadcast_with_torch(broadcast):
    """Send objects between workers by torch's own function.

    Upstream reads what its first worker sent with torch.load, which refuses a configuration under ``weights_only``:
    several processes can train but not resume. What is sent was loaded by the first worker, under ``weights_only``.
    """

    @functools.wraps(broadcast)
    def wrapper(obj, src_rank, group, dist_device):
        if not isinstance(group, torch.distributed.ProcessGroup):
            return broadcast(obj, src_rank, group, dist_device)  # TPUs have groups of their own
        box = [obj]
        torch.distributed.broadcast_object_list(box, src=src_rank, group=group, device=dist_device)
        return box[0]

    return wrapper


def wrap_on_the_cpu(ddp):
    """Give DistributedDataParallel no device ids for a model on the CPU.

    Upstream always gives them and torch refuses them there, so its default --ddp-backend only runs on GPUs.
    """

    @functools.wraps(ddp)
    def wrapper(module, device_ids=None, output_device=None, **kwargs):
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            device_ids = output_device = None
        return ddp(module, device_ids=device_ids, output_device=output_device, **kwargs)

    return wrapper


def parse_bf16_without_tpu(parse):
    """Let --bf16 train on GPUs and CPUs.

    Upstream's parser takes --bf16 for --tpu, though nothing in its training needs one: without torch_xla it stops.
    """

    @functools.wraps(parse)
    def wrapper(*args, **kwargs):
        parsed = parse(*args, **kwargs)
        namespace = parsed[0] if isinstance(parsed, tuple) else parsed
        if getattr(namespace, "bf16", False) and importlib.util.find_spec("torch_xla") is None:
            namespace.tpu = False
        return parsed

    return wrapper


def keep_the_last_batch(batch_by_size):
    """Keep the sentences of a last batch whose size is no multiple of --required-batch-size-multiple (default 8).

    Upstream's last version drops that batch: of 30 test sentences fairseq-generate translates 24, and the longest
    sentences are never trained on (facebookresearch/fairseq issue 5036). Its releases did not.
    """

    @functools.wraps(batch_by_size)
    def wrapper(indices, *args, **kwargs):
        indices = indices if isinstance(indices, np.ndarray) else np.fromiter(indices, dtype=np.int64, count=-1)
        batches = batch_by_size(indices, *args, **kwargs)
        if kwargs.get("fixed_shapes") is not None:
            return batches
        rest = indices[sum(map(len, batches)) :]
        return [*batches, rest] if len(rest) else batches

    return wrapper


def find_rows_of_the_batch(step):
    """Tell diverse beam search in which row of its batch a sentence is.

    Upstream passes the sentences' numbers in the data and takes them for rows: fairseq-generate with
    --diverse-beam-groups stops with an IndexError, or holds the words of one sentence against another.
    """

    @functools.wraps(step)
    def wrapper(self, number, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None):
        if number == 0:
            self.sentences = original_batch_idxs
        if original_batch_idxs is not None:
            original_batch_idxs = (original_batch_idxs[:, None] == self.sentences[None]).nonzero()[:, 1]
        return step(self, number, lprobs, scores, prev_output_tokens, original_batch_idxs)

    return wrapper


def first_name_of(state_dict: dict) -> dict[str, str]:
    """Return for each name the first name of the same tensor."""
    first, seen = {}, {}
    for name, tensor in state_dict.items():
        one_of_many = torch.is_tensor(tensor) and tensor.numel() > 0
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if one_of_many else name
        first[name] = seen.setdefault(place, name)
    return first


def first_names(state_dict: dict) -> dict:
    """Return the state dict with each tensor under its first name only."""
    return {name: state_dict[name] for name, first in first_name_of(state_dict).items() if name == first}


def decay_each_tensor_once(step):
    """Update the moving average of a tied embedding once, not once for every name it has, and copy buffers.

    Upstream multiplies in place, name by name: with --share-all-embeddings the embedding decays three times per update.
    It averages buffers too, which stops at those of integers; torch's own AveragedModel copies them.
    """

    @functools.wraps(step)
    def wrapper(self, new_model, *args, **kwargs):
        self.skip_keys = {*self.skip_keys, *(name for name, _ in new_model.named_buffers())}
        listed = types.SimpleNamespace(state_dict=lambda: first_names(new_model.state_dict()))
        return step(self, listed, *args, **kwargs)

    return wrapper


def keep_fp32_once(build):
    """Keep one fp32 copy of each tensor of the moving average, under the name that is updated."""

    @functools.wraps(build)
    def wrapper(self, state_dict=None):
        return build(self, first_names(self.model.state_dict() if state_dict is None else state_dict))

    return wrapper


def restore_with_versions(restore):
    """Give back to a moving average the keys with "version" in their name, which its own update leaves out.

    Loading looks at them: upstream reads the format of a stack from them, this plugin the sharing of its layers.
    """

    @functools.wraps(restore)
    def wrapper(self, state_dict, *args, **kwargs):
        versions = {key: value for key, value in self.model.state_dict().items() if "version" in key}
        return restore(self, {**versions, **state_dict}, *args, **kwargs)

    return wrapper


def load_average_after_model(load_checkpoint):
    """Load the moving average once the parameters are loaded, or start it from these, and count on towards its update.

    Where a file has no average, upstream means to start from the file's parameters, which it has deleted: KeyError
    'model'. It counts from nought after resuming: with --ema-update-freq a resumed run averages other updates.
    """

    @functools.wraps(load_checkpoint)
    def wrapper(self, filename, *args, **kwargs):
        settings = self.cfg.ema
        if not settings.store_ema:
            return load_checkpoint(self, filename, *args, **kwargs)
        settings.store_ema = False
        try:
            extra_state = load_checkpoint(self, filename, *args, **kwargs)
        finally:
            settings.store_ema = True
        if extra_state is None:
            return None
        self._ema = None  # the next look at it copies the model, or reads --ema-seed-model
        if "ema" in extra_state:
            self.ema.restore(extra_state["ema"])
            if settings.ema_fp32:
                self.ema.build_fp32_params(extra_state.get("ema_fp32_params"))
        else:
            start = settings.ema_seed_model or "the parameters just loaded"
            logger.warning(f"{filename} holds no moving average: --store-ema starts one from {start}")
        self.ema.update_freq_counter = self.get_num_updates() % max(1, settings.ema_update_freq)
        return extra_state

    return wrapper


def keep_aliases_of_average(load_ema):
    """Keep two names of one tensor one tensor where the moving average takes the model's place.

    Upstream copies name by name, so that `save_ema_as_checkpoint` writes a tied embedding once per name.
    """

    @functools.wraps(load_ema)
    def wrapper(path):
        state = load_ema(path)
        model, average = state["model"], state["extra_state"]["ema"]
        for name, first in first_name_of(average).items():
            model[name] = model[first]
        return state

    return wrapper


def batch_as_in_the_first_epoch(get_batch_iterator):
    """Put the same sentences into batches after resuming as before.

    Upstream sorts them once, by a seed of the epoch in which its process starts, and uses these batches in all epochs:
    a run that is resumed after its first epoch goes on with others.
    """

    @functools.wraps(get_batch_iterator)
    def wrapper(self, dataset, *args, **kwargs):
        epoch = kwargs.get("epoch", 1)
        renewed = (kwargs.get(name) for name in ("disable_iterator_cache", "update_epoch_batch_itr"))
        kept = (
            self.can_reuse_epoch_itr(dataset) and not any(renewed) and not getattr(self.cfg, "rebuild_batches", False)
        )
        if not kept or dataset in self.dataset_to_epoch_iter:
            return get_batch_iterator(self, dataset, *args, **kwargs)
        first = {"epoch": 1}
        if getattr(self, "seed_counts_epochs", False):
            first["seed"] = kwargs["seed"] - epoch + 1
        iterator = get_batch_iterator(self, dataset, *args, **{**kwargs, **first})
        iterator.epoch = epoch
        dataset.set_epoch(epoch)
        return iterator

    return wrapper


def tell_task_about_seed(get_train_iterator):
    """Tell the task whether its batches get a seed that grows with the epoch: --update-ordered-indices-seed."""

    @functools.wraps(get_train_iterator)
    def wrapper(self, *args, **kwargs):
        self.task.seed_counts_epochs = self.cfg.dataset.update_ordered_indices_seed
        return get_train_iterator(self, *args, **kwargs)

    return wrapper


def forget_masks_of_the_last_epoch(set_epoch):
    """Empty the caches of masked sentences when an epoch begins.

    Upstream keeps the last few by their numbers, whatever the epoch: what ends one epoch and begins the next is masked
    as before. So masks depend on the batches, and a resumed run, whose cache is empty, sees others.
    """

    @functools.wraps(set_epoch)
    def wrapper(self, *args, **kwargs):
        LRUCacheDataset.__getitem__.cache_clear()
        return set_epoch(self, *args, **kwargs)

    return wrapper


def augment_by_epoch_and_clip(getitem):
    """Draw SpecAugment and the like from the seed, the epoch and the clip.

    Upstream draws from numpy's global state: a resumed run sees other masks than one that went on, and data workers all
    see the same.
    """

    @functools.wraps(getitem)
    def wrapper(self, index):
        with data_utils.numpy_seed(getattr(self, "seed", 1), getattr(self, "epoch", 1), int(index)):
            return getitem(self, index)

    return wrapper


def pass_seed_to_clips(from_tsv):
    """Tell speech datasets the run's seed, which upstream uses for sampling only."""

    @functools.wraps(from_tsv)
    def wrapper(cls, *args, **kwargs):
        dataset = from_tsv.__func__(cls, *args, **kwargs)
        for each in getattr(dataset, "datasets", [dataset]):
            getattr(each, "dataset", each).seed = kwargs.get("seed", 1)
        return dataset

    return wrapper


def set_epoch_of_clips(set_epoch):
    """Tell speech datasets the epoch."""

    @functools.wraps(set_epoch)
    def wrapper(self, epoch):
        self.epoch = epoch
        return set_epoch(self, epoch)

    return wrapper


LOADING_CHECKS = []  # functions of a model and a state dict that raise when these do not belong together


def check_before_loading(load_state_dict):
    """Let `LOADING_CHECKS` refuse a state dict before any fairseq model loads it.

    Upstream gives no place for that: its own models answer a foreign file with pages of missing keys.
    """

    @functools.wraps(load_state_dict)
    def wrapper(self, state_dict, *args, **kwargs):
        for check in LOADING_CHECKS:
            check(self, state_dict)
        return load_state_dict(self, state_dict, *args, **kwargs)

    return wrapper


TRAINING_CHECKS = []  # functions of fairseq's whole configuration that raise when a training cannot be right


def check_before_training(add_defaults):
    """Let `TRAINING_CHECKS` see the whole configuration at the beginning of a training, before --save-dir is made.

    fairseq-hydra-train imports the plugin when its configuration is complete, and upstream then shows task and model
    their own parts only. The function that is wrapped is the first that gets all of it.
    """

    @functools.wraps(add_defaults)
    def wrapper(cfg):
        add_defaults(cfg)
        for check in TRAINING_CHECKS:
            check(cfg)

    return wrapper


def tell_why_loading_failed(load_checkpoint):
    """Put the reason behind the trainer's own words, where it is read.

    Upstream replaces every error by "please ensure that the architectures match", many lines below the reason.
    """

    @functools.wraps(load_checkpoint)
    def wrapper(self, *args, **kwargs):
        try:
            return load_checkpoint(self, *args, **kwargs)
        except Exception as error:
            if error.__context__ is not None:
                error.add_note(f"The reason: {error.__context__}")
            raise

    return wrapper


def tell_model_about_update(train_step):
    """Call the model's ``after_update(trainer, samples)`` after each update, if it has one.

    A model of upstream's learns neither of the criterion nor of the number of updates.
    """

    @functools.wraps(train_step)
    def wrapper(self, samples, *args, **kwargs):
        before = self.get_num_updates()
        output = train_step(self, samples, *args, **kwargs)
        after_update = getattr(self.get_model(), "after_update", None)
        if after_update is not None and self.get_num_updates() > before:
            with metrics.aggregate("train"):  # as in the function that is wrapped
                after_update(self, samples)
        return output

    return wrapper


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


def check_first(check):
    """Return what puts a check of the data folder in front of a task's ``setup_task``."""

    def wrap(setup_task):
        @functools.wraps(setup_task)
        def wrapper(cls, cfg, **kwargs):
            check(cfg)
            return setup_task.__func__(cls, cfg, **kwargs)

        return wrapper

    return wrap


def replace(owner, name: str, wrap) -> None:
    """Put ``wrap(original)`` in the place of an upstream function, once, if upstream has it."""
    original = getattr(owner, name, None)
    if original is None or getattr(original, "patched_by_fairseq_sharing", False):
        return
    patched = wrap(original)
    patched.patched_by_fairseq_sharing = True
    kind = type(owner.__dict__.get(name)) if isinstance(owner, type) else None  # staticmethod, classmethod or neither
    setattr(owner, name, kind(patched) if kind in (staticmethod, classmethod) else patched)


def restore_numpy_name() -> None:
    """Give numpy 2 back the one name of numpy 1 that fairseq uses: blocks that end at sentences, as in LM decoding."""
    if not hasattr(np, "compat"):
        np.compat = types.SimpleNamespace(long=np.int64)


def apply() -> None:
    """Apply every change of this file; a second call changes nothing."""
    allow_checkpoint_classes()
    restore_numpy_name()
    replace(utils, "move_to_cpu", lambda original: functools.wraps(original)(move_to_cpu))
    replace(PathManager, "copy", copy_atomically)
    replace(checkpoint_utils, "torch_persistent_save", save_or_explain)
    replace(distributed_utils, "_broadcast_object_slow", broadcast_with_torch)
    replace(options, "parse_args_and_arch", parse_bf16_without_tpu)
    replace(distributed_fairseq_model, "DistributedDataParallel", wrap_on_the_cpu)
    replace(data_utils, "batch_by_size", keep_the_last_batch)
    replace(getattr(search, "DiverseBeamSearch", None), "step", find_rows_of_the_batch)
    replace(EMA, "restore", restore_with_versions)
    replace(EMA, "_step_internal", decay_each_tensor_once)
    replace(EMA, "build_fp32_params", keep_fp32_once)
    replace(Trainer, "train_step", tell_model_about_update)
    replace(checkpoint_utils, "load_ema_from_checkpoint", keep_aliases_of_average)
    replace(FairseqTask, "get_batch_iterator", batch_as_in_the_first_epoch)
    replace(Trainer, "get_train_iterator", tell_task_about_seed)
    replace(MaskTokensDataset, "set_epoch", forget_masks_of_the_last_epoch)
    replace(SpeechToTextDataset, "__getitem__", augment_by_epoch_and_clip)
    replace(SpeechToTextDataset, "set_epoch", set_epoch_of_clips)
    replace(SpeechToTextDatasetCreator, "from_tsv", pass_seed_to_clips)
    replace(BaseFairseqModel, "load_state_dict", check_before_loading)
    for module in (initialize, sys.modules.get("fairseq_cli.train"), sys.modules.get("__main__")):
        replace(module, "add_defaults", check_before_training)  # a module that imported it has it under its own name
    replace(Trainer, "load_checkpoint", lambda load: load_average_after_model(tell_why_loading_failed(load)))
    for task, check in DATA_CHECKS.values():
        replace(task, "setup_task", check_first(check))
