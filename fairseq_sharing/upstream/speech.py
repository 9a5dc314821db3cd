"""Speech data: augmentation that a resumed run repeats."""

from fairseq.data import data_utils


def augment_by_epoch_and_clip(getitem, self, index):
    """Draw SpecAugment and the like from the seed, the epoch and the clip.

    Upstream draws from numpy's global state: a resumed run sees other masks than one that went on, and data workers all
    see the same. What is not for training draws nothing, and leaves that state to a thread that loads what is.
    """
    if not getattr(self, "is_train_split", True):
        return getitem(self, index)
    with data_utils.numpy_seed(getattr(self, "seed", 1), getattr(self, "epoch", 1), int(index)):
        return getitem(self, index)


def set_epoch_of_clips(set_epoch, self, epoch):
    """Tell speech datasets the epoch."""
    self.epoch = epoch
    return set_epoch(self, epoch)


def pass_seed_to_clips(from_tsv, cls, *args, **kwargs):
    """Tell speech datasets the run's seed, which upstream uses for sampling only."""
    dataset = from_tsv(cls, *args, **kwargs)
    for each in getattr(dataset, "datasets", [dataset]):
        getattr(each, "dataset", each).seed = kwargs.get("seed", 1)
    return dataset
