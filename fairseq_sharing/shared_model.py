"""What every family adds to its fairseq model: flags, ties, checkpoint hooks and a line at start-up."""

import logging
from typing import ClassVar

from fairseq import utils
from fairseq.logging import metrics
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from omegaconf import DictConfig, open_dict

from .arguments import as_namespace, get_sharing, whole_configuration
from .attention import share_keys_and_values
from .checkpoint import check_before_loading, register_checkpoint_hooks
from .gradients import measure_gradient_norms
from .inference import pack_linears
from .options import add_sharing_args
from .refusals import check_precision
from .residual import list_scalings, measure_once, scale_residuals
from .sharing import count_saved, share_layers, tie_names, tied_names

logger = logging.getLogger(__name__)


class SharedLayers:
    """Mixin in front of a fairseq model class: builds that model, then ties its stacks.

    Attributes:
        STACKS: for each stack, the name that its flags carry and where the model keeps its layers.
        FROM_TASK: options whose defaults depend on the task's.
    """

    STACKS: ClassVar[dict[str, str]] = {"encoder": "encoder.layers", "decoder": "decoder.layers"}
    FROM_TASK: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def add_args(cls, parser):
        """Add fairseq's flags of this model, then those of sharing."""
        super().add_args(parser)
        add_sharing_args(parser, cls.STACKS)

    @classmethod
    def resolve_args(cls, name: str, args) -> None:
        """Leave in the arguments what the architecture of that name makes of them.

        Raises:
            ValueError: they contradict each other.
        """
        ARCH_CONFIG_REGISTRY[name](args)

    @classmethod
    def build_model(cls, args, task):
        """Build fairseq's model, then tie its stacks as the arguments say.

        Raises:
            ValueError: a stack has nothing to tie, or its layers differ.
        """
        if getattr(cls, "__dataclass", None) is None:  # a model without dataclass reads a flat Namespace
            args = as_namespace(args)
        model = super().build_model(args, task)
        model.startup_lines = []
        if getattr(args, "log_layer_gradient_norms", False):
            model.after_update = log_gradient_norms
        for stack, path in cls.STACKS.items():
            layers = model.get_submodule(path)
            method = str(getattr(args, "residual_scaling", "none"))
            if method != "none":
                scale_residuals(layers, method)
            share_stack(layers, args, stack)
            strategy = getattr(args, f"{stack}_sharing") or "assignment"
            model.startup_lines.append(format_stack(stack, strategy, layers))
        check_before_loading(model)
        return model

    def train(self, mode: bool = True):
        """Switch to training; the first time, log the picture of each stack. Decoding never gets here."""
        if mode and "startup_lines" in self.__dict__:
            for line in self.__dict__.pop("startup_lines"):
                logger.info(line)
            if any(list_scalings(self.get_submodule(path)) for path in self.STACKS.values()):
                self.residual_hook = self.register_forward_pre_hook(measure_once, with_kwargs=True)
        return super().train(mode)

    def make_generation_fast_(self, **kwargs):
        """Prepare for decoding as fairseq does; a decoder whose layers share gets packed matrices."""
        if "name" not in kwargs:  # else a model around this one asks each of its modules itself
            super().make_generation_fast_(**kwargs)
        layers = self.get_submodule(self.STACKS["decoder"]) if "decoder" in self.STACKS else None
        if layers is not None and layers.sharing.shares:
            pack_linears([*layers.modules(), self.decoder.output_projection])

    def _apply(self, fn, recurse=True):
        """Convert as torch does (``to``, ``half``, ``to_empty`` and the like), and keep every tie.

        torch makes a new parameter for each name when the new device is of another kind, such as ``meta``, and under
        ``torch.__future__.set_overwrite_module_params_on_conversion(True)``.
        """
        groups = tied_names(self)
        super()._apply(fn, recurse)
        tie_names(self, groups)
        return self


def check_training_run(cfg) -> None:
    """Refuse a training that cannot be right, seeing all of fairseq's configuration (see `hooks.TRAINING_CHECKS`).

    fairseq-train shows all of it to the architecture while it parses; fairseq-hydra-train never does, so that the model
    gets here what depends on the task.

    Raises:
        ValueError: with the sentence that the command line would be answered with.
    """
    check_precision(cfg.common, training=True)
    name = getattr(cfg.model, "_name", None)
    model = ARCH_MODEL_REGISTRY.get(name, type)
    if issubclass(model, SharedLayers) and isinstance(cfg.model, DictConfig):
        whole = whole_configuration(cfg)
        model.resolve_args(name, whole)
        with open_dict(cfg.model):
            cfg.model.update({option: whole[option] for option in model.FROM_TASK})


def log_gradient_norms(trainer, samples: list) -> None:
    """Log the gradient norm that each layer contributes, every --log-interval updates, on the first worker.

    They are those of the update's first batch at the parameters after the update, divided like fairseq's own ``gnorm``
    by the batch's size (tokens or sentences).

    Args:
        trainer: fairseq's trainer, after an update.
        samples: the batches of that update.
    """
    if not trainer.is_data_parallel_master or trainer.get_num_updates() % trainer.cfg.common.log_interval:
        return
    sample, _ = trainer._prepare_sample(samples[0])
    sample = utils.apply_to_sample(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, sample)

    def compute_loss(model):
        loss, sample_size, _ = trainer.get_criterion()(model, sample)
        return loss / sample_size

    model = trainer.get_model()
    with metrics.aggregate(new_root=True):  # what the criterion logs is not this update's
        norms = measure_gradient_norms(model, model.STACKS, compute_loss)
    for name, norm in norms.items():  # not rounded: in deep Post-LN the lowest decoder layers have 1e-5 and less
        metrics.log_scalar(f"gnorm_{name}", norm, priority=2000)


def share_stack(layers, args, stack: str) -> None:
    """Tie a stack as its arguments say and make its checkpoints know; a stack that is tied already stays as it is.

    Raises:
        ValueError: the stack has nothing to tie, or its layers differ.
    """
    if not hasattr(layers, "sharing"):
        sharing = get_sharing(args, stack)
        share_layers(layers, sharing.assignment, sharing.parts)
        register_checkpoint_hooks(layers)
        share_keys_and_values(layers)


def format_stack(stack: str, strategy: str, layers) -> str:
    """Return the line that shows a stack: N, M, strategy, picture and the parameters saved."""
    sharing = layers.sharing
    if not sharing.shares:
        return f"{stack}: {sharing.depth}, each with its own parameters"
    return f"{stack}: {sharing.depth} ({strategy}): {sharing}; {count_saved(layers):,} parameters saved"
