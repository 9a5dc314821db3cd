"""Fetch the text of WMT's translation task and binarise it for fairseq, in steps that can each be stopped and repeated.

    download     archives, each whole and with a known checksum; one that was cut off is gone on with
    text         training text out of the archives; validation and test sets, read by sacrebleu
    vocabulary   a joint SentencePiece BPE model, and its pieces as a dictionary of fairseq
    binarise     all text in these pieces, as fairseq reads it, without training pairs that are too long or too unequal;
                 in as many shards as you like, and with synthetic pairs if you have some
    imitate      archives of the same form from a little text of your own, to try the others without a network

Example:
    python examples/translation/wmt.py download --pair en-de --out download
    python examples/translation/wmt.py text --pair en-de --archives download --out text
    python examples/translation/wmt.py vocabulary --text text --out vocabulary
    python examples/translation/wmt.py binarise --text text --vocabulary vocabulary --out bin
"""

import argparse
import contextlib
import gzip
import io
import itertools
import os
import shutil
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from archives import (
    add_download_arguments,
    check_downloaded,
    download,
    place_of,
    read_lines,
    run,
    write_sums,
    write_whole,
)
from pieces import BATCH, OPENERS, Pieces, clean, read_text, train_pieces, write_indexed

STATMT = "https://www.statmt.org"


@dataclass(frozen=True)
class Corpus:
    """One archive of training text.

    Attributes:
        url: where it is.
        members: names of its two text files; ``{}`` stands for the language.
        checksum: as TensorFlow Datasets has it (url_checksums/wmt14_translate.txt, wmt16_translate.txt); None where it
            is in no list: then that of the first download is kept, and later ones are compared with it.
    """

    url: str
    members: str
    checksum: str | None = None


def list_corpora(language: str) -> list[Corpus]:
    """Return the training text of WMT16 for German, of WMT14 for French, each with English."""
    pair = f"{language}-en"
    corpora = [
        Corpus(
            f"{STATMT}/wmt13/training-parallel-europarl-v7.tgz",
            f"training/europarl-v7.{pair}.{{}}",
            "sha256:0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
        ),
        Corpus(
            f"{STATMT}/wmt13/training-parallel-commoncrawl.tgz",
            f"commoncrawl.{pair}.{{}}",
            "sha256:c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
        ),
    ]
    if language == "de":
        corpora.append(
            Corpus(
                "https://data.statmt.org/wmt16/translation-task/training-parallel-nc-v11.tgz",
                f"training-parallel-nc-v11/news-commentary-v11.{pair}.{{}}",
                "sha256:cfe8ab047e05043476e498ee765c98e939c7b7d6d294e856344c84476b619d6a",
            )
        )
        return corpora
    return [
        *corpora,
        Corpus(
            f"{STATMT}/wmt14/training-parallel-nc-v9.tgz",
            f"training/news-commentary-v9.{pair}.{{}}",
            "sha256:cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
        ),
        Corpus(f"{STATMT}/wmt13/training-parallel-un.tgz", f"un/undoc.2000.{pair}.{{}}"),
        Corpus(f"{STATMT}/wmt10/training-giga-fren.tar", "giga-fren.release2.fixed.{}.gz"),
    ]


def read_pair(text: str) -> tuple[str, str]:
    """Read --pair: source and target language, one of them English.

    Raises:
        argparse.ArgumentTypeError: it is none of the four.
    """
    if text not in ("en-de", "de-en", "en-fr", "fr-en"):
        raise argparse.ArgumentTypeError(f"{text} is none of en-de, de-en, en-fr, fr-en")
    return tuple(text.split("-"))


def other_than_english(pair: tuple[str, str]) -> str:
    return next(language for language in pair if language != "en")


def short_name(test_set: str) -> str:
    """Return the name of a test set's files: wmt14 for wmt14/full."""
    return test_set.partition("/")[0]


def find_dataset(test_set: str, pair: tuple[str, str]):
    """Return what sacrebleu knows about a test set.

    Raises:
        ValueError: it does not know that set, or not in this language pair.
    """
    from sacrebleu.dataset import DATASETS

    dataset, name = DATASETS.get(test_set), "-".join(pair)
    if dataset is None or name not in dataset.langpairs:
        raise ValueError(f"sacrebleu has no test set {test_set} for {name}")
    return dataset


# --- download


def list_archives(pair: tuple[str, str], test_sets: list[str]) -> dict[str, tuple[str, str | None]]:
    """Return for each archive, by its name in the folder of downloads, where it is and its checksum, if known."""
    archives = {}
    for corpus in list_corpora(other_than_english(pair)):
        archives[Path(urlsplit(corpus.url).path).name] = (corpus.url, corpus.checksum)
    for test_set in test_sets:
        dataset = find_dataset(test_set, pair)
        for url, md5 in zip(dataset.data, dataset.md5, strict=True):
            archives[f"{short_name(test_set)}-{Path(urlsplit(url).path).name}"] = (url, f"md5:{md5}")
    return archives


# --- text


def read_member(archive: Path, name: str):
    """Yield the lines of a text file in an archive, as bytes.

    Raises:
        ValueError: it is not in there, or the archive is damaged.
    """
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isfile() and member.name.removeprefix("./") == name:
                    with tar.extractfile(member) as file:
                        yield from gzip.GzipFile(fileobj=file) if name.endswith(".gz") else file
                    return
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"cannot read {name} in {archive}: {error}") from error
    raise ValueError(f"{archive} has no {name}")


def find_files(prefix: str, pair: tuple[str, str]) -> list[Path]:
    """Return the two text files of sentence pairs, PREFIX.LANGUAGE, which may be compressed.

    Raises:
        ValueError: there is none.
    """
    found = []
    for language in pair:
        paths = [Path(f"{prefix}.{language}{suffix}") for suffix in ("", *OPENERS)]
        if not any(path.exists() for path in paths):
            raise ValueError(f"there is none of {', '.join(map(str, paths))}")
        found.append(next(path for path in paths if path.exists()))
    return found


def read_pairs(texts, names: list):
    """Yield the sentence pairs of two texts, and None for a pair with a side that is empty or not UTF-8.

    Raises:
        ValueError: they differ in length.
    """
    for number, lines in enumerate(itertools.zip_longest(*texts), 1):
        if None in lines:
            raise ValueError(f"{names[0]} and {names[1]} differ in length, from line {number} on")
        sentences = [clean(line) for line in lines]
        yield None if None in sentences else sentences


def append_pairs(name: str, pairs, files: list) -> None:
    """Write sentence pairs to one file for each language."""
    kept = total = 0
    for sentences in pairs:
        total += 1
        if sentences is not None:
            kept += 1
            for file, sentence in zip(files, sentences, strict=True):
                file.write(f"{sentence}\n")
    print(f"{name}: {kept:,} of {total:,} pairs", flush=True)


def extract_test_set(test_set: str, pair: tuple[str, str], archives: Path, out: Path, name: str) -> None:
    """Write a test set as two files ``out/name.{source,target}``.

    sacrebleu reads it from its own folder, which gets the archive that was downloaded and checked.
    """
    from sacrebleu.utils import extract_tarball

    dataset = find_dataset(test_set, pair)
    raw = Path(dataset._rawdir)
    for url in dataset.data:
        own = raw / dataset._get_tarball_filename(url)
        shutil.rmtree(raw.parent, ignore_errors=True)
        raw.mkdir(parents=True)
        shutil.copyfile(archives / f"{short_name(test_set)}-{Path(urlsplit(url).path).name}", own)
        extract_tarball(str(own), str(raw))
    for language, path in zip(pair, dataset.get_files("-".join(pair)), strict=False):  # source, reference, and more
        shutil.copyfile(path, out / f"{name}.{language}")


def extract(args) -> None:
    """Write all text of a language pair."""
    os.environ["SACREBLEU"] = str(args.sacrebleu)  # read when sacrebleu is imported
    check_downloaded(args.archives, list_archives(args.pair, args.test_sets))
    with write_whole(args.out) as out:
        with contextlib.ExitStack() as stack:
            files = [
                stack.enter_context((out / f"train.{language}").open("w", encoding="utf-8", newline="\n"))
                for language in args.pair
            ]
            for corpus in list_corpora(other_than_english(args.pair)):
                archive = args.archives / Path(urlsplit(corpus.url).path).name
                names = [corpus.members.format(language) for language in args.pair]
                append_pairs(archive.name, read_pairs([read_member(archive, name) for name in names], names), files)
            for prefix in args.further:
                paths = find_files(prefix, args.pair)
                append_pairs(prefix, read_pairs(map(read_text, paths), paths), files)
        for test_set in args.test_sets:
            extract_test_set(test_set, args.pair, args.archives, out, short_name(test_set))


# --- pieces


def train_vocabulary(args) -> None:
    """Write SentencePiece's model and fairseq's dictionary."""
    files = [args.text / f"train.{language}" for language in args.pair]
    with write_whole(args.out) as out:
        train_pieces(
            out,
            files,
            args.size,
            model_type="bpe",
            character_coverage=args.character_coverage,
            input_sentence_size=args.sentences,
            num_threads=args.workers,
        )


def binarise(args) -> None:
    """Write folders 0, 1 and so on, one for each shard: genuine training pairs as train, synthetic ones as train1.

    Both are dealt out in turn, so that each shard is a sample of all. Dictionaries, validation and test sets are in the
    first one only, where fairseq looks for them.
    """
    pieces = Pieces(args.vocabulary, args.workers)
    parts = [("train", str(args.text / "train")), *([("train1", args.synthetic)] if args.synthetic else [])]
    names = ["valid", "test", *(f"test{number}" for number in range(1, len(args.test_sets)))]
    sets = [short_name(test_set) for test_set in (args.valid, *args.test_sets)]
    with write_whole(args.out) as out:
        shards = [out / str(number) for number in range(args.shards)]
        for shard in shards:
            shard.mkdir()
        for language in args.pair:
            shutil.copyfile(args.vocabulary / "dict.txt", shards[0] / f"dict.{language}.txt")
        for name, prefix in parts:
            files = find_files(prefix, args.pair)
            pairs = read_pairs(map(read_text, files), files)
            kept, total = write_pairs(name, pairs, pieces, args, shards, (args.max_pieces, args.max_ratio))
            if kept < args.shards:
                raise ValueError(f"{kept} pairs of {prefix} are left for --shards {args.shards}")
            print(f"{name}: {kept:,} of {total:,} pairs", flush=True)
        for name, test_set in zip(names, sets, strict=True):
            texts = map(read_text, find_files(str(args.text / test_set), args.pair))
            pairs = ([line.decode("utf-8").rstrip("\n") for line in lines] for lines in zip(*texts, strict=True))
            write_pairs(name, pairs, pieces, args, shards[:1], None)  # all of them, in their order


def write_pairs(name: str, pairs, pieces: Pieces, args, shards: list[Path], limits) -> tuple[int, int]:
    """Write one part of the data.

    Args:
        name: fairseq's, such as train.
        pairs: of sentences, and None for those to be left out.
        pieces: what to cut them with.
        args: pair and workers.
        shards: the folders, to which pairs go in turn.
        limits: of pieces and ratio, as for `fits`, or None.

    Returns:
        How many pairs were written, and how many there were.
    """
    kept = total = 0
    with contextlib.ExitStack() as stack:
        files = [
            [
                stack.enter_context(
                    write_indexed(shard / f"{name}.{'-'.join(args.pair)}.{language}", len(pieces.dictionary))
                )
                for language in args.pair
            ]
            for shard in shards
        ]
        while batch := list(itertools.islice(pairs, BATCH)):
            total += len(batch)
            sides = map(pieces.encode, zip(*filter(None, batch), strict=True))
            for sentences in zip(*sides, strict=True):
                if limits and not fits(*(len(sentence) - 1 for sentence in sentences), *limits):
                    continue
                for append, sentence in zip(files[kept % len(files)], sentences, strict=True):
                    append(sentence)
                kept += 1
    return kept, total


def fits(first: int, second: int, most: int, ratio: float) -> bool:
    """Whether a training pair is neither empty nor too long nor too unequal."""
    return min(first, second) > 0 and max(first, second) <= min(most, ratio * min(first, second))


# --- a little text in the same form


def imitate(args) -> None:
    """Write archives as `download` expects them below ``--mirror``, their checksums, and more pairs as if synthetic."""
    pair = args.pair
    with write_whole(args.out) as out:
        names = {}
        for number, corpus in enumerate(list_corpora(other_than_english(pair))):
            part = slice(number * args.pairs, (number + 1) * args.pairs)
            members = {corpus.members.format(each): read_lines(args.data / f"train.{each}.xz")[part] for each in pair}
            names[Path(urlsplit(corpus.url).path).name] = write_archive(out, corpus.url, members)
        for number, test_set in enumerate(args.test_sets):
            dataset = find_dataset(test_set, pair)
            sentences = slice(number * args.test_pairs, (number + 1) * args.test_pairs)
            members = {
                member: [f'<seg id="{i}">{line}</seg>' for i, line in enumerate(lines[sentences], 1)]
                for member, lines in zip(
                    dataset.langpairs["-".join(pair)],
                    (read_lines(args.data / f"test.{each}.xz") for each in pair),
                    strict=True,
                )
            }
            (url,) = dataset.data
            path = write_archive(out, url, members)
            names[f"{short_name(test_set)}-{Path(urlsplit(url).path).name}"] = path
        write_sums(out, names)
        first = len(list_corpora(other_than_english(pair))) * args.pairs
        for each, suffix in zip(pair, OPENERS, strict=True):
            lines = read_lines(args.data / f"train.{each}.xz")[first : first + args.synthetic_pairs]
            with OPENERS[suffix](out / f"synthetic.{each}{suffix}", "wt", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))


def write_archive(out: Path, url: str, members: dict[str, list[str]]) -> Path:
    path = place_of(out, url)
    with tarfile.open(path, "w" if path.suffix == ".tar" else "w:gz") as tar:
        for name, lines in members.items():
            content = "".join(f"{line}\n" for line in lines).encode()
            content = gzip.compress(content) if name.endswith(".gz") else content
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


# --- the command line


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="STEP")

    def add(name: str, function, help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help)
        command.set_defaults(function=function)
        command.add_argument("--out", type=Path, required=True, help="folder to write")
        command.add_argument("--pair", type=read_pair, default="en-de", help="en-de, de-en, en-fr or fr-en")
        if function is not train_vocabulary:
            command.add_argument("--test-sets", nargs="+", default=["wmt13", "wmt14/full"], help="sacrebleu's names")
        return command

    command = add(
        "download", lambda args: download(list_archives(args.pair, args.test_sets), args), "fetch the archives"
    )
    add_download_arguments(command)
    command = add("text", extract, "take the text out of the archives")
    command.add_argument("--archives", type=Path, required=True, help="folder of the archives")
    command.add_argument("--sacrebleu", type=Path, required=True, help="folder of sacrebleu's own files")
    command.add_argument(
        "--further", nargs="*", default=[], metavar="PREFIX", help="more training text: PREFIX.LANGUAGE, also .gz, .xz"
    )
    command = add("vocabulary", train_vocabulary, "train SentencePiece")
    command.add_argument("--text", type=Path, required=True, help="folder of the text")
    command.add_argument("--size", type=int, default=32767, help="pieces (default: %(default)s)")
    command.add_argument("--sentences", type=int, default=4_000_000, help="to train on (default: %(default)s)")
    command.add_argument("--character-coverage", type=float, default=0.9995, help="(default: %(default)s)")
    command.add_argument("--workers", type=int, default=1, help="threads (default: %(default)s)")
    command = add("binarise", binarise, "cut the text into pieces and binarise it")
    command.add_argument("--text", type=Path, required=True, help="folder of the text")
    command.add_argument("--vocabulary", type=Path, required=True, help="folder of the model")
    command.add_argument("--valid", default="wmt13", help="sacrebleu's name (default: %(default)s)")
    command.add_argument("--synthetic", metavar="PREFIX", help="back-translated text: PREFIX.LANGUAGE, also .gz, .xz")
    command.add_argument("--shards", type=int, default=1, help="folders for the training data (default: %(default)s)")
    command.add_argument("--max-pieces", type=int, default=250, help="of a training sentence (default: %(default)s)")
    command.add_argument("--max-ratio", type=float, default=1.5, help="of a training pair (default: %(default)s)")
    command.add_argument("--workers", type=int, default=1, help="threads (default: %(default)s)")
    command = add("imitate", imitate, "archives of the same form from a little text")
    command.add_argument("--data", type=Path, required=True, help="folder with {train,test}.{LANGUAGE}.xz")
    command.add_argument("--pairs", type=int, default=60, help="in each training archive (default: %(default)s)")
    command.add_argument("--test-pairs", type=int, default=10, help="in each test set (default: %(default)s)")
    command.add_argument("--synthetic-pairs", type=int, default=180, help="(default: %(default)s)")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run(build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
