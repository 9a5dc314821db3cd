"""The moving average of --store-ema: tied tensors, buffers, and resuming."""

import logging
import types

import torch

from .checkpoint_files import place_of

logger = logging.getLogger(__name__)


def first_name_of(state_dict: dict) -> dict[str, str]:
    """Return for each name the first name of the same tensor."""
    first, seen = {}, {}
    for name, tensor in state_dict.items():
        first[name] = seen.setdefault(place_of(tensor) if torch.is_tensor(tensor) else name, name)
    return first


def first_names(state_dict: dict) -> dict:
    """Return the state dict with each tensor under its first name only."""
    return {name: state_dict[name] for name, first in first_name_of(state_dict).items() if name == first}


def decay_each_tensor_once(step, self, new_model, *args, **kwargs):
    """Update the moving average of a tied embedding once, not once for every name it has, and copy buffers.

    Upstream multiplies in place, name by name: with --share-all-embeddings the embedding decays three times per update.
    It averages buffers too, which stops at those of integers; torch's own AveragedModel copies them.
    """
    self.skip_keys = {*self.skip_keys, *(name for name, _ in new_model.named_buffers())}
    listed = types.SimpleNamespace(state_dict=lambda: first_names(new_model.state_dict()))
    return step(self, listed, *args, **kwargs)


def keep_fp32_once(build, self, state_dict=None):
    """Keep one fp32 copy of each tensor of the moving average, under the name that is updated."""
    return build(self, first_names(self.model.state_dict() if state_dict is None else state_dict))


def restore_with_versions(restore, self, state_dict, *args, **kwargs):
    """Give back to a moving average the keys with "version" in their name, which its own update leaves out.

    Loading looks at them: upstream reads the format of a stack from them, this plugin the sharing of its layers.
    """
    versions = {key: value for key, value in self.model.state_dict().items() if "version" in key}
    return restore(self, {**versions, **state_dict}, *args, **kwargs)


def load_average_after_model(load_checkpoint, self, filename, *args, **kwargs):
    """Load the moving average once the parameters are loaded, or start it from these, and count on towards its update.

    Where a file has no average, upstream means to start from the file's parameters, which it has deleted: KeyError
    'model'. It counts from nought after resuming: with --ema-update-freq a resumed run averages other updates.
    """
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


def keep_aliases_of_average(load_ema, path):
    """Keep two names of one tensor one tensor where the moving average takes the model's place.

    Upstream copies name by name, so that `save_ema_as_checkpoint` writes a tied embedding once per name.
    """
    state = load_ema(path)
    model, average = state["model"], state["extra_state"]["ema"]
    for name, first in first_name_of(average).items():
        model[name] = model[first]
    return state
