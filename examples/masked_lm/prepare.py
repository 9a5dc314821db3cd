"""Split this repository's English into pieces: LibreOffice's help for pretraining, film reviews for fine-tuning.

Writes {train,valid,test}.{text,input0,label} and spm.model into a folder, ready for ``fairseq-preprocess
--only-source``, and prints what a model that knows only how often each piece occurs would pay: the unigram entropy.
``<s>`` and ``</s>`` count as pieces there, because fairseq masks them too.

Example:
    python examples/masked_lm/prepare.py --out masked-lm
"""

import argparse
import lzma
import math
from collections import Counter
from pathlib import Path

import sentencepiece

EXAMPLES = Path(__file__).resolve().parent.parent
SPLITS = ("train", "valid", "test")


def read_lines(path: Path, most: int | None) -> list[str]:
    """Return the first lines of a compressed file."""
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
        return file.read().rstrip("\n").split("\n")[:most]


def write_lines(path: Path, lines) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")


def unigram_entropy(train: list[list[str]], sentences: list[list[str]]) -> float:
    """Return bits per piece of ``sentences`` under the frequencies of ``train``, each count raised by one."""
    seen, counted = (
        Counter(piece for sentence in each for piece in ("<s>", *sentence, "</s>")) for each in (train, sentences)
    )
    total = seen.total() + len(seen | counted)
    return -sum(n * math.log2((seen[piece] + 1) / total) for piece, n in counted.items()) / counted.total()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--vocabulary", type=int, default=3000, help="number of pieces (default: 3000)")
    parser.add_argument("--most-lines", type=int, help="take only so many lines of each file")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    text = {split: read_lines(EXAMPLES / f"translation/data/{split}.en.xz", args.most_lines) for split in SPLITS}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text["train"]),
        model_prefix=str(args.out / "spm"),
        vocab_size=args.vocabulary,
        character_coverage=1.0,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(args.out / "spm.model"))
    pieces = {split: [processor.encode(line, out_type=str) for line in lines] for split, lines in text.items()}
    for split in SPLITS:
        write_lines(args.out / f"{split}.text", map(" ".join, pieces[split]))
        reviews = read_lines(EXAMPLES / f"masked_lm/data/{split}.tsv.xz", args.most_lines)
        labels, sentences = zip(*(line.split("\t") for line in reviews), strict=True)
        write_lines(args.out / f"{split}.label", labels)
        write_lines(args.out / f"{split}.input0", (" ".join(processor.encode(s, out_type=str)) for s in sentences))
        print(f"{split}: unigram entropy {unigram_entropy(pieces['train'], pieces[split]):.3f} bits per piece")


if __name__ == "__main__":
    main()
