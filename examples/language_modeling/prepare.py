"""Split running text into pieces for a language model, ready for ``fairseq-preprocess --only-source``.

Reads {train,valid,test}.txt or .txt.xz (one paragraph a line), trains SentencePiece on the training part, and writes
spm.model and {train,valid,test}.pieces, one paragraph a line. --out is written beside itself first: it is whole or not
there.

Example:
    python examples/language_modeling/prepare.py --out lm-data
"""

import argparse
import lzma
import shutil
import sys
from pathlib import Path

import sentencepiece

SPLITS = ("train", "valid", "test")


def read_lines(folder: Path, split: str, most: int | None) -> list[str]:
    """Return the first lines of a part, without the empty ones.

    Raises:
        ValueError: there is no such part, it is empty, or it is not UTF-8.
    """
    path = next((path for path in (folder / f"{split}.txt", folder / f"{split}.txt.xz") if path.is_file()), None)
    if path is None:
        raise ValueError(f"--data {folder} holds neither {split}.txt nor {split}.txt.xz")
    try:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8", newline="\n") as file:
            lines = [line for line in file.read().split("\n")[:most] if line.strip()]
    except (UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not lines:
        raise ValueError(f"{path} holds no text")
    return lines


def prepare(data: Path, out: Path, vocab_size: int, most_lines: int | None) -> None:
    """Write the folder ``out``.

    Raises:
        ValueError: ``out`` exists, a part cannot be read, or the vocabulary does not suit the text.
    """
    if out.exists():
        raise ValueError(f"--out {out} exists: remove it or choose another")
    text = {split: read_lines(data, split, most_lines) for split in SPLITS}
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text["train"]),
            model_prefix=str(partial / "spm"),
            vocab_size=vocab_size,
            character_coverage=1.0,
            max_sentence_length=2**20,  # bytes; SentencePiece passes over longer lines, by default those above 4192
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        shutil.rmtree(partial)
        raise ValueError(f"--vocab-size {vocab_size} does not suit the training text: {error}") from error
    processor = sentencepiece.SentencePieceProcessor(model_file=str(partial / "spm.model"))
    for split, lines in text.items():
        pieces = [" ".join(processor.encode(line, out_type=str)) for line in lines]
        (partial / f"{split}.pieces").write_text("".join(f"{line}\n" for line in pieces), "utf-8", newline="\n")
        words, count = (sum(len(line.split()) for line in each) for each in (lines, pieces))
        print(f"{split}: {len(lines):,} paragraphs, {words:,} words, {count:,} pieces")
    partial.rename(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parent
    parser.add_argument("--data", type=Path, default=here / "data", help="folder of the text (default: the one here)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; it must not exist")
    parser.add_argument("--vocab-size", type=int, default=4000, help="number of pieces (default: 4000)")
    parser.add_argument("--most-lines", type=int, help="take only so many lines of each part")
    args = parser.parse_args()
    try:
        prepare(args.data, args.out, args.vocab_size, args.most_lines)
    except (ValueError, OSError) as error:
        print(f"prepare.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
