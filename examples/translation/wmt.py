"""Fetch the text of WMT's translation task and cut it into pieces, in steps that can each be stopped and repeated.

    download     archives, each whole and with a known checksum; one that was cut off is gone on with
    text         training text out of the archives; validation and test sets, read by sacrebleu
    vocabulary   a joint SentencePiece BPE model, and its pieces as a dictionary of fairseq
    pieces       all text in these pieces, without training pairs that are too long or too unequal
    imitate      archives of the same form from a little text of your own, to try the others without a network

Training text is read line by line: memory does not grow with it.

Example:
    python examples/translation/wmt.py download --pair en-de --out download
    python examples/translation/wmt.py text --pair en-de --archives download --out text
    python examples/translation/wmt.py vocabulary --text text --out vocabulary
    python examples/translation/wmt.py pieces --text text --vocabulary vocabulary --out pieces
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

STATMT = "https://www.statmt.org"
BATCH = 20_000  # lines


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


def clean(line: bytes) -> str | None:
    """Return a sentence on one line, or None where it is empty or not UTF-8."""
    try:
        return " ".join(line.decode("utf-8").split()) or None
    except UnicodeDecodeError:
        return None


def extract_training(corpus: Corpus, archive: Path, pair: tuple[str, str], files: dict) -> None:
    """Append the sentence pairs of an archive to one file for each language.

    Raises:
        ValueError: the archive cannot be read, or its two texts have different numbers of lines.
    """
    members = [corpus.members.format(language) for language in pair]
    kept = number = 0
    for number, lines in enumerate(itertools.zip_longest(*(read_member(archive, name) for name in members)), 1):
        if None in lines:
            raise ValueError(f"{archive}: {members[0]} and {members[1]} differ in length, from line {number} on")
        sentences = [clean(line) for line in lines]
        if None not in sentences:
            kept += 1
            for language, sentence in zip(pair, sentences, strict=True):
                files[language].write(f"{sentence}\n")
    print(f"{archive.name}: {kept:,} of {number:,} pairs", flush=True)


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
            files = {
                language: stack.enter_context((out / f"train.{language}").open("w", encoding="utf-8", newline="\n"))
                for language in args.pair
            }
            for corpus in list_corpora(other_than_english(args.pair)):
                extract_training(corpus, args.archives / Path(urlsplit(corpus.url).path).name, args.pair, files)
        for test_set in args.test_sets:
            extract_test_set(test_set, args.pair, args.archives, out, short_name(test_set))


# --- pieces


def find_languages(text: Path) -> list[str]:
    languages = sorted(path.suffix[1:] for path in text.glob("train.*"))
    if len(languages) != 2:
        raise ValueError(f"--text {text} does not hold training text in two languages")
    return languages


def train_vocabulary(args) -> None:
    """Write SentencePiece's model and fairseq's dictionary."""
    import sentencepiece

    languages = find_languages(args.text)
    with write_whole(args.out) as out:
        try:
            sentencepiece.SentencePieceTrainer.train(
                input=[str(args.text / f"train.{language}") for language in languages],
                model_prefix=str(out / "spm"),
                model_type="bpe",
                vocab_size=args.size,
                character_coverage=args.character_coverage,
                input_sentence_size=args.sentences,
                shuffle_input_sentence=True,
                num_threads=args.workers,
                minloglevel=1,
            )
        except RuntimeError as error:
            raise ValueError(f"--size {args.size} does not suit the training text: {error}") from error
        model = sentencepiece.SentencePieceProcessor(model_file=str(out / "spm.model"))
        pieces = [
            model.id_to_piece(number)
            for number in range(len(model))
            if not (model.is_unknown(number) or model.is_control(number))
        ]
        (out / "dict.txt").write_text("".join(f"{piece} 1\n" for piece in pieces), "utf-8", newline="\n")
    print(f"{len(pieces):,} pieces, {len(pieces) + 4:,} symbols with those of fairseq")


def cut(args) -> None:
    """Write every part of the text in pieces."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(args.vocabulary / "spm.model"))
    languages = find_languages(args.text)
    parts = sorted({path.stem for path in args.text.iterdir()})
    with write_whole(args.out) as out:
        for part in parts:
            kept = total = 0
            with contextlib.ExitStack() as stack:
                texts = [
                    stack.enter_context((args.text / f"{part}.{language}").open(encoding="utf-8", newline="\n"))
                    for language in languages
                ]
                files = [
                    stack.enter_context((out / f"{part}.{language}").open("w", encoding="utf-8", newline="\n"))
                    for language in languages
                ]
                while batch := list(itertools.islice(zip(*texts, strict=True), BATCH)):
                    total += len(batch)
                    sides = [
                        model.encode([line.rstrip("\n") for line in side], out_type=str, num_threads=args.workers)
                        for side in zip(*batch, strict=True)
                    ]
                    for sentences in zip(*sides, strict=True):
                        if part == "train" and not fits(*map(len, sentences), args.max_pieces, args.max_ratio):
                            continue
                        kept += 1
                        for file, pieces in zip(files, sentences, strict=True):
                            file.write(" ".join(pieces) + "\n")
            if not kept:
                raise ValueError(f"no pair of {part} is left")
            print(f"{part}: {kept:,} of {total:,} pairs", flush=True)


def fits(first: int, second: int, most: int, ratio: float) -> bool:
    """Whether a training pair is neither empty nor too long nor too unequal."""
    return min(first, second) > 0 and max(first, second) <= min(most, ratio * min(first, second))


# --- a little text in the same form


def imitate(args) -> None:
    """Write archives as `download` expects them below ``--mirror``, and their checksums."""
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

    def add(name: str, function, help: str, of_pair: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help)
        command.set_defaults(function=function)
        command.add_argument("--out", type=Path, required=True, help="folder to write")
        if of_pair:
            command.add_argument("--pair", type=read_pair, default="en-de", help="en-de, de-en, en-fr or fr-en")
            command.add_argument("--test-sets", nargs="+", default=["wmt13", "wmt14/full"], help="sacrebleu's names")
        return command

    command = add(
        "download", lambda args: download(list_archives(args.pair, args.test_sets), args), "fetch the archives"
    )
    add_download_arguments(command)
    command = add("text", extract, "take the text out of the archives")
    command.add_argument("--archives", type=Path, required=True, help="folder of the archives")
    command.add_argument("--sacrebleu", type=Path, required=True, help="folder of sacrebleu's own files")
    command = add("vocabulary", train_vocabulary, "train SentencePiece", of_pair=False)
    command.add_argument("--text", type=Path, required=True, help="folder of the text")
    command.add_argument("--size", type=int, default=32767, help="pieces (default: %(default)s)")
    command.add_argument("--sentences", type=int, default=4_000_000, help="to train on (default: %(default)s)")
    command.add_argument("--character-coverage", type=float, default=0.9995, help="(default: %(default)s)")
    command.add_argument("--workers", type=int, default=1, help="threads (default: %(default)s)")
    command = add("pieces", cut, "cut the text into pieces", of_pair=False)
    command.add_argument("--text", type=Path, required=True, help="folder of the text")
    command.add_argument("--vocabulary", type=Path, required=True, help="folder of the model")
    command.add_argument("--max-pieces", type=int, default=250, help="of a training sentence (default: %(default)s)")
    command.add_argument("--max-ratio", type=float, default=1.5, help="of a training pair (default: %(default)s)")
    command.add_argument("--workers", type=int, default=1, help="threads (default: %(default)s)")
    command = add("imitate", imitate, "archives of the same form from a little text")
    command.add_argument("--data", type=Path, required=True, help="folder with {train,test}.{LANGUAGE}.xz")
    command.add_argument("--pairs", type=int, default=100, help="in each training archive (default: %(default)s)")
    command.add_argument("--test-pairs", type=int, default=10, help="in each test set (default: %(default)s)")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run(build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
