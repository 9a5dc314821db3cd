"""Archives fetched from public hosts, each whole and with a known checksum: what the recipes' programs have in common.

Imported by them, not run.
"""

import argparse
import contextlib
import hashlib
import http.client
import io
import lzma
import os
import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

SUMS = "SHA256SUMS"
BLOCK = 1 << 20  # bytes


def read_sums(path: Path) -> dict[str, str]:
    """Read a file as sha256sum writes it: name -> checksum.

    Raises:
        ValueError: it cannot be read, or has other lines.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    sums = {}
    for line in lines:
        digest, gap, name = line.partition("  ")
        if not gap or len(digest) != 64:
            raise ValueError(f"{path} has a line that is no SHA-256 checksum and name: {line!r}")
        sums[name] = f"sha256:{digest}"
    return sums


def compute_checksum(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"


def check_archive(path: Path, expected: str) -> None:
    """Compare a file with its checksum.

    Raises:
        ValueError: they differ.
    """
    found = compute_checksum(path, expected.partition(":")[0])
    if found != expected:
        raise ValueError(f"{path} has the checksum {found}, and {expected} is expected")


def open_url(url: str, offset: int):
    """Open a URL from a byte on.

    Returns:
        The stream, how many bytes are to come (None when the server does not tell), and the byte it begins at.
    """
    if url.startswith("file:"):  # urllib reads such files from their first byte on
        file = Path(urllib.request.url2pathname(urlsplit(url).path)).open("rb")  # noqa: SIM115
        file.seek(offset)
        return file, max(0, os.fstat(file.fileno()).st_size - offset), offset
    headers = {"User-Agent": "fairseq_sharing", **({"Range": f"bytes={offset}-"} if offset else {})}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # there is nothing behind the last byte that we have
            return io.BytesIO(), 0, offset
        raise
    length = response.headers.get("Content-Length")
    return response, length and int(length), offset if response.status == 206 else 0


def fetch(url: str, path: Path, checksum: str | None) -> None:
    """Download a file; what an earlier call left is gone on with.

    Args:
        url: http, https or file.
        path: where to; beside it lies NAME.partial until the file is whole.
        checksum: ``algorithm:digest``, or None.

    Raises:
        ValueError: the file cannot be had, was cut off, does not fit on the disk, or has another checksum.
    """
    partial = path.with_name(f"{path.name}.partial")
    offset = partial.stat().st_size if partial.exists() else 0
    try:
        stream, length, offset = open_url(url, offset)
        with stream:
            free = shutil.disk_usage(path.parent).free
            if length is not None and length > free:
                raise ValueError(
                    f"{url} has {length / 1e9:.2f} GB to come, and {path.parent} has {free / 1e9:.2f} GB free"
                )
            with partial.open("ab" if offset else "wb") as file:
                while block := stream.read(BLOCK):
                    file.write(block)
    except (OSError, http.client.HTTPException) as error:  # urllib's errors are OSErrors
        raise ValueError(f"cannot download {url} to {path}: {getattr(error, 'reason', None) or error}") from error
    size = partial.stat().st_size
    if length is not None and size < offset + length:
        raise ValueError(
            f"{url} was cut off after {size:,} of {offset + length:,} bytes: the same command goes on from there"
        )
    if checksum:
        try:
            check_archive(partial, checksum)
        except ValueError as error:
            partial.unlink()
            raise ValueError(f"{url} is not what it was: {error}; it is deleted here") from error
    partial.rename(path)


def add_download_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--mirror", metavar="URL", help="fetch from here in place of the original host; file:// works")
    command.add_argument("--checksums", type=Path, metavar="FILE", help="in place of the known ones, as of sha256sum")


def download(archives: dict[str, tuple[str, str | None]], args) -> None:
    """Fetch archives into ``args.out``; those that are there are only compared with their checksums.

    Args:
        archives: for each, by its name in the folder, where it is, and its checksum if that is known: if not, that of
            the first download is kept, and later ones are compared with it.
        args: out, and the flags of `add_download_arguments`.

    Raises:
        ValueError: one of them cannot be had, or is not what it was.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    given = read_sums(args.checksums) if args.checksums else {}
    sums = args.out / SUMS
    kept = read_sums(sums) if sums.exists() else {}
    for name, (url, known) in archives.items():
        path = args.out / name
        expected = (given.get(name) if args.checksums else known) or kept.get(name)
        if path.exists():
            if expected:
                check_archive(path, expected)
            print(f"{name}: already there")
        else:
            place = urlsplit(url)
            fetch(f"{args.mirror.rstrip('/')}{place.path}" if args.mirror else url, path, expected)
            print(f"{name}: {path.stat().st_size:,} bytes, {'checksum as expected' if expected else 'checksum kept'}")
        if name not in kept:
            kept[name] = compute_checksum(path, "sha256")
            with sums.open("a", encoding="utf-8") as file:
                file.write(f"{kept[name].partition(':')[2]}  {name}\n")


def check_downloaded(folder: Path, names) -> None:
    """Refuse archives that `download` has not fetched or that changed since.

    Raises:
        ValueError: with the name of the first one.
    """
    sums = read_sums(folder / SUMS)
    for name in names:
        if name not in sums or not (folder / name).exists():
            raise ValueError(f"--archives {folder} has no {name}: download it first")
        check_archive(folder / name, sums[name])


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file that xz compressed.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
            return file.read().split("\n")
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"--data: cannot read {path}: {error}") from error


def write_sums(folder: Path, archives: dict[str, Path]) -> None:
    """Write the checksums of files, by the names that `download` gives them."""
    sums = {name: compute_checksum(path, "sha256").partition(":")[2] for name, path in archives.items()}
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()), "utf-8")


def place_of(mirror: Path, url: str) -> Path:
    """Return where a file of this URL is below a mirror, in a folder that is made."""
    path = mirror / urlsplit(url).path.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def write_whole(out: Path):
    """Write a folder that is whole or not there; an existing one is kept.

    Raises:
        ValueError: it is there already.
    """
    if out.exists():
        raise ValueError(f"--out {out} exists: remove it or choose another")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def run(parser: argparse.ArgumentParser, argv: list[str] | None) -> int:
    """Call the function of the step that was asked for; return 2 after one sentence when it cannot be done."""
    args = parser.parse_args(argv)
    try:
        args.function(args)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0
