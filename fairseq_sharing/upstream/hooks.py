"""Places that upstream does not have: before it loads and trains, and after an update."""

from fairseq.logging import metrics

LOADING_CHECKS = []  # functions of a model and a state dict that raise when these do not belong together


def check_before_loading(load_state_dict, self, state_dict, *args, **kwargs):
    """Let `LOADING_CHECKS` refuse a state dict before any fairseq model loads it.

    Upstream gives no place for that: its own models answer a foreign file with pages of missing keys.
    """
    for check in LOADING_CHECKS:
        check(self, state_dict)
    return load_state_dict(self, state_dict, *args, **kwargs)


TRAINING_CHECKS = []  # functions of fairseq's whole configuration that raise when a training cannot be right


def check_before_training(add_defaults, cfg):
    """Let `TRAINING_CHECKS` see the whole configuration at the beginning of a training, before --save-dir is made.

    fairseq-hydra-train imports the plugin when its configuration is complete, and upstream then shows task and model
    their own parts only. The function that is wrapped is the first that gets all of it.
    """
    add_defaults(cfg)
    for check in TRAINING_CHECKS:
        check(cfg)


def tell_model_about_update(train_step, self, samples, *args, **kwargs):
    """Call the model's ``after_update(trainer, samples)`` after each update, if it has one.

    A model of upstream's learns neither of the criterion nor of the number of updates.
    """
    before = self.get_num_updates()
    output = train_step(self, samples, *args, **kwargs)
    after_update, updates = getattr(self.get_model(), "after_update", None), self.get_num_updates()
    # With --amp upstream calls itself again for a batch that overflowed.
    if after_update is not None and updates > before and updates != getattr(self, "told_of_update", None):
        self.told_of_update = updates
        with metrics.aggregate("train"):  # as in the function that is wrapped
            after_update(self, samples)
    return output
