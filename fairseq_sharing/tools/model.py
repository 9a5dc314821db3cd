"""From an architecture's flags, or from a checkpoint, to a model of which nothing but its shapes and ties is real.

fairseq's own Transformers of the same four families can be had the same way, so that they can be compared.
"""

import contextlib
import copy
import os
import re
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.roberta import RobertaModel
from fairseq.models.speech_to_text import S2TTransformerModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from torch._subclasses.fake_tensor import FakeTensorMode

from ..checkpoint import RECORD, decode_sharing
from ..sharing import Sharing
from .files import load_checkpoint

CANNOT_SHOW = (
    "only Transformers for translation, language modelling, speech to text and masked language modelling can be shown"
)
# fairseq's model class of each family -> its task and the flags that stand for the data, which may be missing.
FAMILIES = {
    TransformerLanguageModel: ["--task", "language_modeling"],
    S2TTransformerModel: ["--task", "speech_to_text"],
    RobertaModel: ["--task", "masked_lm", "--tokens-per-sample", "512"],
    TransformerModel: ["--task", "translation"],
}
# Options that name files which a model is built from, and which its checkpoint takes the place of.
STARTED_FROM = (
    *("encoder_embed_path", "decoder_embed_path", "load_pretrained_encoder_from", "load_pretrained_decoder_from"),
)
DEFAULT_VOCABULARY = 32768  # the paper's


@dataclass
class Subject:
    """A model to be looked at.

    Attributes:
        name: what to call it.
        model: fairseq's model, of fake tensors.
        config: the model's configuration.
        sizes: symbols in the dictionaries of the source and the target.
        path: the checkpoint that it comes from, or None.
    """

    name: str
    model: torch.nn.Module
    config: object
    sizes: tuple[int, int]
    path: str | None = None


def family_flags(arch: str | None) -> list[str] | None:
    """Return the flags that choose the task of an architecture's family; None where it belongs to none of the four."""
    model = ARCH_MODEL_REGISTRY.get(arch, type)
    return next((flags for family, flags in FAMILIES.items() if issubclass(model, family)), None)


@contextlib.contextmanager
def alone():
    """Hide for a while that torchrun or a cluster has started several processes."""
    processes = os.environ.pop("WORLD_SIZE", None)
    try:
        yield
    finally:
        if processes is not None:
            os.environ["WORLD_SIZE"] = processes


def parse_training(arch: str, flags: list[str], data: str | None = None):
    """Return the whole configuration that fairseq-train would train with.

    Args:
        arch: the architecture's name.
        flags: flags of fairseq-train.
        data: the data folder; without one the task is only named.

    Raises:
        ValueError: there is no such architecture, or the flags contradict each other.
    """
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    if arch not in ARCH_MODEL_REGISTRY:
        known = ", ".join(sorted(name for name, model in ARCH_MODEL_REGISTRY.items() if hasattr(model, "STACKS")))
        raise ValueError(f"--arch {arch} is not known to fairseq or to this plugin, which adds {known}")
    task = family_flags(arch)
    if task is None:
        raise ValueError(f"--arch {arch}: {CANNOT_SHOW}")
    if flags and not flags[0].startswith("-"):
        raise ValueError(
            f"leave out the data folder {flags[0]}, or give it as --data: of fairseq-train's arguments only the flags "
            "are wanted"
        )
    if "masked_lm" in task and any(flag.startswith("--max-positions") for flag in flags):
        task = [*task[:-1], "1"]  # a block may not be longer than the positions, which are given
    if data is None and "translation" in task:
        task = []  # fairseq's default; its architectures look at the data folder when it is named
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hydra's, about its own future
        parser = options.get_training_parser()
        # Nothing trains here: how many processes would is not asked, unless the flags say it.
        arguments = [data or "", *task, "--arch", arch, "--distributed-world-size", "1", *flags]
        with alone():
            args, unknown = options.parse_args_and_arch(parser, arguments, parse_known=True)
        if unknown:
            raise ValueError(f"--arch {arch} has no {unknown[0]} among fairseq-train's flags")
        if "speech_to_text" in task:
            args.input_feat_per_channel = 80  # as the task sets it from the data, fairseq's default
        return convert_namespace_to_omegaconf(args)


def parse_architecture(arch: str, flags: list[str]):
    """Return the model's configuration that fairseq-train would train with; see `parse_training`."""
    return parse_training(arch, flags).model


def filler_dictionary(size: int):
    """Return a dictionary of ``size`` symbols; fairseq's four special ones are among them."""
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    for number in range(size - len(dictionary)):
        dictionary.add_symbol(f"symbol{number}")
    return dictionary


def filler_task(source_size: int, target_size: int) -> SimpleNamespace:
    """Return as much of a task as building a model needs: dictionaries of these sizes."""
    source = filler_dictionary(source_size)
    target = source if source_size == target_size else filler_dictionary(target_size)
    return SimpleNamespace(source_dictionary=source, target_dictionary=target)


def build_fake(config, task):
    """Build the model of fake tensors: shapes and ties, but no numbers and no memory.

    RoBERTa's initialisation copies every tensor to the CPU, which tensors on the meta device refuse.
    """
    from fairseq.models import build_model

    with FakeTensorMode():
        model = build_model(config, task, True).eval()
    vars(model).pop("startup_lines", None)  # nothing trains here, though activations are measured as if it did
    return model


def build_without_memory(config, source_size: int, target_size: int):
    """Build the model of fake tensors for dictionaries of these sizes."""
    return build_fake(config, filler_task(source_size, target_size))


def paths_of(model) -> dict[str, str]:
    """Return where the model keeps the layers of each stack: its STACKS, or what they would be for fairseq's models."""
    paths = getattr(model, "STACKS", None)
    if paths is None:
        encoder = getattr(model, "encoder", None)
        found = next(
            (name for name in ("transformer_layers", "sentence_encoder") if hasattr(encoder, name)), "layers"
        ).replace("sentence_encoder", "sentence_encoder.layers")
        paths = {"encoder": f"encoder.{found}", "decoder": "decoder.layers"}
    return {stack: path for stack, path in paths.items() if hasattr(model, stack)}


def stacks_of(model) -> dict:
    """Return the model's stacks of layers by name."""
    return {stack: model.get_submodule(path) for stack, path in paths_of(model).items()}


def sharing_of(layers) -> Sharing:
    """Return who shares with whom in a stack; fairseq's own share nothing."""
    return getattr(layers, "sharing", None) or Sharing(tuple(range(len(layers))))


def saved_config(state: dict):
    """Return a copy of the model's configuration in a checkpoint, without the files that training started from."""
    from omegaconf import OmegaConf

    config = state["cfg"]["model"] if state.get("cfg") else state.get("args")
    config = OmegaConf.create({"model": config}).model if isinstance(config, dict) else copy.copy(config)
    for name in STARTED_FROM:
        if getattr(config, name, None) is not None:
            setattr(config, name, None)
    return config


def architecture_of(config) -> str | None:
    """Return the architecture's name in a model's configuration."""
    return getattr(config, "_name", None) or getattr(config, "arch", None)


def vocabulary_sizes(model: dict) -> tuple[int, int] | None:
    """Return how many symbols the embeddings of a checkpoint have for source and target; None where there are none."""
    rows = {"encoder": 0, "decoder": 0}
    for key, value in model.items():
        match = re.fullmatch(
            r"(encoder|decoder)(?:\.sentence_encoder)?\.embed_tokens(\.embedding|\.embeddings\.\d+\.0)?\.weight", key
        )
        if match:  # an adaptive input has one embedding for each band of words
            rows[match[1]] += len(value)
    if not any(rows.values()):
        return None
    return rows["encoder"] or rows["decoder"], rows["decoder"] or rows["encoder"]


def check_record(path: str, state: dict, model) -> None:
    """Refuse a checkpoint whose record of sharing is not what its configuration says.

    Raises:
        ValueError: with both assignments.
    """
    for path_of_stack, layers in ((name, model.get_submodule(name)) for name in paths_of(model).values()):
        record = state["model"].get(f"{path_of_stack}.{RECORD}")
        if record is not None and not decode_sharing(record).same_as(sharing_of(layers)):
            raise ValueError(
                f"{path} contradicts itself: {path_of_stack} were saved shared as {decode_sharing(record)}, "
                f"its configuration says {sharing_of(layers)}"
            )


def register_heads(model, state: dict) -> None:
    """Add the classification heads that a checkpoint holds: fairseq's tasks register them after building the model.

    Args:
        model: without them.
        state: the checkpoint's tensors by name.
    """
    for key, bias in state.items():
        match = re.fullmatch(r"classification_heads\.([^.]+)\.out_proj\.bias", key)
        if match:
            width = len(state[f"classification_heads.{match[1]}.dense.bias"])
            model.register_classification_head(match[1], num_classes=len(bias), inner_dim=width)


def inspect_checkpoint(path: str, state: dict, name: str | None = None) -> Subject:
    """Build the model of a loaded checkpoint without memory.

    Raises:
        ValueError: the checkpoint is of no family that can be shown, or its record of sharing is not what its
            configuration says.
    """
    config = saved_config(state)
    arch, sizes = architecture_of(config), vocabulary_sizes(state["model"])
    if family_flags(arch) is None or sizes is None:
        raise ValueError(f"{path} is of architecture {arch}: {CANNOT_SHOW}")
    model = build_without_memory(config, *sizes)
    with FakeTensorMode():
        register_heads(model, state["model"])
    check_record(path, state, model)
    return Subject(name or f"{arch}, from {path}", model, config, sizes, path)


def read_checkpoint(path: str, name: str | None = None) -> Subject:
    """Build the model of a checkpoint without memory; see `inspect_checkpoint`."""
    return inspect_checkpoint(path, load_checkpoint(path), name)


def read_architecture(
    arch: str, flags: list[str], vocab_size: int | None = None, data: str | None = None, name: str | None = None
) -> Subject:
    """Build the model of an architecture without memory.

    Args:
        arch: the architecture's name.
        flags: flags of fairseq-train.
        vocab_size: symbols in each dictionary; the paper's 32,768 when neither this nor ``data`` is given.
        data: a data folder whose dictionaries are taken.
        name: what to call it; the architecture's name by default.

    Raises:
        ValueError: the flags or the sizes cannot be right.
        OSError: the data folder has no dictionary.
    """
    if data is not None:
        from fairseq.tasks import setup_task

        config = parse_training(arch, flags, data)
        task = setup_task(config.task)
        if hasattr(task, "data_cfg"):
            config.model.input_feat_per_channel = task.data_cfg.input_feat_per_channel
        target = task.target_dictionary
        source = task.source_dictionary or target  # speech to text has audio there
        return Subject(name or arch, build_fake(config.model, task), config.model, (len(source), len(target)))
    if vocab_size is not None and vocab_size < 5:
        raise ValueError(f"--vocab-size {vocab_size} must be at least 5: four symbols are fairseq's own")
    sizes = (vocab_size or DEFAULT_VOCABULARY,) * 2
    config = parse_architecture(arch, flags)
    return Subject(name or arch, build_without_memory(config, *sizes), config, sizes)
