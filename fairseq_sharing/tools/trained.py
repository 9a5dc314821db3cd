"""A trained model from its checkpoint alone: what the exporters read."""

from argparse import Namespace
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from fairseq.data import Dictionary
from fairseq.data.data_utils import infer_language_pair
from fairseq.models import build_model
from fairseq.models.roberta import RobertaModel
from fairseq.models.speech_to_text import S2TTransformerModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from omegaconf import DictConfig, OmegaConf
from torch import nn

from ..options import (
    FactorizedEmbeddingConfig,
    LayerNormConfig,
    ResidualScalingConfig,
    SharingPartsConfig,
    StackSharingConfig,
)
from .convert import expand
from .files import load_checkpoint
from .model import architecture_of, filler_dictionary, read_checkpoint, stacks_of

SENTENCEPIECE = "sentencepiece.bpe.model"  # the name under which fairseq's hub looks for it
FAMILIES = {
    "translation": TransformerModel,
    "language": TransformerLanguageModel,
    "speech": S2TTransformerModel,
    "masked language": RobertaModel,
}
# The arguments that this plugin adds to fairseq's.
OURS = {
    *(f"{stack}_{each.name}" for stack in ("encoder", "decoder") for each in fields(StackSharingConfig)),
    *(
        each.name
        for config in (SharingPartsConfig, FactorizedEmbeddingConfig, LayerNormConfig, ResidualScalingConfig)
        for each in fields(config)
    ),
} - {"_name", "encoder__name", "decoder__name"}


@dataclass
class Trained:
    """A checkpoint and its model, in evaluation mode on the CPU.

    Attributes:
        path: where it was read.
        state: the checkpoint as saved.
        arch: name of its architecture.
        config: the model's arguments.
        sizes: symbols in the source and in the target dictionary.
        model: the model with the checkpoint's weights.
        languages: source_lang and target_lang, where only the data tell them.
    """

    path: str
    state: dict
    arch: str
    config: Namespace
    sizes: tuple[int, int]
    model: nn.Module
    languages: dict = field(default_factory=dict)

    @property
    def family(self) -> str:
        return next(name for name, model in FAMILIES.items() if isinstance(self.model, model))

    @property
    def task(self) -> dict:
        """The arguments of its task."""
        return {**as_plain((self.state.get("cfg") or {}).get("task") or self.state.get("args") or {}), **self.languages}

    def plain_state(self) -> dict:
        """Return the weights under every name that the model without sharing has; borrowed ones stay one tensor."""
        return expand(self.model.state_dict(), self.model)

    def sharings(self) -> dict:
        """Return the sharing of each stack that this plugin built."""
        return {name: layers.sharing for name, layers in stacks_of(self.model).items() if hasattr(layers, "sharing")}


def load_trained(path: str) -> Trained:
    """Read a checkpoint and build its model; neither data nor dictionaries are needed.

    Raises:
        ValueError: the file is no checkpoint of a family of this plugin, or contradicts itself.
    """
    subject = read_checkpoint(path)  # refuses what is no model of ours, before building in earnest
    arch, sizes = architecture_of(subject.config), subject.sizes
    state = load_checkpoint(path)
    config = state["cfg"]["model"] if state.get("cfg") else state["args"]
    values = config if isinstance(config, dict) else vars(config)
    if any(key.startswith("classification_heads.") for key in state["model"]):  # which is part of what was trained
        values = {**values, "load_checkpoint_heads": True}
    config = OmegaConf.create({"model": values}).model if isinstance(config, dict) else Namespace(**values)
    source = filler_dictionary(sizes[0])
    target = source if sizes[0] == sizes[1] else filler_dictionary(sizes[1])
    model = build_model(config, SimpleNamespace(source_dictionary=source, target_dictionary=target), True).eval()
    try:
        model.load_state_dict(dict(state["model"]), model_cfg=config)
    except RuntimeError as error:
        reason = first_mismatch(error)
        raise ValueError(f"{path} does not hold the weights that its configuration says: {reason}") from None
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return Trained(path, state, arch, Namespace(**as_plain(config)), tuple(sizes), model)


def first_mismatch(error: RuntimeError) -> str:
    """Return the first of the names that torch lists when weights do not fit a model."""
    lines = str(error).split("\n\t")
    return lines[min(1, len(lines) - 1)].split(",")[0].split("\n")[0]


def as_checkpoint(cfg: dict | None, model: dict, history: list | None = None, args=None) -> dict:
    """Return what fairseq's trainer writes, at the start of training and without an optimizer's state."""
    return {
        "args": args,
        "cfg": cfg,
        "model": model,
        "optimizer_history": history or [{"num_updates": 0, "best_loss": None}],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}},
        "last_optimizer_state": None,
    }


def as_plain(value):
    """Return a configuration of dictionaries, lists, text and numbers, which any torch loads and JSON can hold."""
    if isinstance(value, DictConfig):
        value = OmegaConf.to_container(value, resolve=True, enum_to_str=True)
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, dict):
        return {key: as_plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(entry) for entry in value]
    if isinstance(value, Enum):
        return value.value
    return value.item() if isinstance(value, np.generic) else value


def find_data(trained: Trained, given: str | None) -> Path | None:
    """Return the folder with the dictionaries: --data, or the one that the model was trained with if it is there.

    Raises:
        ValueError: --data is no folder.
    """
    if given is not None:
        if not Path(given).is_dir():
            raise ValueError(f"--data {given}: there is no such folder")
        return Path(given)
    recorded = trained.task.get("data")
    if recorded == ".":  # of `import` and `export`, which put the dictionaries beside the model if they have them
        folder = Path(trained.path).parent
        return folder if any(folder.glob("dict*.txt")) or (folder / "input0" / "dict.txt").is_file() else None
    folder = Path(str(recorded).split(":")[0]) if recorded else None
    return folder if folder and folder.is_dir() else None


def dictionary_files(trained: Trained, data: Path | None) -> dict[str, Path]:
    """Return the dictionaries of source and target, or none without data.

    Raises:
        ValueError: one is missing, or has another number of symbols than the model.
    """
    if data is None:
        return {}
    if trained.family == "translation":
        find_languages(trained, data)
        names = [f"dict.{trained.task.get(f'{side}_lang')}.txt" for side in ("source", "target")]
    elif trained.family == "speech":
        names = [speech_settings(trained, data).get("vocab_filename", "dict.txt")] * 2
    elif (data / "input0" / "dict.txt").is_file():
        names = ["input0/dict.txt"] * 2
    else:
        names = ["dict.txt"] * 2
    files = {side: data / name for side, name in zip(("source", "target"), names, strict=True)}
    for file, size in zip(files.values(), trained.sizes, strict=True):
        if not file.is_file():
            raise ValueError(f"--data {data} has no dictionary {file.relative_to(data)}")
        found = len(load_dictionary(file, mask=trained.family == "masked language"))
        if found != size:
            raise ValueError(f"{file} has {found} symbols, but {trained.path} was trained with {size}")
    return files


def find_languages(trained: Trained, data: Path) -> None:
    """Learn the languages from the data, as fairseq-train does, where they were not given to it.

    Raises:
        ValueError: neither tells them.
    """
    if trained.task.get("source_lang") is None or trained.task.get("target_lang") is None:
        source, target = infer_language_pair(str(data))
        if source is None:
            raise ValueError(
                f"{trained.path} does not say its languages, nor does --data {data}, without a file such as "
                "test.en-de.en.idx"
            )
        trained.languages = {"source_lang": source, "target_lang": target}


def speech_settings(trained: Trained, data: Path) -> dict:
    """Return fairseq's description of the speech data.

    Raises:
        ValueError: it is not there or cannot be read.
    """
    import yaml

    file = data / (trained.task.get("config_yaml") or "config.yaml")
    try:
        settings = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError):
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"--data {data} has no readable {file.name}")
    return settings


def load_dictionary(file: Path, mask: bool = False) -> Dictionary:
    """Read a dictionary as fairseq's tasks do, ``<mask>`` included where they add it.

    Raises:
        ValueError: the file is none.
    """
    try:
        dictionary = Dictionary.load(str(file))
    except (ValueError, RuntimeError, UnicodeError) as error:
        raise ValueError(f"{file} is no dictionary of fairseq: {str(error).splitlines()[0]}") from None
    if mask:
        dictionary.add_symbol("<mask>")
    return dictionary


def check_sentencepiece(path: str | None, dictionaries: dict[str, Path]):
    """Hold a SentencePiece model against the dictionaries.

    Returns:
        The model, or None without a path.

    Raises:
        ValueError: there is no such model, or most of a dictionary's symbols are none of its pieces.
    """
    if path is None:
        return None
    import sentencepiece

    if not Path(path).is_file():
        raise ValueError(f"--sentencepiece-model {path}: there is no such file")
    try:
        model = sentencepiece.SentencePieceProcessor(model_file=path)
    except (RuntimeError, OSError):
        raise ValueError(f"--sentencepiece-model {path} is no SentencePiece model") from None
    pieces = {model.id_to_piece(number) for number in range(len(model))}
    for file in set(dictionaries.values()):
        symbols = load_dictionary(file).symbols[4:]
        strangers = [symbol for symbol in symbols if symbol not in pieces and not symbol.startswith("madeupword")]
        strangers = [symbol for symbol in strangers if symbol != "<mask>"]
        if 2 * len(strangers) > len(symbols):
            raise ValueError(
                f"--sentencepiece-model {path} does not belong to {file}: "
                f"{strangers[0]!r} and {len(strangers) - 1} more of its {len(symbols)} symbols are none of its pieces"
            )
    return model
