"""What every family adds to its fairseq model: flags, ties, checkpoint hooks and a line at start-up."""

import logging
from typing import ClassVar

from .checkpoint import register_checkpoint_hooks
from .options import add_sharing_args, as_namespace, get_sharing
from .sharing import count_saved, share_layers, tie_names, tied_names

logger = logging.getLogger(__name__)


class SharedLayers:
    """Mixin in front of a fairseq model class: builds that model, then ties its stacks.

    Attributes:
        STACKS: for each stack, the name that its flags carry and where the model keeps its layers.
    """

    STACKS: ClassVar[dict[str, str]] = {"encoder": "encoder.layers", "decoder": "decoder.layers"}

    @classmethod
    def add_args(cls, parser):
        """Add fairseq's flags of this model, then those of sharing."""
        super().add_args(parser)
        add_sharing_args(parser, cls.STACKS)

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
        for stack, path in cls.STACKS.items():
            layers = model.get_submodule(path)
            share_stack(layers, args, stack)
            strategy = getattr(args, f"{stack}_sharing") or "assignment"
            model.startup_lines.append(format_stack(stack, strategy, layers))
        return model

    def train(self, mode: bool = True):
        """Switch to training; the first time, log the picture of each stack. Decoding never gets here."""
        if mode:
            for line in self.__dict__.pop("startup_lines", []):
                logger.info(line)
        return super().train(mode)

    def _apply(self, fn, recurse=True):
        """Convert as torch does (``to``, ``half``, ``to_empty`` and the like), and keep every tie.

        torch makes a new parameter for each name when the new device is of another kind, such as ``meta``, and under
        ``torch.__future__.set_overwrite_module_params_on_conversion(True)``.
        """
        groups = tied_names(self)
        super()._apply(fn, recurse)
        tie_names(self, groups)
        return self


def share_stack(layers, args, stack: str) -> None:
    """Tie a stack as its arguments say and make its checkpoints know; a stack that is tied already stays as it is.

    Raises:
        ValueError: the stack has nothing to tie, or its layers differ.
    """
    if not hasattr(layers, "sharing"):
        sharing = get_sharing(args, stack)
        share_layers(layers, sharing.assignment, sharing.parts)
        register_checkpoint_hooks(layers)


def format_stack(stack: str, strategy: str, layers) -> str:
    """Return the line that shows a stack: N, M, strategy, picture and the parameters saved."""
    sharing = layers.sharing
    if not sharing.shares:
        return f"{stack}: {sharing.depth}, each with its own parameters"
    return f"{stack}: {sharing.depth} ({strategy}): {sharing}; {count_saved(layers):,} parameters saved"
