"""Validation loss over training, read from the logs of fairseq-train, plain or .xz; pace and parameters too.

The log of a resumed run is read as one run: an update that was validated twice counts once, with its last value, and
the time between stop and resumption is left out. fairseq's own ``wall`` tells the time up to the first resumption, the
time stamps of the log do from there on: after a resumption ``wall`` stands still or starts again, and is only added up
where there are no time stamps, as in --log-file.
"""

import json
import lzma
import math
import re
import statistics
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) \| ")
SIMPLE_VALID = re.compile(r"epoch \d+ \| valid on '([^']+)' subset \| (.*)")
SIMPLE_WALL = re.compile(r"num_updates=([\d.e+]+).*\bwall=([\d.e+]+)")  # from a million on fairseq writes 1e+06
JSON_LINE = re.compile(r'\{"epoch": .*\}\s*$')
PARAMETERS = re.compile(r"shared model params: ([\d,]+)")
RESUMED = re.compile(r"Loaded checkpoint .* @ (\d+) updates")


@dataclass
class Validation:
    """One validation.

    Attributes:
        updates: updates done before it.
        loss: negative log-likelihood, in bits per token where the log has a perplexity, else the criterion's loss.
        in_bits: whether ``loss`` is in bits, so that perplexity is 2^loss.
        minutes: training time before it; None when the log does not tell.
    """

    updates: int
    loss: float
    in_bits: bool
    minutes: float | None


class Clock:
    """Training time while a log is read, over stops and resumptions.

    Attributes:
        stamp: the time stamp of the line being read; None when it has none.
    """

    def __init__(self):
        self.stamp: datetime | None = None
        self.start: datetime | None = None  # when training would have begun, had it never stopped
        self.wall: float | None = None  # fairseq's last word, until the first resumption; seconds
        self.before = 0.0  # seconds before fairseq's clock started again, in a log without time stamps
        self.known = {0: 0.0}  # seconds at an update
        self.resumed = False

    def tick(self, updates: int, wall: float) -> None:
        """Take in a line of training."""
        if not self.resumed:
            if self.stamp is None and self.wall is not None and wall < self.wall:
                self.before = self.known[max(update for update in self.known if update < updates)]
            self.wall = wall
            if self.stamp and self.start is None:  # once: fairseq rounds its clock, and time must not run backwards
                self.start = self.stamp - timedelta(seconds=wall)
        seconds = self.seconds()
        if seconds is not None:
            self.known[updates] = seconds

    def resume(self, updates: int) -> None:
        """Set the clock to what it showed at the last update before the one that is resumed from."""
        self.resumed, self.wall = True, None
        before = self.known[max(update for update in self.known if update <= updates)]
        self.start = self.stamp - timedelta(seconds=before) if self.stamp else None

    def seconds(self) -> float | None:
        """Return the seconds of training until the line being read."""
        if self.stamp and self.start:
            return (self.stamp - self.start).total_seconds()
        return None if self.wall is None else self.before + self.wall

    def minutes(self, updates: int) -> float | None:
        """Return the minutes of training until the line being read, and remember them for this update."""
        seconds = self.seconds()
        if seconds is None:
            return None
        self.known[updates] = seconds
        return seconds / 60


def read_validations(path: Path) -> list[Validation]:
    """Read the validations of a log or of a TensorBoard folder, in the order of updates; the first subset counts.

    Raises:
        ValueError: no such file, or no validation in it.
    """
    if path.is_dir():
        from .event_files import read_events

        return read_events(path)
    found, subset = {}, None
    clock = Clock()
    for line in read_lines(path):
        stamp = STAMP.match(line)
        clock.stamp = datetime.fromisoformat(stamp[1]) if stamp else None
        if resumed := RESUMED.search(line):
            clock.resume(int(resumed[1]))
            continue
        record = JSON_LINE.search(line)
        record = parse_json(record[0]) if record else None
        if simple := SIMPLE_WALL.search(line):
            clock.tick(int(float(simple[1])), float(simple[2]))
            continue
        if record and {"wall", "num_updates"} <= record.keys():
            clock.tick(int(float(record["num_updates"])), float(record["wall"]))
            continue
        name, values = parse_json_validation(record) if record else parse_simple_validation(line)
        if values is None or name != (subset or name):
            continue
        subset = name
        updates = int(float(values["num_updates"]))
        found[updates] = Validation(
            updates=updates,
            loss=float(values.get("nll_loss", values["loss"])),
            in_bits="ppl" in values,
            minutes=clock.minutes(updates),
        )
    if not found:
        raise ValueError(f"{path} has no validation line of fairseq-train (simple or json log format)")
    return [found[updates] for updates in sorted(found)]


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file, which may be compressed (``.xz``).

    Raises:
        ValueError: it cannot be read.
    """
    try:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def interval_median(lines: list[str], name: str) -> float:
    """Return the median of what fairseq-train has logged after each interval under a name, such as ``ups``.

    Args:
        lines: of a log, simple or JSON.
        name: of the value.

    Raises:
        ValueError: the log has no such value.
    """
    simple = re.compile(rf"train_inner .*\b{name}=([\d.e+]+)")
    found = []
    for line in lines:
        record = JSON_LINE.search(line)
        values = (parse_json(record[0]) if record else None) or {}
        if name in values:
            found.append(float(values[name]))
        elif match := simple.search(line):
            found.append(float(match[1]))
    if not found:
        raise ValueError(f"the log has no {name} of an interval: training was shorter than --log-interval")
    return statistics.median(found)


def unique_parameters(lines: list[str]) -> int:
    """Return how many parameters fairseq-train has counted, each shared one once.

    Raises:
        ValueError: no line of the log tells.
    """
    for line in lines:
        if match := PARAMETERS.search(line):
            return int(match[1].replace(",", ""))
    raise ValueError("the log has no line with the number of parameters (num. shared model params)")


def parse_json(text: str) -> dict | None:
    try:
        return json.loads(text)
    except ValueError:
        return None


def parse_simple_validation(line: str) -> tuple[str | None, dict | None]:
    """Return subset and values of a line of ``--log-format simple``, or (None, None)."""
    match = SIMPLE_VALID.search(line)
    if not match:
        return None, None
    fields = (field.strip().rpartition(" ") for field in match[2].split("|"))
    return check_values(match[1], {key: value for key, _, value in fields})


def parse_json_validation(record: dict) -> tuple[str | None, dict | None]:
    """Return subset and values of a line of ``--log-format json``, or (None, None)."""
    for key in record:
        if key.startswith("valid") and key.endswith("_num_updates"):
            subset = key.removesuffix("_num_updates")
            prefix = f"{subset}_"
            values = {key.removeprefix(prefix): value for key, value in record.items() if key.startswith(prefix)}
            return check_values(subset, values)
    return None, None


def check_values(subset: str, values: dict) -> tuple[str | None, dict | None]:
    """Pass only a whole line with finite numbers: the last line of a stopped run may be cut off."""
    try:
        numbers = [float(values["num_updates"]), float(values.get("nll_loss", values["loss"]))]
    except (KeyError, TypeError, ValueError):
        return None, None
    return (subset, values) if all(map(math.isfinite, numbers)) else (None, None)
