"""Batches: none is lost, and after resuming they are those that an uninterrupted run has."""

import inspect

import numpy as np
from fairseq.data import LRUCacheDataset


def bind(function, *args, **kwargs) -> inspect.BoundArguments:
    """Return the arguments of a call by name, however they were given, with the defaults of the others."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return call


def keep_the_last_batch(batch_by_size, indices, *args, **kwargs):
    """Keep the sentences of a last batch whose size is no multiple of --required-batch-size-multiple (default 8).

    Upstream's last version drops that batch: of 30 test sentences fairseq-generate translates 24, and the longest
    sentences are never trained on (facebookresearch/fairseq issue 5036). Its releases did not.
    """
    indices = indices if isinstance(indices, np.ndarray) else np.fromiter(indices, dtype=np.int64, count=-1)
    batches = batch_by_size(indices, *args, **kwargs)
    if bind(batch_by_size, indices, *args, **kwargs).arguments.get("fixed_shapes") is not None:
        return batches
    rest = indices[sum(map(len, batches)) :]
    return [*batches, rest] if len(rest) else batches


def batch_as_in_the_first_epoch(get_batch_iterator, self, dataset, *args, **kwargs):
    """Put the same sentences into batches after resuming as before.

    Upstream sorts them once, by a seed of the epoch in which its process starts, and uses these batches in all epochs:
    a run that is resumed after its first epoch goes on with others.
    """
    call = bind(get_batch_iterator, self, dataset, *args, **kwargs)
    epoch = call.arguments["epoch"]
    renewed = (call.arguments.get(name) for name in ("disable_iterator_cache", "update_epoch_batch_itr"))
    kept = self.can_reuse_epoch_itr(dataset) and not any(renewed) and not getattr(self.cfg, "rebuild_batches", False)
    if not kept or dataset in self.dataset_to_epoch_iter:
        return get_batch_iterator(self, dataset, *args, **kwargs)
    call.arguments["epoch"] = 1
    if getattr(self, "seed_counts_epochs", False):
        call.arguments["seed"] += 1 - epoch
    iterator = get_batch_iterator(*call.args, **call.kwargs)
    iterator.epoch = epoch
    dataset.set_epoch(epoch)
    return iterator


def tell_task_about_seed(get_train_iterator, self, *args, **kwargs):
    """Tell the task whether its batches get a seed that grows with the epoch: --update-ordered-indices-seed."""
    self.task.seed_counts_epochs = self.cfg.dataset.update_ordered_indices_seed
    return get_train_iterator(self, *args, **kwargs)


def renew_data_workers(get_iterator_for_epoch, self, *args, **kwargs):
    """Start the data workers anew in each epoch.

    Upstream keeps them, with the dataset as it was when they were started: what depends on the epoch, such as the masks
    of masked language models, stays that of the first one.
    """
    if self.num_workers > 0:
        self.dataloader = None
    return get_iterator_for_epoch(self, *args, **kwargs)


def forget_masks_of_the_last_epoch(set_epoch, self, *args, **kwargs):
    """Empty the caches of masked sentences when an epoch begins.

    Upstream keeps the last few by their numbers, whatever the epoch: what ends one epoch and begins the next is masked
    as before. So masks depend on the batches, and a resumed run, whose cache is empty, sees others.
    """
    LRUCacheDataset.__getitem__.cache_clear()
    return set_epoch(self, *args, **kwargs)
