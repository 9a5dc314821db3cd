"""A progress bar on a terminal, plain lines elsewhere; both on standard error."""

import sys
from collections.abc import Iterable, Iterator

LINES = 10  # at most so many for one piece of work


def progress(items: Iterable, what: str, total: int | None = None) -> Iterator:
    """Yield the items and show how far the work is.

    Args:
        items: what is worked through.
        what: the work, such as ``measuring``.
        total: how many there are, where ``len(items)`` does not tell.
    """
    total = len(items) if total is None else total
    if sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(items, desc=what, total=total, leave=False)
        return
    shown = 0
    for number, item in enumerate(items, 1):
        if total > 1 and number * LINES // total > shown:
            shown = number * LINES // total
            print(f"{what}: {number} of {total}", file=sys.stderr)
        yield item
