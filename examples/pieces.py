"""Text, SentencePiece models and fairseq's binarised data: what the recipes' programs have in common.

Text goes line by line from a file into binarised data: no copy of it in pieces is written, and memory grows with the
number of lines only by the index of what is written, 8 bytes each. Imported by the programs, not run.
"""

import contextlib
import gzip
import itertools
import logging
import lzma
from pathlib import Path

logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)  # it asks for tensorboardX when imported
BATCH = 20_000  # lines to cut at once
OPENERS = {".gz": gzip.open, ".xz": lzma.open}


def clean(line: bytes) -> str | None:
    """Return a sentence on one line, or None where it is empty or not UTF-8."""
    try:
        return " ".join(line.decode("utf-8").split()) or None
    except UnicodeDecodeError:
        return None


def read_text(path: Path):
    """Yield the lines of a text file, which .gz or .xz at its name's end says is compressed, as bytes.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            yield from file
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def train_pieces(out: Path, files: list[Path], size: int, **settings) -> None:
    """Write SentencePiece's model ``spm.model``, and its pieces as fairseq's dictionary ``dict.txt``.

    Args:
        out: folder that is there.
        files: text, as `read_text` reads it.
        size: pieces, among them <unk>, <s> and </s>; fairseq adds <pad>, and <mask> for masked language models.
        settings: further ones of SentencePiece.

    Raises:
        ValueError: the text has too few, or too many, different pieces.
    """
    import sentencepiece

    text = {"input": [str(path) for path in files]}
    if any(path.suffix in OPENERS for path in files):
        text = {"sentence_iterator": filter(None, map(clean, itertools.chain.from_iterable(map(read_text, files))))}
    try:
        sentencepiece.SentencePieceTrainer.train(
            **text,
            model_prefix=str(out / "spm"),
            vocab_size=size,
            shuffle_input_sentence=True,
            minloglevel=1,
            **settings,
        )
    except RuntimeError as error:
        raise ValueError(f"--size {size} does not suit the training text: {error}") from error
    model = sentencepiece.SentencePieceProcessor(model_file=str(out / "spm.model"))
    pieces = [
        model.id_to_piece(number)
        for number in range(len(model))
        if not (model.is_unknown(number) or model.is_control(number))
    ]
    (out / "dict.txt").write_text("".join(f"{piece} 1\n" for piece in pieces), "utf-8", newline="\n")
    print(f"{len(pieces):,} pieces, {len(pieces) + 4:,} symbols with those of fairseq")


class Pieces:
    """What `train_pieces` wrote.

    Attributes:
        dictionary: fairseq's.
    """

    def __init__(self, folder: Path, workers: int):
        import sentencepiece
        from fairseq.data import Dictionary

        self.workers = workers
        self.dictionary = Dictionary.load(str(folder / "dict.txt"))
        self.model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
        self.symbols = [self.dictionary.index(self.model.id_to_piece(number)) for number in range(len(self.model))]

    def encode(self, lines) -> list[list[int]]:
        """Return each line as symbols of the dictionary, with </s> at its end."""
        encoded = self.model.encode(list(lines), num_threads=self.workers)
        return [[*map(self.symbols.__getitem__, numbers), self.dictionary.eos()] for numbers in encoded]


@contextlib.contextmanager
def write_indexed(path: str | Path, symbols: int):
    """Yield a function that appends a list of symbols to ``path.bin``; its index ``path.idx`` is written at the end.

    Args:
        path: where to.
        symbols: how many there are, which decides how many bytes one takes.
    """
    import torch
    from fairseq.data.indexed_dataset import make_builder

    builder = make_builder(f"{path}.bin", "mmap", vocab_size=symbols)
    yield lambda numbers: builder.add_item(torch.tensor(numbers))
    builder.finalize(f"{path}.idx")
