"""Split this repository's English into pieces: text for masked language modelling, film reviews with labels.

Writes, into a folder and ready for ``fairseq-preprocess --only-source``:

    {train,valid,valid1,test}.text     for pretraining, one sentence a line, lower-cased
    {train,valid,test}.{input0,label}  film reviews and whether they are positive, for classification
    spm.model                          the pieces

``train.text`` holds LibreOffice's help of ``examples/translation/data`` once and the text of all training reviews
``--review-copies`` times, each copy to be masked in another way; ``valid.text`` and ``test.text`` hold help only,
``valid1.text`` the validation reviews. No text of validation or test is trained on. Only ``--labelled`` of the training
reviews keep their labels, evenly spaced: labels are what is scarce, text is not.

For each part the script prints what a model that knows only how often each piece occurs would pay: the unigram entropy.
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
LONGEST = 126  # pieces of a sentence for pretraining: 128 with <s> and </s>


def read_lines(path: Path) -> list[str]:
    """Return the lines of a compressed file."""
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
        return file.read().rstrip("\n").split("\n")


def choose(lines: list[str], most: int | None) -> list[str]:
    """Return at most so many lines, evenly spaced: the reviews are in order of their source, positive ones first."""
    return lines if most is None or most >= len(lines) else [lines[i * len(lines) // most] for i in range(most)]


def read_help(split: str, most: int | None) -> list[str]:
    """Return the help, lower-cased."""
    return choose([line.lower() for line in read_lines(EXAMPLES / f"translation/data/{split}.en.xz")], most)


def read_reviews(split: str, most: int | None) -> tuple[list[str], list[str]]:
    """Return the labels of the film reviews and their text, lower-cased."""
    lines = choose(read_lines(EXAMPLES / f"masked_lm/data/{split}.tsv.xz"), most)
    labels, reviews = zip(*(line.split("\t") for line in lines), strict=True)
    return list(labels), [review.lower() for review in reviews]


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
    parser.add_argument("--vocabulary", type=int, default=6000, help="number of pieces (default: 6000)")
    parser.add_argument(
        "--review-copies", type=int, default=20, help="how often the training reviews are in train.text (default: 20)"
    )
    parser.add_argument("--labelled", type=int, default=2000, help="training reviews with labels (default: 2000)")
    parser.add_argument("--most-lines", type=int, help="take only so many lines of help and reviews of each part")
    args = parser.parse_args()
    for name, least in (("vocabulary", 1), ("review_copies", 0), ("labelled", 1), ("most_lines", 1)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least {least}")
    args.out.mkdir(parents=True, exist_ok=True)

    reviews = {split: read_reviews(split, args.most_lines) for split in SPLITS}
    text = {split: read_help(split, args.most_lines) for split in SPLITS}
    text["train"] += reviews["train"][1] * args.review_copies
    text["valid1"] = reviews["valid"][1]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text["train"]),
        model_prefix=str(args.out / "spm"),
        vocab_size=args.vocabulary,
        character_coverage=1.0,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(args.out / "spm.model"))
    for split, parts in reviews.items():
        labels, sentences = (choose(part, args.labelled if split == "train" else None) for part in parts)
        write_lines(args.out / f"{split}.label", labels)
        write_lines(args.out / f"{split}.input0", map(" ".join, processor.encode(sentences, out_type=str)))
    pieces = {
        split: [encoded[:LONGEST] for encoded in processor.encode(sentences, out_type=str)]
        for split, sentences in text.items()
    }
    for split, sentences in pieces.items():
        write_lines(args.out / f"{split}.text", map(" ".join, sentences))
        entropy = unigram_entropy(pieces["train"], sentences)
        print(f"{split}: {len(sentences):,} sentences, unigram entropy {entropy:.3f} bits per piece")


if __name__ == "__main__":
    main()
