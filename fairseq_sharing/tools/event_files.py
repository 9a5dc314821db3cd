"""Validation loss over training, read from TensorBoard's event files.

They do not tell when training went on after a stop, so the time before the first entry of each process is taken from
its updates per second.
"""

import logging
import math
from datetime import datetime, timedelta
from pathlib import Path

from .logs import Clock, Validation


def read_events(folder: Path) -> list[Validation]:
    """Read the validations that ``--tensorboard-logdir`` wrote, one folder for each subset and those of training.

    Raises:
        ValueError: no validation in it, or no TensorBoard to read it.
    """
    sessions = read_sessions(folder)
    subsets = sorted({kind for session in sessions for _, kind, _, _ in session} - {"train", "train_inner"})
    if not subsets:
        raise ValueError(f"{folder} has no validation: it is no folder of --tensorboard-logdir, or none was done yet")
    subset = "valid" if "valid" in subsets else subsets[0]
    clock, found = Clock(), {}
    for session in sessions:
        for number, (stamp, kind, updates, values) in enumerate(session):
            if number == 0 and clock.known != {0: 0.0}:
                before = max((update for update in clock.known if update < updates), default=0)
                rate = values.get("ups") or math.inf
                clock.stamp = stamp - timedelta(seconds=(updates - before) / rate)
                clock.resume(before)
            clock.stamp = stamp
            if "wall" in values:
                clock.tick(updates, values["wall"])
            if kind == subset and math.isfinite(values.get("nll_loss", values.get("loss", math.nan))):
                found[updates] = Validation(
                    updates=updates,
                    loss=values.get("nll_loss", values.get("loss")),
                    in_bits="ppl" in values,
                    minutes=clock.minutes(updates),
                )
    if not found:
        raise ValueError(f"{folder} has no validation loss in {subset}")
    return [found[updates] for updates in sorted(found)]


def read_sessions(folder: Path) -> list[list[tuple[datetime, str, int, dict[str, float]]]]:
    """Return for each process that wrote into the folder its entries in the order of time.

    An entry is the time, the subset or kind of training, the updates, and the values that were written together.
    """
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise ValueError("reading TensorBoard's files needs tensorboard: pip install tensorboard") from None

    logging.getLogger("tensorboard").setLevel(logging.WARNING)  # importing fairseq opens the root logger
    entries: dict[str, dict[tuple[str, int], tuple[datetime, dict]]] = {}
    for file in sorted(folder.glob("*/*tfevents*")):
        # events.out.tfevents.<seconds>.<host>.<process>.<number of the writer>
        process = file.name.partition("tfevents.")[2].partition(".")[2].rpartition(".")[0]
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if not value.HasField("tensor") or value.tensor.string_val:
                    continue
                key = (file.parent.name, event.step)
                stamp = datetime.fromtimestamp(event.wall_time)
                entry = entries.setdefault(process, {}).setdefault(key, (stamp, {}))
                entry[1][value.tag] = float(make_ndarray(value.tensor))
    sessions = [
        sorted(((stamp, *key, values) for key, (stamp, values) in found.items()), key=lambda entry: entry[0])
        for found in entries.values()
    ]
    return sorted(sessions, key=lambda session: session[0][0])
