"""Fetch WikiText-103 and take the text out of its archive, in steps that can each be stopped and repeated.

    download    the archive, whole and with its checksum; one that was cut off is gone on with
    text        its three texts, for fairseq-preprocess --only-source
    imitate     an archive of the same form from a little text of your own, to try the others without a network

Example:
    python examples/language_modeling/wikitext103.py download --out archives
    python examples/language_modeling/wikitext103.py text --archives archives --out text
"""

import argparse
import shutil
import sys
import zipfile
from pathlib import Path

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

NAME = "wikitext-103-v1.zip"
# The archive of words, not the one of raw characters. The address in fairseq's prepare-wikitext-103.sh is closed since
# 2024; this one is of the corpus's first author. The checksum is the one that Apple's mlx-data has for the old address;
# the new address gives as its ETag the MD5 that torchtext has for the old one.
ARCHIVES = {
    NAME: (
        f"https://wikitext.smerity.com/{NAME}",
        "sha256:242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    )
}
SPLITS = ("train", "valid", "test")


def member_of(split: str) -> str:
    return f"wikitext-103/wiki.{split}.tokens"


def extract(args) -> None:
    """Write the three texts.

    Raises:
        ValueError: the archive is not the one that was downloaded, is damaged, or has not all of them.
    """
    check_downloaded(args.archives, ARCHIVES)
    with write_whole(args.out) as out:
        for split in SPLITS:
            path = out / f"wiki.{split}.tokens"
            try:
                with zipfile.ZipFile(args.archives / NAME) as archive, path.open("wb") as file:
                    shutil.copyfileobj(archive.open(member_of(split)), file)
            except (zipfile.BadZipFile, EOFError, KeyError, OSError) as error:
                raise ValueError(f"cannot read {member_of(split)} in {args.archives / NAME}: {error}") from error
            with path.open("rb") as file:
                print(f"{split}: {sum(1 for _ in file):,} lines", flush=True)


def imitate(args) -> None:
    """Write an archive as `download` expects it below ``--mirror``, and its checksum.

    Lines of 40 words that begin and end with a space, and lines that are only a space, as there.
    """
    with write_whole(args.out) as out:
        path = place_of(out, ARCHIVES[NAME][0])
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for split, most in zip(SPLITS, args.words, strict=True):
                words = " ".join(read_lines(args.data / f"{split}.txt.xz")).split()[:most]
                lines = [" ".join(words[first : first + 40]) for first in range(0, len(words), 40)]
                archive.writestr(member_of(split), "".join(f" {line} \n \n" for line in lines))
        write_sums(out, {NAME: path})


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="STEP")

    def add(name: str, function, help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help)
        command.set_defaults(function=function)
        command.add_argument("--out", type=Path, required=True, help="folder to write")
        return command

    command = add("download", lambda args: download(ARCHIVES, args), "fetch the archive")
    add_download_arguments(command)
    command = add("text", extract, "take the texts out of the archive")
    command.add_argument("--archives", type=Path, required=True, help="folder of the archive")
    command = add("imitate", imitate, "an archive of the same form from a little text")
    command.add_argument("--data", type=Path, required=True, help="folder with {train,valid,test}.txt.xz")
    command.add_argument(
        "--words", nargs=3, type=int, default=[12000, 1000, 1000], help="of each text (default: %(default)s)"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    return run(build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
