"""Write a folder that is whole or not there, also where the program is stopped."""

import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def write_whole_folder(out: Path, resume: bool = False) -> Iterator[Path]:
    """Give an empty folder beside ``out`` that becomes ``out`` at the end, and vanishes if there is an error or a stop.

    SIGTERM ends the program by an exception, with status 143. Python swallows an exception raised while it runs certain
    callbacks, and extensions turn it into others: so that it was raised is remembered.

    Args:
        out: what is not there yet; the folder given is ``.NAME.partial``.
        resume: go on in the folder that an error or a stop has left, and leave it to the next call.
    """
    stopped = []

    def stop(*_):
        stopped.append(True)
        sys.exit(143)

    signal.signal(signal.SIGTERM, stop)
    partial = out.with_name(f".{out.name}.partial")
    if not resume:
        shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True, exist_ok=resume)
        yield partial
        if not stopped:
            partial.rename(out)
    finally:
        if not resume:
            shutil.rmtree(partial, ignore_errors=True)
        if stopped:
            sys.exit(143)
