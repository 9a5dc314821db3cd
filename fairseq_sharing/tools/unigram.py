"""Print the unigram perplexity of binarised text: what a model pays that knows only how often each token occurs.

A language model whose validation perplexity stays there has learned nothing from the context. Tokens are counted in the
training part, each count raised by one over the V entries of the dictionary. As for fairseq's language models, every
token is predicted once, </s> at the end of each line too. Give --begin for masked language models, whose task puts <s>
in front of each line (with --sample-break-mode eos) and masks it like any other token.

Example:
    fairseq-sharing unigram data-bin/wikitext-103 --subsets valid test
"""

import logging
import os

LINES = 10_000  # to be counted at once
HELP = "print the unigram perplexity of binarised text, to set beside a language model's"


def add_arguments(parser) -> None:
    """Add the flags of this subcommand."""
    parser.add_argument("data", help="folder written by fairseq-preprocess --only-source")
    parser.add_argument(
        "--subsets", nargs="+", default=["valid"], metavar="PART", help="parts to measure (default: valid)"
    )
    parser.add_argument("--begin", action="store_true", help="count <s> before each line")


def count_tokens(data: str, subset: str, begin: bool = False):
    """Return how often each entry of the dictionary occurs in a part.

    Args:
        data: folder with dict.txt, SUBSET.bin and SUBSET.idx.
        subset: the part's name.
        begin: whether <s> stands before each line.

    Returns:
        A tensor of V whole numbers.

    Raises:
        ValueError: the folder or the part is not there, or the part is empty.
    """
    import torch
    from fairseq.data import Dictionary, data_utils

    from .progress import progress

    dictionary, part = os.path.join(data, "dict.txt"), os.path.join(data, subset)
    if not os.path.isfile(dictionary):
        raise ValueError(f"{data} is no folder with binarised text: there is no {dictionary}")
    if not os.path.isfile(f"{part}.bin"):
        raise ValueError(f"{data} has no part {subset}: there is no {part}.bin")
    if not os.path.getsize(f"{part}.bin"):
        raise ValueError(f"{data}: part {subset} is empty")
    dictionary = Dictionary.load(dictionary)
    dataset = data_utils.load_indexed_dataset(part, dictionary)
    counts = torch.zeros(len(dictionary), dtype=torch.long)
    for first in progress(range(0, len(dataset), LINES), f"counting {subset}"):
        lines = [dataset[line] for line in range(first, min(first + LINES, len(dataset)))]
        counts += torch.bincount(torch.cat(lines).long(), minlength=len(dictionary))
    if begin:
        counts[dictionary.bos()] += len(dataset)
    return counts


def unigram_bits(train, counts) -> float:
    """Return bits per token of a text under the frequencies of another one, each count raised by one.

    Args:
        train: the counts that the frequencies come from, V whole numbers.
        counts: those of the text to measure, V whole numbers; at least one token.
    """
    probabilities = (train.double() + 1) / (train.sum() + len(train))
    return float(-(counts * probabilities.log2()).sum() / counts.sum())


def run(args) -> None:
    """Print one line for each part."""
    logging.getLogger("fairseq.data.data_utils").setLevel(logging.WARNING)  # it tells which files it loads
    train = count_tokens(args.data, "train", args.begin)
    for subset in args.subsets:
        counts = count_tokens(args.data, subset, args.begin)
        bits = unigram_bits(train, counts)
        print(f"{subset}: {counts.sum():,} tokens, unigram perplexity {2**bits:.2f} ({bits:.3f} bits per token)")
