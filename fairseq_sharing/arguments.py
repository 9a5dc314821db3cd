"""From fairseq's arguments, typed or from YAML or from a checkpoint, to an assignment.

An architecture names its strategy and M as presets; what the user types comes first. `resolve_sharing` runs inside
the architecture function, that is while fairseq parses the command line and before it makes --save-dir, and again
whenever a model is rebuilt from its checkpoint: it leaves its result in the arguments and is idempotent.
"""

import logging
from argparse import Namespace

from omegaconf import DictConfig, OmegaConf

from .refusals import as_text, check_neighbours, check_precision, check_training, refuse
from .sharing import ALL_PARTS, Sharing
from .strategies import build_assignment, parse_assignment, picture

logger = logging.getLogger(__name__)


def as_namespace(args) -> Namespace:
    """Return the arguments as a flat Namespace; fairseq-hydra-train gives legacy models a DictConfig."""
    return Namespace(**OmegaConf.to_container(args, resolve=True)) if isinstance(args, DictConfig) else args


def whole_configuration(cfg) -> DictConfig:
    """Return what a command line would show an architecture of fairseq's configuration, in one level.

    Args:
        cfg: fairseq's configuration; its ``model`` came from YAML or from a dataclass.
    """
    whole = OmegaConf.create({}, flags={"allow_objects": True})
    for part in (cfg.common, cfg.distributed_training, cfg.optimization, cfg.model):
        whole.update(OmegaConf.to_container(part, resolve=True, enum_to_str=True))
    whole.pop("_name")  # by which architectures know a model that is rebuilt
    whole.task = cfg.task._name
    if "tokens_per_sample" not in whole:
        whole.tokens_per_sample = getattr(cfg.task, "tokens_per_sample", None)
    return whole


def resolve_sharing(args, stack: str, strategy: str, num_unique: int) -> None:
    """Check the flags of one stack and leave strategy, M and parts in ``args``.

    What is left describes the model completely: strategy and M, or an assignment with its M and no strategy.

    Args:
        args: arguments after the architecture's other defaults (``{stack}_layers`` is there).
        stack: ``encoder`` or ``decoder``.
        strategy: the architecture's strategy, used when none was given.
        num_unique: the architecture's M, used when none was given.

    Raises:
        ValueError: the flags contradict each other or cannot be right together with sharing.
    """
    num_layers = getattr(args, f"{stack}_layers")
    given = {name: getattr(args, f"{stack}_{name}", None) for name in ("sharing", "unique_layers", "assignment")}
    unique = given["unique_layers"]
    given["assignment"] = as_text(given["assignment"])
    if isinstance(args, DictConfig):
        # A structured configuration holds the architecture's presets as if they had been given.
        given["sharing"] = None if given["sharing"] is None else str(given["sharing"])
        if given["assignment"] is not None and given["sharing"] == strategy:
            given["sharing"] = None
        if unique == num_unique and (given["assignment"] is not None or given["sharing"] == "none"):
            given["unique_layers"] = unique = None
    args.sharing_parts = ",".join(parse_parts(getattr(args, "sharing_parts", None)))

    if given["assignment"] is not None:
        assignment = check_assignment(stack, num_layers, **given)
        given["sharing"], unique = None, len(set(assignment))
    else:
        given["sharing"] = given["sharing"] or strategy
        if given["sharing"] == "none":
            if unique not in (None, num_layers):
                refuse(
                    f"--{stack}-unique-layers {unique} contradicts --{stack}-sharing none, "
                    f"which gives each of --{stack}-layers {num_layers} its own parameters"
                )
            unique = None
        else:
            preset = unique is None
            unique = num_unique if preset else unique
            flag = f"--{stack}-unique-layers {unique}{' (the default of this architecture)' if preset else ''}"
            if not 1 <= unique <= num_layers:
                refuse(f"{flag} must be between 1 and --{stack}-layers {num_layers}")
            if unique == num_layers and num_layers > 1:
                logger.warning(f"{flag} equals --{stack}-layers {num_layers}: nothing is shared in the {stack}")
    setattr(args, f"{stack}_sharing", given["sharing"])
    setattr(args, f"{stack}_unique_layers", unique)
    setattr(args, f"{stack}_assignment", given["assignment"])
    parsing = not hasattr(args, "_name")  # a checkpoint is loaded on another machine than it was trained on
    if parsing:
        check_precision(args)
    sharing = get_sharing(args, stack)
    if sharing.shares:
        check_neighbours(args, stack, sharing)
        if parsing:
            check_training(args, stack, sharing)
    else:  # nothing is shared, whatever it was called
        setattr(args, f"{stack}_sharing", "none")
        setattr(args, f"{stack}_unique_layers", None)
        setattr(args, f"{stack}_assignment", None)


def resolve_residual_scaling(args, *stacks: str) -> None:
    """Leave how residual connections are scaled in ``args``.

    Raises:
        ValueError: a stack is Pre-LN.
    """
    args.residual_scaling = method = str(getattr(args, "residual_scaling", "none"))
    for stack in stacks:
        if method != "none" and getattr(args, f"{stack}_normalize_before", False):
            refuse(
                f"--residual-scaling {method} is for Post-LN layers and cannot be combined with "
                f"--{stack}-normalize-before"
            )


def check_assignment(
    stack: str, num_layers: int, sharing: str | None, unique_layers: int | None, assignment: str
) -> list[int]:
    """Read ``--{stack}-assignment`` and hold it against the other flags of the stack."""
    flag = f"--{stack}-assignment {assignment}"
    try:
        numbers = parse_assignment(assignment)
    except ValueError as error:
        refuse(f"--{stack}-assignment {error}")
    if len(numbers) != num_layers:
        refuse(f"{flag} has {len(numbers)} entries and must have one for each of --{stack}-layers {num_layers}")
    num_unique = len(set(numbers))
    if unique_layers not in (None, num_unique):
        refuse(f"{flag} uses {num_unique} parameter sets, which contradicts --{stack}-unique-layers {unique_layers}")
    if sharing is not None:
        expected = list(range(num_layers)) if sharing == "none" else build_assignment(sharing, num_layers, num_unique)
        if Sharing(tuple(expected)).owners != Sharing(tuple(numbers)).owners:
            refuse(f"{flag} contradicts --{stack}-sharing {sharing}, which is {picture(expected)}")
    return numbers


def parse_parts(text: str | None) -> list[str]:
    """Read ``--sharing-parts``: the parts in their fixed order."""
    parts = [part.strip() for part in (as_text(text) if text is not None else ",".join(ALL_PARTS)).split(",")]
    unknown = [part for part in parts if part not in ALL_PARTS]
    if unknown:
        refuse(f"--sharing-parts {text}: {unknown[0]!r} is none of {', '.join(ALL_PARTS)}")
    return [part for part in ALL_PARTS if part in parts]


def get_sharing(args, stack: str) -> Sharing:
    """Return the sharing of a stack from arguments that went through `resolve_sharing`."""
    num_layers = getattr(args, f"{stack}_layers")
    if getattr(args, f"{stack}_assignment") is not None:
        assignment = parse_assignment(getattr(args, f"{stack}_assignment"))
    elif getattr(args, f"{stack}_sharing") == "none":
        assignment = list(range(num_layers))
    else:
        assignment = build_assignment(
            getattr(args, f"{stack}_sharing"), num_layers, getattr(args, f"{stack}_unique_layers")
        )
    return Sharing(tuple(assignment), tuple(parse_parts(args.sharing_parts)))
