"""Fetch LibriSpeech and list its clips, in steps that can each be stopped and repeated.

    download    archives of openslr.org/12, each whole and with its checksum; one that was cut off is gone on with
    unpack      the audio and transcripts of each archive as one folder; those that are there are kept
    manifests   a TSV for prepare_speech.py: all training sets in one, and each other set by itself
    imitate     archives of the same form from a few clips of your own, to try the others without a network

Example:
    python examples/speech_to_text/librispeech.py download --out archives
    python examples/speech_to_text/librispeech.py unpack --archives archives --out audio
    python examples/speech_to_text/librispeech.py manifests --audio audio --out tsv
"""

import argparse
import shutil
import sys
import tarfile
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from archives import add_download_arguments, check_downloaded, download, place_of, run, write_sums, write_whole

# The sets of the corpus, and the MD5 of their archives as openslr.org/resources/12/md5sum.txt has them.
SETS = {
    "train-clean-100": "2a93770f6d5c6c964bc36631d331a522",
    "train-clean-360": "c0e676e450a7ff2f54aeade5171606fa",
    "train-other-500": "d1a0fd59409feb2c614ce4d30c387708",
    "dev-clean": "42e2234ba48799c1f50f24a7926300a1",
    "dev-other": "c8d0bcc9cca99d4f8b62fcc847357931",
    "test-clean": "32fa31d27d2e1cad72775fee3f4849a9",
    "test-other": "fb5a50374b501bb3bac4815ee91d3135",
}
ROOT = "LibriSpeech"  # the folder in the archives


def read_set(text: str) -> str:
    """Read the name of a set.

    Raises:
        argparse.ArgumentTypeError: there is no such set.
    """
    if text not in SETS:
        raise argparse.ArgumentTypeError(f"{text} is none of {', '.join(SETS)}")
    return text


def url_of(name: str) -> str:
    return f"https://www.openslr.org/resources/12/{name}.tar.gz"


def list_archives(names: list[str]) -> dict[str, tuple[str, str]]:
    """Return for each archive, by its name in the folder of downloads, where it is and its checksum."""
    return {f"{name}.tar.gz": (url_of(name), f"md5:{SETS[name]}") for name in names}


def unpack(args) -> None:
    """Write each set as a folder that is whole or not there."""
    for name in args.sets:
        folder = args.out / name
        if folder.exists():
            print(f"{name}: already there", flush=True)
            continue
        check_downloaded(args.archives, list_archives([name]))
        with write_whole(folder) as partial:
            clips = unpack_set(args.archives / f"{name}.tar.gz", name, partial)
        print(f"{name}: {clips:,} clips", flush=True)


def unpack_set(archive: Path, name: str, out: Path) -> int:
    """Write the audio and the transcripts of a set, and return how many clips it has.

    Raises:
        ValueError: the archive is damaged, holds no clip of this set, or files outside of its folder.
    """
    clips, folder = 0, PurePosixPath(ROOT, name)
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if not member.isfile() or folder not in path.parents:
                    continue
                if ".." in path.parts:
                    raise ValueError(f"{archive} holds {member.name}, which is outside of {folder}")
                target = out / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                with tar.extractfile(member) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file)
                clips += path.suffix == ".flac"
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"cannot unpack {archive}: {error}") from error
    if not clips:
        raise ValueError(f"{archive} has no clips in {folder}")
    return clips


def list_clips(audio: Path, name: str) -> list[tuple[str, str, str]]:
    """Return (audio, text, speaker) of each clip of a set, in the order of their names.

    Text is in lower case, as fairseq's preparation has it.

    Raises:
        ValueError: the set is not there, or a line of a transcript is none.
    """
    clips = []
    for path in sorted((audio / name).glob("*/*/*.trans.txt")):
        for line in path.read_text("utf-8").splitlines():
            clip, _, text = line.partition(" ")
            if not text.strip():
                raise ValueError(f"{path} has a line that is no name and text: {line!r}")
            speaker, chapter, _ = path.relative_to(audio / name).parts
            clips.append((f"{name}/{speaker}/{chapter}/{clip}.flac", text.lower(), speaker))
    if not clips:
        raise ValueError(f"--audio {audio} has no transcripts of {name}: unpack it first")
    return sorted(clips)


def write_manifests(args) -> None:
    """Write ``train.tsv``, and a TSV for each set that is not for training."""
    parts = {"train": [name for name in args.sets if name.startswith("train-")]}
    parts |= {name: [name] for name in args.sets if name not in parts["train"]}
    if not parts["train"]:
        raise ValueError(f"--sets {' '.join(args.sets)}: none of them is for training")
    with write_whole(args.out) as out:
        for part, names in parts.items():
            clips = [clip for name in names for clip in list_clips(args.audio, name)]
            lines = ["\t".join(line) for line in (("audio", "text", "speaker"), *clips)]
            (out / f"{part}.tsv").write_text("\n".join(lines) + "\n", "utf-8", newline="\n")
            print(f"{part}: {len(clips):,} clips", flush=True)


def imitate(args) -> None:
    """Write archives as `download` expects them below ``--mirror``, and their checksums.

    The clips of train.tsv, valid.tsv and test.tsv go in turn to the sets for training, development and test.
    """
    with write_whole(args.out) as out:
        paths = {}
        for kind, part in (("train", "train"), ("dev", "valid"), ("test", "test")):
            names = [name for name in SETS if name.startswith(f"{kind}-")]
            _, *rows = (args.data / f"{part}.tsv").read_text("utf-8").splitlines()
            for turn, name in enumerate(names):
                clips = [row.split("\t")[:2] for row in rows[turn :: len(names)]]
                paths[f"{name}.tar.gz"] = write_archive(out, name, args.data, clips)
        write_sums(out, paths)


def write_archive(out: Path, name: str, data: Path, clips: list[list[str]]) -> Path:
    """Write the archive of a set, of one speaker and one chapter; clips are (audio, text)."""
    speaker, chapter = str(1 + list(SETS).index(name)), "1"
    path = place_of(out, url_of(name))
    folder = f"{ROOT}/{name}/{speaker}/{chapter}"
    transcript = path.with_suffix(".txt")
    with tarfile.open(path, "w:gz") as tar:
        lines = []
        for number, (audio, text) in enumerate(clips):
            clip = f"{speaker}-{chapter}-{number:04d}"
            tar.add(data / audio, f"{folder}/{clip}.flac")
            lines.append(f"{clip} {text.upper()}\n")
        transcript.write_text("".join(lines), "utf-8")
        tar.add(transcript, f"{folder}/{speaker}-{chapter}.trans.txt")
    transcript.unlink()
    return path


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="STEP")

    def add(name: str, function, help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help)
        command.set_defaults(function=function)
        command.add_argument("--out", type=Path, required=True, help="folder to write")
        command.add_argument("--sets", nargs="+", type=read_set, default=list(SETS), help="default: all seven")
        return command

    command = add("download", lambda args: download(list_archives(args.sets), args), "fetch the archives")
    add_download_arguments(command)
    command = add("unpack", unpack, "take audio and transcripts out of the archives")
    command.add_argument("--archives", type=Path, required=True, help="folder of the archives")
    command = add("manifests", write_manifests, "list the clips")
    command.add_argument("--audio", type=Path, required=True, help="folder of the unpacked sets")
    command = add("imitate", imitate, "archives of the same form from a few clips; always of all sets")
    command.add_argument("--data", type=Path, required=True, help="folder with {train,valid,test}.tsv and their audio")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run(build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
