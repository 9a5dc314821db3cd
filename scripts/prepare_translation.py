"""Make fairseq's binarised translation data out of pairs of text files.

    python scripts/prepare_translation.py -s en -t de --train train.en.xz train.de.xz \
        --valid valid.en.xz valid.de.xz --test test.en.xz test.de.xz --vocab-size 3000 --out data-bin

Both languages share one SentencePiece unigram model and one dictionary, made from its pieces, as shared embeddings
need it. Without --valid and --test their lines are split off the training pair: exact duplicates are dropped, the same
lines are chosen every time, and no training pair has a sentence of a held-out pair on its side. Long sentences are
left out of the training part only.

Everything is written beside --out under the name ``.NAME.partial`` and renamed at the end, so --out is whole or not
there. A second call with the same inputs and settings does nothing. --out holds ``bin/`` (for fairseq), ``spm.model``
and ``spm.vocab``, ``dict.txt``, ``text/`` (the raw sentences, for scoring against an untokenised reference) and
``prepared.json`` (settings, checksums, counts).

    python scripts/prepare_translation.py --check data-bin/dict.txt --spm-model data-bin/spm.model

only compares a SentencePiece model with a dictionary.
"""

import argparse
import errno
import hashlib
import io
import json
import logging
import lzma
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

from whole_folder import write_whole_folder

PARTS = ("train", "valid", "test")
MANIFEST = "prepared.json"
# What some reader takes for the end of a line beside "\n": universal newlines, str.splitlines, text editors.
LINE_BREAKS = re.compile("[\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029]")


def read_lines(path: Path) -> list[str]:
    r"""Read the sentences of a plain or .xz text file.

    Only "\n" ends a line; other line-breaking characters inside one become spaces, so that no later reader counts
    more lines than this one.

    Raises:
        ValueError: no such file, not UTF-8, not xz, no sentence at all, or an empty line.
    """
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    try:
        data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    except lzma.LZMAError as error:
        raise ValueError(f"{path} is not a whole .xz file: {error}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: not UTF-8 ({error.reason})") from error
    lines = [LINE_BREAKS.sub(" ", line).strip() for line in text.removesuffix("\n").split("\n")]
    if lines == [""]:
        raise ValueError(f"{path} has no sentences")
    empty = [number for number, line in enumerate(lines, 1) if not line]
    if empty:
        more = f" and {len(empty) - 1} more lines" if len(empty) > 1 else ""
        raise ValueError(f"{path}, line {empty[0]}{more}: empty; both sides need a sentence on every line")
    return lines


def read_pairs(option: str, paths: list[Path]) -> list[tuple[str, str]]:
    """Read two files of equal length as sentence pairs."""
    source, target = (read_lines(path) for path in paths)
    if len(source) != len(target):
        raise ValueError(
            f"{option}: line n of one file must translate line n of the other, but "
            f"{paths[0]} has {len(source)} lines and {paths[1]} has {len(target)}"
        )
    return list(zip(source, target, strict=True))


def split_pairs(pairs: list[tuple[str, str]], sizes: dict[str, int], seed: int) -> dict[str, list[tuple[str, str]]]:
    """Split held-out parts off, the same ones for the same pairs, sizes and seed.

    Args:
        pairs: all sentence pairs.
        sizes: how many pairs each held-out part gets, such as ``{"valid": 500, "test": 500}``.
        seed: which pairs are chosen.

    Returns:
        The held-out parts and ``train``: what is left, without exact duplicates and without any pair that has the
        source or the target sentence of a held-out pair. Every part keeps the order of ``pairs``.

    Raises:
        ValueError: fewer pairs than the held-out parts need.
    """
    pairs = list(dict.fromkeys(pairs))
    wanted = sum(sizes.values())
    if len(pairs) <= 2 * wanted:
        asked = ", ".join(f"--{part}-size {size}" for part, size in sizes.items())
        raise ValueError(
            f"--train has {len(pairs)} different sentence pairs, too few for {asked}: "
            "training must keep more than it gives away"
        )
    order = list(range(len(pairs)))
    random.Random(seed).shuffle(order)
    split, held_out, seen = {}, set(), (set(), set())
    for part, size in sizes.items():
        # A sentence is held out once: a part never contains a sentence of another one.
        chosen = []
        while order and len(chosen) < size:
            number = order.pop()
            if not any(sentence in side for sentence, side in zip(pairs[number], seen, strict=True)):
                chosen.append(number)
        for number in chosen:
            for sentence, side in zip(pairs[number], seen, strict=True):
                side.add(sentence)
        held_out.update(chosen)
        split[part] = [pairs[number] for number in sorted(chosen)]
    split["train"] = [
        pair
        for number, pair in enumerate(pairs)
        if number not in held_out and not any(s in side for s, side in zip(pair, seen, strict=True))
    ]
    if not split["train"] or any(len(split[part]) < size for part, size in sizes.items()):
        raise ValueError(
            "--train repeats its sentences too often to split valid and test off it: give --valid and --test"
        )
    return split


def train_sentencepiece(sentences: list[str], vocab_size: int, character_coverage: float) -> bytes:
    """Train one unigram model on the sentences of both languages and return it in serialised form.

    Raises:
        ValueError: the vocabulary is too large or too small for this text.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        too_high = re.search(r"Vocabulary size (?:is )?too high .*<= (\d+)", str(error))
        too_small = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
        if too_high:
            raise ValueError(
                f"--vocab-size {vocab_size} is too large: this text of {len(sentences)} sentences yields at most "
                f"{too_high[1]} pieces"
            ) from error
        if too_small:
            raise ValueError(
                f"--vocab-size {vocab_size} is too small: the single characters of this text alone need {too_small[1]} "
                f"pieces with --character-coverage {character_coverage}"
            ) from error
        raise ValueError(f"SentencePiece could not be trained with --vocab-size {vocab_size}: {error}") from error
    return model.getvalue()


def load_sentencepiece(path: Path):
    """Open a SentencePiece model.

    Raises:
        ValueError: there is none at this path.
    """
    import sentencepiece

    if not path.is_file():
        raise ValueError(f"--spm-model: no such file: {path}")
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except RuntimeError as error:
        raise ValueError(f"--spm-model {path} is not a SentencePiece model") from error


def list_symbols(model) -> list[str]:
    """Return the pieces that go into fairseq's dictionary: all but <unk>, <s>, </s>, which fairseq has itself."""
    return [model.id_to_piece(i) for i in range(len(model)) if not (model.is_unknown(i) or model.is_control(i))]


def check_model_fits(spm_model: Path, dictionary: Path) -> None:
    """Hold a SentencePiece model against a fairseq dictionary.

    Raises:
        ValueError: the dictionary is not made from this model's pieces, in their order.
    """
    model = list_symbols(load_sentencepiece(spm_model))
    if not dictionary.is_file():
        raise ValueError(f"no such dictionary: {dictionary}")
    lines = dictionary.read_text("utf-8").removesuffix("\n").split("\n")
    symbols = [line.rpartition(" ")[0] for line in lines if not line.startswith("madeupword")]
    misfit = f"--spm-model {spm_model} does not fit the dictionary {dictionary}"
    if len(model) != len(symbols):
        raise ValueError(f"{misfit}: the model has {len(model)} pieces and the dictionary {len(symbols)}")
    for number, (piece, symbol) in enumerate(zip(model, symbols, strict=True), 1):
        if piece != symbol:
            raise ValueError(f"{misfit}: entry {number} is {piece!r} in the model and {symbol!r} in the dictionary")


def encode(model, pairs: list[tuple[str, str]], part: str) -> list[tuple[list[str], list[str]]]:
    """Cut both sides of each pair into pieces.

    Raises:
        ValueError: nothing is left of a sentence (it had only characters that SentencePiece removes).
    """
    sides = [model.encode(list(side), out_type=str) for side in zip(*pairs, strict=True)]
    for number, pieces in enumerate(zip(*sides, strict=True), 1):
        if not all(pieces):
            raise ValueError(f"pair {number} of {part}: {pairs[number - 1]!r} has a side without any visible character")
    return list(zip(*sides, strict=True))


def write_lines(path: Path, lines) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)


def binarise(folder: Path, source: str, target: str) -> None:
    """Run fairseq-preprocess on ``folder/pieces`` with ``folder/dict.txt``; the result is ``folder/bin``.

    Raises:
        ValueError: fairseq failed; the sentence gives its last words.
    """
    command = [sys.executable, "-m", "fairseq_cli.preprocess", "-s", source, "-t", target, "--joined-dictionary"]
    command += ["--srcdict", str(folder / "dict.txt"), "--destdir", str(folder / "bin")]
    for part in PARTS:
        command += [f"--{part}pref", str(folder / "pieces" / part)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        if "No space left on device" in result.stdout:
            raise OSError(errno.ENOSPC, "No space left on device")
        last_words = (result.stdout.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(f"fairseq-preprocess failed with status {result.returncode}: {last_words}")


def check_binarised(folder: Path, languages: tuple[str, str], encoded: dict) -> None:
    """Read back what fairseq wrote and compare every sentence with what went in.

    Raises:
        ValueError: a sentence is missing, longer, shorter, or reads differently.
    """
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)  # it asks for tensorboardX
    from fairseq.data import Dictionary
    from fairseq.data.indexed_dataset import MMapIndexedDataset

    pair = "-".join(languages)
    for side, language in enumerate(languages):
        dictionary = Dictionary.load(str(folder / "bin" / f"dict.{language}.txt"))
        for part, pieces in encoded.items():
            name = f"{part}.{pair}.{language}"
            dataset = MMapIndexedDataset(str(folder / "bin" / name))
            if len(dataset) != len(pieces):
                raise ValueError(f"fairseq-preprocess wrote {len(dataset)} of {len(pieces)} sentences to {name}.bin")
            for number, sentence in enumerate(pieces):
                expected = [dictionary.index(piece) for piece in sentence[side]] + [dictionary.eos()]
                if dataset[number].tolist() != expected:
                    raise ValueError(f"sentence {number + 1} of {name}.bin is not what was given to fairseq-preprocess")


def describe(args) -> dict:
    """Return settings and input checksums: what decides whether a finished result can stand."""
    wanted = {"--source-lang": args.source_lang, "--target-lang": args.target_lang, "--max-pieces": args.max_pieces}
    for part in PARTS:
        files = getattr(args, part)
        wanted[f"--{part}"] = [checksum(path) for path in files] if files else None
        if part != "train":
            wanted[f"--{part}-size"] = None if files else getattr(args, f"{part}_size")
    wanted["--seed"] = None if args.valid and args.test else args.seed
    wanted["--spm-model"] = checksum(args.spm_model) if args.spm_model else None
    wanted["--vocab-size"] = None if args.spm_model else args.vocab_size
    wanted["--character-coverage"] = None if args.spm_model else args.character_coverage
    return wanted


def checksum(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_prepared(out: Path, wanted: dict) -> bool:
    """Say whether ``out`` already holds this result.

    Raises:
        ValueError: ``out`` holds something else.
    """
    if not out.exists():
        return False
    try:
        found = json.loads((out / MANIFEST).read_text("utf-8"))["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--out {out} exists and was not made by this program: choose another name") from error
    for option, value in wanted.items():
        if found.get(option) != value:
            is_file = isinstance(value, list) or option == "--spm-model"
            difference = "other contents" if is_file else f"{option} {found.get(option)}, not {value}"
            named = f"{option} with " if is_file else ""
            raise ValueError(
                f"--out {out} was prepared from {named}{difference}: choose another --out, or delete that folder"
            )
    return True


def prepare(args, out: Path, wanted: dict) -> dict:
    """Do all the work inside ``out``, an empty folder.

    Returns:
        The number of pairs in each part.
    """
    languages = (args.source_lang, args.target_lang)
    pairs = {part: read_pairs(f"--{part}", getattr(args, part)) for part in PARTS if getattr(args, part)}
    missing = {part: getattr(args, f"{part}_size") for part in ("valid", "test") if part not in pairs}
    if missing:
        pairs.update(split_pairs(pairs["train"], missing, args.seed))

    if args.spm_model:
        load_sentencepiece(args.spm_model)
        shutil.copyfile(args.spm_model, out / "spm.model")
    else:
        print(f"training a SentencePiece model of {args.vocab_size} pieces", flush=True)
        sentences = [sentence for pair in zip(*pairs["train"], strict=True) for sentence in pair]
        (out / "spm.model").write_bytes(train_sentencepiece(sentences, args.vocab_size, args.character_coverage))
    model = load_sentencepiece(out / "spm.model")
    write_lines(out / "spm.vocab", (f"{model.id_to_piece(i)}\t{model.get_score(i):g}" for i in range(len(model))))
    # fairseq wants a count behind each symbol and uses only the order.
    write_lines(out / "dict.txt", (f"{symbol} 1" for symbol in list_symbols(model)))
    check_model_fits(out / "spm.model", out / "dict.txt")

    encoded = {part: encode(model, pairs[part], part) for part in PARTS}
    if args.max_pieces:
        kept = [i for i, pair in enumerate(encoded["train"]) if max(map(len, pair)) <= args.max_pieces]
        if not kept:
            raise ValueError(f"--max-pieces {args.max_pieces} leaves no training sentence: every pair is longer")
        print(f"left out {len(encoded['train']) - len(kept)} training pairs longer than --max-pieces {args.max_pieces}")
        encoded["train"], pairs["train"] = ([part["train"][i] for i in kept] for part in (encoded, pairs))
    (out / "text").mkdir()
    (out / "pieces").mkdir()
    for part in PARTS:
        for side, language in enumerate(languages):
            write_lines(out / "text" / f"{part}.{language}", (pair[side] for pair in pairs[part]))
            write_lines(out / "pieces" / f"{part}.{language}", (" ".join(pair[side]) for pair in encoded[part]))
    print("binarising", flush=True)
    binarise(out, *languages)
    check_binarised(out, languages, encoded)
    shutil.rmtree(out / "pieces")
    counts = {part: len(pairs[part]) for part in PARTS}
    manifest = {"settings": wanted, "pairs": counts, "symbols": len(list_symbols(model))}
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
    return counts


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog="Files may be plain text or .xz, one sentence a line, UTF-8."
    )
    parser.add_argument("-s", "--source-lang", help="source language, such as en")
    parser.add_argument("-t", "--target-lang", help="target language, such as de")
    for part in PARTS:
        needed = "" if part == "train" else "; without it, split off --train"
        parser.add_argument(
            f"--{part}", nargs=2, type=Path, metavar=("SOURCE", "TARGET"), help=f"files of the {part} part{needed}"
        )
    parser.add_argument("--out", type=Path, help="folder to make")
    parser.add_argument("--vocab-size", type=int, default=8000, help="pieces of the joint model (default: %(default)s)")
    parser.add_argument("--spm-model", type=Path, help="use this SentencePiece model and train none")
    parser.add_argument(
        "--character-coverage", type=float, default=1.0, help="share of characters with a piece (default: %(default)s)"
    )
    parser.add_argument(
        "--max-pieces", type=int, default=0, help="leave out longer training pairs (default: %(default)s, keep all)"
    )
    parser.add_argument("--valid-size", type=int, default=500, help="pairs to split off (default: %(default)s)")
    parser.add_argument("--test-size", type=int, default=500, help="pairs to split off (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which pairs are split off (default: %(default)s)")
    parser.add_argument(
        "--check", type=Path, metavar="DICTIONARY", help="only check that --spm-model fits this fairseq dictionary"
    )
    return parser


def check_args(parser: argparse.ArgumentParser, args) -> None:
    """Refuse what argparse itself cannot see."""
    needed = ("spm_model",) if args.check else ("source_lang", "target_lang", "train", "out")
    for name in needed:
        if getattr(args, name) is None:
            parser.error(f"--{name.replace('_', '-')} is needed{' with --check' if args.check else ''}")
    if args.check:
        return
    if args.source_lang == args.target_lang:
        parser.error(f"--source-lang {args.source_lang} and --target-lang {args.target_lang} must differ")
    for name, smallest in (("vocab_size", 1), ("max_pieces", 0), ("valid_size", 1), ("test_size", 1)):
        if getattr(args, name) < smallest:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least {smallest}")
    if not 0.9 <= args.character_coverage <= 1:
        parser.error(f"--character-coverage {args.character_coverage} must be between 0.9 and 1")


def run(args) -> None:
    """Prepare ``args.out``, or leave nothing behind.

    Raises:
        ValueError: the input or the settings cannot be used.
        OSError: the result cannot be written.
    """
    out = args.out.absolute()
    wanted = describe(args)
    if is_prepared(out, wanted):
        print(f"{args.out} is already prepared: nothing to do")
        return
    with write_whole_folder(out) as partial:
        counts = prepare(args, partial, wanted)
    print(f"wrote {args.out}: " + ", ".join(f"{count} pairs for {part}" for part, count in counts.items()))


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    check_args(parser, args)
    try:
        if args.check:
            check_model_fits(args.spm_model, args.check)
        else:
            run(args)
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = args.out or args.check
        print(f"{parser.prog}: cannot write --out {where}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: stopped; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
