"""One small model of each family, data for it, and fairseq's commands on it in this process.

The commands' own entry points run, from the parsed command line on, so what they do with a checkpoint is what a shell
would see; only the process is shared, and what fairseq keeps in it between runs is forgotten.
"""

import contextlib
import io
import logging
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PLUGIN, short_pairs
from fairseq import checkpoint_utils, options, tasks
from fairseq.data import Dictionary, indexed_dataset
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer
from fairseq_cli import eval_lm, generate, train, validate

BINS = 16  # of the filterbanks


@dataclass(frozen=True)
class Family:
    """A shared model, the stock model of the same tensors, and what fairseq's commands are told about them.

    Attributes:
        arch: a shared architecture that follows ``strategy``.
        strategy: the strategy of that architecture.
        stock: fairseq's own architecture that computes the same without sharing, and its flags.
        alike: flags with which the shared architecture does.
        task: flags of task and criterion.
        sizes: flags of both; N = 4 in every stack.
        stacks: for each stack, where the model keeps its layers.
    """

    arch: str
    strategy: str
    stock: tuple[str, ...]
    alike: tuple[str, ...]
    task: tuple[str, ...]
    sizes: tuple[str, ...]
    stacks: dict[str, str] = field(hash=False)

    def sets(self, number: int) -> list[str]:
        """Return the flags of M in every stack."""
        return [word for stack in self.stacks for word in (f"--{stack}-unique-layers", str(number))]

    def sharing(self, strategy: str) -> list[str]:
        """Return the flags of a strategy in every stack."""
        return [word for stack in self.stacks for word in (f"--{stack}-sharing", strategy)]


WIDTHS = {
    stack: (f"--{stack}-embed-dim", "16", f"--{stack}-ffn-embed-dim", "32", f"--{stack}-attention-heads", "2")
    for stack in ("encoder", "decoder")
}
DEPTHS = ("--encoder-layers", "4", "--decoder-layers", "4")
FAMILIES = {
    "translation": Family(
        arch="transformer_shared_cycle_rev",
        strategy="cycle_rev",
        stock=("transformer",),
        alike=(),
        task=("--task", "translation", "--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1"),
        sizes=(*WIDTHS["encoder"], *WIDTHS["decoder"], *DEPTHS, "--share-all-embeddings"),
        stacks={"encoder": "encoder.layers", "decoder": "decoder.layers"},
    ),
    "language model": Family(
        arch="transformer_lm_shared_cycle",
        strategy="cycle",
        stock=(
            "transformer_lm",
            "--decoder-normalize-before",
            "--decoder-input-dim",
            "16",
            "--decoder-output-dim",
            "16",
        ),
        alike=(),
        task=("--task", "language_modeling", "--criterion", "cross_entropy", "--tokens-per-sample", "16"),
        sizes=(*WIDTHS["decoder"], "--decoder-layers", "4", "--share-decoder-input-output-embed"),
        stacks={"decoder": "decoder.layers"},
    ),
    "speech": Family(
        arch="s2t_transformer_shared_sequence",
        strategy="sequence",
        stock=("s2t_transformer",),
        alike=(),
        task=("--task", "speech_to_text", "--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1"),
        sizes=(*WIDTHS["encoder"], *WIDTHS["decoder"], *DEPTHS, "--conv-channels", "16", "--conv-kernel-sizes", "3,3"),
        stacks={"encoder": "encoder.transformer_layers", "decoder": "decoder.layers"},
    ),
    "masked language model": Family(
        arch="albert_encoder",
        strategy="sequence",
        stock=("roberta",),
        alike=("--factorized-embed-dim", "16", "--layernorm-eps", "1e-5", "--activation-fn", "gelu"),
        task=("--task", "masked_lm", "--criterion", "masked_lm", "--tokens-per-sample", "16"),
        sizes=(*WIDTHS["encoder"], "--encoder-layers", "4", "--max-positions", "20"),
        stacks={"encoder": "encoder.sentence_encoder.layers"},
    ),
}
EVERY_FAMILY = pytest.mark.parametrize("name", FAMILIES)


# --- data ---


def write_indexed(prefix: Path, dictionary: Dictionary, lines: list[str]) -> None:
    """Write lines as fairseq-preprocess does."""
    builder = indexed_dataset.make_builder(f"{prefix}.bin", impl="mmap", vocab_size=len(dictionary))
    for line in lines:
        builder.add_item(dictionary.encode_line(line, add_if_not_exist=False))
    builder.finalize(f"{prefix}.idx")


def make_data(folder: Path, sentences: int = 60, symbols: int = 40) -> dict[str, Path]:
    """Make small data for each family: real sentences of which the most frequent words are known; noise as speech.

    Args:
        folder: where to put it.
        sentences: in the training part; the others have eight.
        symbols: about how many the dictionary holds.

    Returns:
        A data folder for each name in `FAMILIES`.
    """
    folders = {name: folder / name.split()[0] for name in FAMILIES}
    for each in folders.values():
        each.mkdir(parents=True)
    pairs = [tuple(side.lower() for side in pair) for pair in short_pairs(sentences + 16, most_words=8)]
    dictionary = Dictionary()
    for word, _ in Counter(word for pair in pairs for side in pair for word in side.split()).most_common(symbols):
        dictionary.add_symbol(word)
    parts = {"train": pairs[16:], "valid": pairs[:8], "test": pairs[8:16]}
    for part, chosen in parts.items():
        for side, language in enumerate(("en", "de")):
            lines = [pair[side] for pair in chosen]
            write_indexed(folders["translation"] / f"{part}.en-de.{language}", dictionary, lines)
            dictionary.save(str(folders["translation"] / f"dict.{language}.txt"))
        for name in ("language model", "masked language model"):
            write_indexed(folders[name] / part, dictionary, [pair[0] for pair in chosen])
            dictionary.save(str(folders[name] / "dict.txt"))
        rows = ["id\taudio\tn_frames\ttgt_text\tspeaker"]
        for number, pair in enumerate(chosen):
            frames = 12 + 3 * len(pair[1].split())
            clip = folders["speech"] / f"clip-{part}{number}.npy"
            np.save(clip, np.random.default_rng(number).standard_normal((frames, BINS)).astype(np.float32))
            rows.append(f"{part}{number}\t{clip}\t{frames}\t{pair[1]}\tx")
        (folders["speech"] / f"{part}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    dictionary.save(str(folders["speech"] / "dict.txt"))
    (folders["speech"] / "config.yaml").write_text(
        f"vocab_filename: dict.txt\ninput_feat_per_channel: {BINS}\ninput_channels: 1\n"
        "transforms: {_train: [specaugment]}\n"
        "specaugment: {freq_mask_F: 6, freq_mask_N: 1, time_mask_T: 8, time_mask_N: 2, time_mask_p: 1.0}\n",
        encoding="utf-8",
    )
    return folders


# --- fairseq's commands ---


def train_words(family: Family, data: Path, save_dir: Path, *flags, stock: bool = False) -> list[str]:
    """Return the arguments of fairseq-train; ``flags`` come last and so win."""
    arch = family.stock if stock else (family.arch, *family.alike)
    words = [
        *(data, "--user-dir", PLUGIN, "--save-dir", save_dir, "--cpu", *family.task, "--arch", *arch),
        *(*family.sizes, "--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--lr", "0.01"),
        *("--lr-scheduler", "inverse_sqrt", "--warmup-updates", "4", "--batch-size", "8", "--num-workers", "0"),
        *("--no-progress-bar", "--log-interval", "1000", "--max-update", "2", *flags),
    ]
    return [str(word) for word in words]


def configure(family: Family, data: Path, save_dir: Path, *flags, stock: bool = False):
    """Return the configuration of fairseq-train."""
    words = train_words(family, data, save_dir, *flags, stock=stock)
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), words))


def forget_earlier_runs() -> None:
    """Remove what fairseq-train keeps in its functions until its process ends."""
    for function in (checkpoint_utils.save_checkpoint, train.should_stop_early):
        for name in ("best", "num_runs"):
            if hasattr(function, name):
                delattr(function, name)


def run_train(config) -> None:
    """Run fairseq-train."""
    forget_earlier_runs()
    train.main(config)


def build_trainer(config, seed: int = 1) -> Trainer:
    """Build model and trainer as fairseq-train does before it looks for a checkpoint."""
    task = tasks.setup_task(config.task)
    torch.manual_seed(seed)
    return Trainer(config, task, task.build_model(config.model), task.build_criterion(config.criterion))


def run_command(command: str, *words) -> str:
    """Run fairseq-generate, fairseq-eval-lm or fairseq-validate; return what it prints and what it hands back."""
    parsers = {
        "generate": (options.get_generation_parser, generate.main),
        "eval-lm": (options.get_eval_lm_parser, eval_lm.main),
        "validate": (options.get_validation_parser, validate.main),
    }
    get_parser, main = parsers[command]
    words = [str(word) for word in (*words, "--user-dir", PLUGIN, "--cpu", "--num-workers", 0)]
    handlers = logging.root.handlers[:]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        config = convert_namespace_to_omegaconf(options.parse_args_and_arch(get_parser(), words))
        try:
            if command == "validate":  # which takes its overrides from what was typed
                result = main(config, options.parse_args_and_arch(get_parser(), words, suppress_defaults=True))
            else:
                result = main(config)
        finally:
            logging.root.handlers[:] = handlers  # fairseq-validate puts its own there
    return f"{printed.getvalue()}{result}"


def evaluate(name: str, data, path, *flags, ensemble: bool = False) -> dict[str, list[float]]:
    """Run the commands that read a checkpoint of this family; return what each computes: scores or losses."""
    flags = [data, "--path", path, "--max-tokens", 1000, *flags]
    generation = [*flags, "--gen-subset", "test", "--beam", 2, "--max-len-b", 6, *FAMILIES[name].task[:2]]
    commands = {"validate": [*flags, *FAMILIES[name].task[:2], "--valid-subset", "valid"], "generate": generation}
    if name == "language model":
        commands["generate"] += ["--sample-break-mode", "eos"]
        commands["eval-lm"] = [*flags, "--tokens-per-sample", 16]
    if ensemble:  # the other commands take one model
        commands = {"generate": generation}
    if name == "masked language model":
        commands.pop("generate")
    return {command: numbers(command, run_command(command, *words)) for command, words in commands.items()}


def numbers(command: str, output: str) -> list[float]:
    """Return the scores of each sentence and its symbols, or the losses."""
    wanted = {"generate": r"^[HP]-.*", "eval-lm": r"'loss': .*", "validate": r"subset \| loss [^|]*"}[command]
    found = [
        number
        for line in re.findall(wanted, output, re.MULTILINE)
        for number in re.findall(r"-?\d+\.\d+(?:e-\d+)?", line)
    ]
    assert found, output
    return [float(number) for number in found]


def load_whole(path) -> dict:
    """Return all of a checkpoint as fairseq wrote it."""
    return torch.load(path, weights_only=True)
