"""Split this repository's English into pieces: text for masked language modelling, and two sets of labelled sentences.

Writes, into a folder and ready for ``fairseq-preprocess --only-source``:

    {train,valid,valid1,test}.text            for pretraining, one sentence a line, lower-cased
    novels.{train,valid,test}.{input0,label}  sentences of five novels and which novel each is from
    reviews.{train,valid,test}.{input0,label} sentences of film reviews and whether they are positive
    spm.model                                 the pieces

``train.text`` holds the sentences of ``examples/language_modeling/data`` once and all training reviews
``--review-copies`` times, each copy to be masked in another way; ``valid.text`` and ``test.text`` hold running text
only, ``valid1.text`` the validation reviews. No text of validation or test is trained on. Only so many training
sentences of each set keep their labels, evenly spaced: labels are what is scarce, text is not.

For each part the script prints what a model that knows only how often each piece occurs would pay: the unigram entropy.
``<s>`` and ``</s>`` count as pieces there, because fairseq masks them too.

Example:
    python examples/masked_lm/prepare.py --out masked-lm
"""

import argparse
import lzma
import math
import re
from collections import Counter
from pathlib import Path

import sentencepiece

EXAMPLES = Path(__file__).resolve().parent.parent
SPLITS = ("train", "valid", "test")
LONGEST = 126  # pieces of a sentence for pretraining: 128 with <s> and </s>
HELD_OUT = 1500  # sentences of running text, and of the novels, to validate and to test with
SENTENCE_END = re.compile(r"""(?<=[.!?;])["')]*\s+""")

# The lines of examples/language_modeling/data that are from one novel: first, and first after. The files are in the
# order of the books. Northanger Abbey and Persuasion are left out: they have 44 paragraphs and none in the test part.
NOVELS = {
    "moby-dick": {"train": (210, 2489), "valid": (12, 188), "test": (11, 144)},
    "emma": {"train": (2489, 4496), "valid": (188, 367), "test": (144, 244)},
    "mansfield-park": {"train": (4496, 6092), "valid": (367, 463), "test": (244, 317)},
    "pride-and-prejudice": {"train": (7987, 9501), "valid": (509, 749), "test": (361, 617)},
    "sense-and-sensibility": {"train": (9501, 11047), "valid": (749, 880), "test": (617, 716)},
}


def read_lines(path: Path) -> list[str]:
    """Return the lines of a compressed file."""
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
        return file.read().rstrip("\n").split("\n")


def choose(lines: list[str], most: int | None) -> list[str]:
    """Return at most so many lines, evenly spaced: all sets are in order of their source."""
    return lines if most is None or most >= len(lines) else [lines[i * len(lines) // most] for i in range(most)]


def read_sentences(split: str, lines: tuple[int, int] | None = None, words: tuple[int, int] = (4, 10**6)) -> list[str]:
    """Return the sentences of the running text, or of a range of its lines, lower-cased, that have so many words."""
    paragraphs = read_lines(EXAMPLES / f"language_modeling/data/{split}.txt.xz")[slice(*(lines or (None,)))]
    found = (sentence for paragraph in paragraphs for sentence in SENTENCE_END.split(paragraph.lower()))
    return [sentence for sentence in found if words[0] <= len(sentence.split()) <= words[1]]


def read_novels(split: str, most: int | None) -> tuple[list[str], list[str]]:
    """Return the novels that sentences of 6 to 60 words are from, and the sentences."""
    rows = [
        (novel, sentence)
        for novel, lines in NOVELS.items()
        for sentence in read_sentences(split, lines[split], (6, 60))
    ]
    novels, sentences = zip(*choose(rows, most), strict=True)
    return list(novels), list(sentences)


def read_reviews(split: str, most: int | None) -> tuple[list[str], list[str]]:
    """Return the labels of the film reviews and their text, lower-cased."""
    lines = choose(read_lines(EXAMPLES / f"masked_lm/data/{split}.tsv.xz"), most)
    labels, reviews = zip(*(line.split("\t") for line in lines), strict=True)
    return list(labels), [review.lower() for review in reviews]


def read_labelled(name: str, labelled: int) -> dict[str, tuple[list[str], list[str]]]:
    """Return labels and text of each part of one of the sets, as it is trained and tested with.

    Args:
        name: novels or reviews.
        labelled: how many sentences of the training part have a label.
    """
    if name == "novels":
        return {split: read_novels(split, labelled if split == "train" else HELD_OUT) for split in SPLITS}
    return {split: read_reviews(split, labelled if split == "train" else None) for split in SPLITS}


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
        "--review-copies", type=int, default=8, help="how often the training reviews are in train.text (default: 8)"
    )
    for name, labels in (("novels", 1000), ("reviews", 2000)):
        parser.add_argument(
            f"--labelled-{name}", type=int, default=labels, help=f"training {name} with labels (default: {labels})"
        )
    parser.add_argument("--most-lines", type=int, help="take only so many sentences of each part of each source")
    args = parser.parse_args()
    for name, least in (
        *(("vocabulary", 1), ("review_copies", 0), ("labelled_novels", 1), ("labelled_reviews", 1)),
        ("most_lines", 1),
    ):
        if getattr(args, name) is not None and getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least {least}")
    args.out.mkdir(parents=True, exist_ok=True)

    text = {
        split: choose(choose(read_sentences(split), None if split == "train" else HELD_OUT), args.most_lines)
        for split in SPLITS
    }
    text["train"] += read_reviews("train", args.most_lines)[1] * args.review_copies
    text["valid1"] = read_reviews("valid", args.most_lines)[1]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text["train"]),
        model_prefix=str(args.out / "spm"),
        vocab_size=args.vocabulary,
        character_coverage=0.9999,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(args.out / "spm.model"))
    for name, labelled in (("novels", args.labelled_novels), ("reviews", args.labelled_reviews)):
        for split, parts in read_labelled(name, labelled).items():
            labels, sentences = (choose(part, args.most_lines) for part in parts)
            write_lines(args.out / f"{name}.{split}.label", labels)
            encoded = processor.encode(sentences, out_type=str)
            write_lines(args.out / f"{name}.{split}.input0", map(" ".join, encoded))
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
