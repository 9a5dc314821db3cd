"""What the tests share: the plugin loaded as a user loads it, tiny models, real text, and fairseq's own commands."""

import argparse
import lzma
import signal
import sys
from pathlib import Path

import pytest
import torch
from commands import Command
from fairseq import options, utils
from fairseq.data import Dictionary
from fairseq.models import build_model
from fairseq.tasks.translation import TranslationTask

REPOSITORY = Path(__file__).resolve().parent.parent
PLUGIN = REPOSITORY / "fairseq_sharing"
CORPUS = REPOSITORY / "examples" / "translation" / "data"

sys.path.append(str(REPOSITORY / "scripts"))
utils.import_user_module(argparse.Namespace(user_dir=str(PLUGIN)))
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def whoever_stops_the_tests_stops_them():
    """The scripts that prepare data, called in this process, put a handler of their own in its place."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


TINY = [
    *("--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "32"),
    *("--encoder-attention-heads", "2", "--decoder-attention-heads", "2"),
]
FOUR_FROM_TWO = [
    *("--encoder-layers", "4", "--decoder-layers", "4"),
    *("--encoder-unique-layers", "2", "--decoder-unique-layers", "2"),
]
STRATEGY_ARCHS = ["transformer_shared_sequence", "transformer_shared_cycle", "transformer_shared_cycle_rev"]
# Every kind of architecture, small: name and flags.
TINY_ARCHS = [
    *((arch, [*TINY, *FOUR_FROM_TWO]) for arch in STRATEGY_ARCHS),
    ("transformer_shared_universal", [*TINY, "--encoder-layers", "3", "--decoder-layers", "3"]),
]


def build_dictionary(size: int = 40) -> Dictionary:
    dictionary = Dictionary()
    for number in range(size - len(dictionary)):
        dictionary.add_symbol(f"s{number}")
    return dictionary


def parse(arch: str, *flags: str) -> argparse.Namespace:
    """Parse as fairseq-train does; the architecture function runs."""
    return options.parse_args_and_arch(options.get_training_parser(), ["", "--arch", arch, *flags])


def build(arch: str, *flags: str, seed: int = 1, vocabulary: int = 40):
    """Build a translation model as fairseq-train does, in evaluation mode."""
    args = parse(arch, *flags)
    torch.manual_seed(seed)
    dictionary = build_dictionary(vocabulary)
    model = build_model(args, TranslationTask(args, dictionary, dictionary))
    return model.eval()


def random_batch(sentences: int = 3, length: int = 7, vocabulary: int = 40, seed: int = 0) -> dict:
    """Return a padded batch in the form of the models' keyword arguments."""
    generator = torch.Generator().manual_seed(seed)
    pad, eos = 1, 2
    source = torch.randint(4, vocabulary, (sentences, length), generator=generator)
    target = torch.randint(4, vocabulary, (sentences, length), generator=generator)
    source[:, -1], target[:, 0] = eos, eos
    source[0, :2] = pad  # fairseq pads sources on the left
    lengths = source.ne(pad).sum(1)
    return {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": target}


def read_corpus(split: str, language: str) -> list[str]:
    """Return the lines of a file of the shipped corpus."""
    with lzma.open(CORPUS / f"{split}.{language}.xz", "rt", encoding="utf-8", newline="\n") as file:
        return file.read().rstrip("\n").split("\n")


def short_pairs(count: int, most_words: int = 12) -> list[tuple[str, str]]:
    """Return the first real sentence pairs of at most so many words a side."""
    pairs = zip(read_corpus("train", "en"), read_corpus("train", "de"), strict=True)
    short = [pair for pair in pairs if all(2 < len(side.split()) <= most_words for side in pair)]
    return short[:count]


def run(command: list, check: bool = True, **options) -> str:
    """Run one of the environment's commands; return standard output, then standard error.

    ``options`` are those of :class:`Command`: folder, environment, limits.
    """
    status, out, err = Command(command, **options).wait()
    output = f"{out}\n{err}"
    if check and status != 0:
        raise AssertionError(f"{' '.join(map(str, command))} exited with {status}:\n{output[-6000:]}")
    if not check and status == 0:
        raise AssertionError(f"{' '.join(map(str, command))} should have failed:\n{output[-6000:]}")
    return output


def train_command(data, save_dir, arch: str, *flags) -> list:
    """Return a small fairseq-train command on the CPU."""
    return [
        *("fairseq-train", data, "--user-dir", PLUGIN, "--save-dir", save_dir, "--arch", arch, "--cpu"),
        *("--share-all-embeddings", "--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--lr", "3e-3"),
        *("--lr-scheduler", "inverse_sqrt", "--warmup-updates", "20", "--criterion", "label_smoothed_cross_entropy"),
        *("--label-smoothing", "0.1", "--max-tokens", "1200", "--no-progress-bar", "--log-interval", "5"),
        *("--num-workers", "0", "--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "128"),
        *("--encoder-attention-heads", "4", "--decoder-attention-heads", "4", *flags),
    ]


def write_text(folder: Path, **splits: list[tuple[str, str]]) -> None:
    for split, pairs in splits.items():
        for side, language in enumerate(("en", "de")):
            (folder / f"{split}.{language}").write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf-8")


def binarise(folder: Path, vocabulary: int = 400) -> Path:
    """Train SentencePiece on folder/train, encode all splits and run fairseq-preprocess."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        input=f"{folder}/train.en,{folder}/train.de",
        model_prefix=str(folder / "spm"),
        vocab_size=vocabulary,
        hard_vocab_limit=False,
        character_coverage=1.0,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    for split in ("train", "valid", "test"):
        for language in ("en", "de"):
            lines = (folder / f"{split}.{language}").read_text(encoding="utf-8").splitlines()
            pieces = [" ".join(processor.encode(line, out_type=str)) for line in lines]
            (folder / f"{split}.spm.{language}").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    prefixes = [
        argument for split in ("train", "valid", "test") for argument in (f"--{split}pref", folder / f"{split}.spm")
    ]
    run(
        [
            *("fairseq-preprocess", "--source-lang", "en", "--target-lang", "de", "--joined-dictionary"),
            *(*prefixes, "--destdir", folder / "bin"),
        ]
    )
    return folder / "bin"


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """A few hundred real sentence pairs, binarised."""
    folder = tmp_path_factory.mktemp("text")
    pairs = short_pairs(460)
    write_text(folder, train=pairs[:400], valid=pairs[400:430], test=pairs[430:460])
    return binarise(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The tiny models of scripts/check_gpu.py and their data, for runs on the CPU."""
    import training

    folder = tmp_path_factory.mktemp("tiny")
    training.check_gpu.prepare(folder, training.run)
    return training.check_gpu.Session(folder, cpu=True, gpus=0, run=training.run)
