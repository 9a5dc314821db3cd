"""Long runs: killed at any moment, and without growing."""

import gc
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from commands import Command
from fairseq import checkpoint_utils
from families import EVERY_FAMILY, FAMILIES, configure, load_whole, make_data, run_train, train_words
from test_checkpoint import assert_same, count_updates

KILLS = 22
UPDATES = 1500  # more than a fast machine comes to between the kills


def read(path) -> dict | None:
    """Return a checkpoint, which must be whole when it is there."""
    return load_whole(path) if path.exists() else None


class Timer:
    """Becomes true after some seconds."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds

    def __call__(self) -> bool:
        return time.monotonic() > self.end


def wait_for(command: Command, happened) -> None:
    """Wait until something happens or the command has ended."""
    while command.process.is_alive() and not happened():
        time.sleep(0.001)


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_as_an_uninterrupted_one(tmp_path):
    """By SIGKILL, at random moments: while starting, while training, and as soon as a file is being written.

    A checkpoint after every second update, three names for some of them, old ones removed, dropout on.
    """
    family, seed = FAMILIES["translation"], random.randrange(10**6)
    draw = random.Random(seed)
    print(f"seed {seed}")
    data = make_data(tmp_path / "data")["translation"]
    flags = [
        *(*family.sets(2), "--dropout", 0.3, "--max-update", UPDATES, "--store-ema", "--ema-update-freq", 3),
        *("--save-interval-updates", 2, "--keep-interval-updates", 2, "--keep-last-epochs", 2),
    ]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    last = killed / "checkpoint_last.pt"
    resumed_at, while_writing = [], 0
    for number in range(KILLS):
        before = read(last)
        command = Command(["fairseq-train", *train_words(family, data, killed, *flags)])
        if number % 4 == 0:  # at any moment, most often before the first update
            wait_for(command, Timer(draw.uniform(0, 8)))
        else:
            stamp = last.stat().st_mtime_ns if last.exists() else None
            wait_for(command, lambda stamp=stamp: last.exists() and last.stat().st_mtime_ns != stamp)
            wait_for(command, Timer(draw.uniform(0, 0.5)))
            if number % 2:
                wait_for(command, lambda: any(killed.glob("*.tmp")))
                time.sleep(draw.uniform(0, 0.003))
        command.process.kill()
        status, out, err = command.wait()
        assert status == -signal.SIGKILL, f"{status} after {resumed_at}\n{out[-3000:]}\n{err[-3000:]}"
        while_writing += any(killed.glob("*.tmp"))
        assert len(list(killed.glob("*.tmp"))) <= 3
        for path in killed.glob("*.pt"):
            read(path)
        found = re.search(r"Loaded checkpoint .* @ (\d+) updates", out + err)
        if found:
            assert int(found[1]) == count_updates(before)
            resumed_at.append(int(found[1]))
    assert len(set(resumed_at)) > KILLS // 2 and sorted(resumed_at) == resumed_at and while_writing

    for folder in (killed, whole):
        status, out, err = Command(["fairseq-train", *train_words(family, data, folder, *flags)]).wait()
        assert status == 0, err[-3000:]
    assert {path.name for path in killed.iterdir()} == {path.name for path in whole.iterdir()}
    for path in sorted(whole.glob("*.pt")):
        one, other = load_whole(killed / path.name), load_whole(path)
        for part in ("model", "last_optimizer_state"):
            assert_same(one[part], other[part], f"{path.name} {part}")
        for part in ("ema", "train_iterator", "best", "val_loss"):
            assert_same(one["extra_state"][part], other["extra_state"][part], f"{path.name} {part}")
        assert one["optimizer_history"][-1] == other["optimizer_history"][-1]
    print(f"{KILLS} kills, {while_writing} of them while a file was written; resumed at {resumed_at}")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"), sentences=28)


def live_tensors() -> tuple[int, int]:
    """Return the number of tensors that are not frozen, and the bytes of what they are views of."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return len(tensors), sum(storages.values())


@EVERY_FAMILY
def test_no_tensor_outlives_its_epoch(name, folders, tmp_path, monkeypatch):
    """With validation, saving and a moving average, after each epoch as many tensors exist as after the first.

    Their bytes differ by those of the last batch, which are other sentences each time.
    """
    found, save = [], checkpoint_utils.save_checkpoint

    def count(*args, **kwargs):
        save(*args, **kwargs)
        found.append(live_tensors())

    monkeypatch.setattr(checkpoint_utils, "save_checkpoint", count)
    count.best = None
    flags = [*FAMILIES[name].sets(2), "--store-ema", "--max-epoch", 4, "--max-update", 1000]
    gc.freeze()  # what was there before is not looked at, which takes most of the time
    try:
        run_train(configure(FAMILIES[name], folders[name], tmp_path, *flags))
    finally:
        gc.unfreeze()
    numbers, sizes = zip(*found, strict=True)
    assert len(numbers) == 4 and len(set(numbers)) == 1 and sizes[-1] < 1.02 * sizes[1], found


def resident_bytes(process: int) -> int:
    """Return the resident memory of a process, or 0 when it has ended."""
    try:
        with open(f"/proc/{process}/statm") as file:
            return int(file.read().split()[1]) * 4096
    except (FileNotFoundError, ProcessLookupError):
        return 0


# Each process keeps a copy of the model in each epoch.
LEAK = """
import fairseq.trainer
save, kept = fairseq.trainer.Trainer.save_checkpoint, []
def save_and_keep(self, *args):
    kept.append([parameter.detach().clone() for parameter in self.model.parameters()])
    return save(self, *args)
fairseq.trainer.Trainer.save_checkpoint = save_and_keep
"""


def largest_in_each_epoch(name: str, folder, leak: bool = False) -> dict[int, int]:
    """Train five million parameters for ten epochs, with validation and saving; return the largest resident memory.

    glibc raises the size from which it gives freed blocks back to the system to that of the largest one freed: from
    then on the memory of gradients stays with the process, in pieces that depend on their order, whatever is alive. So
    the process starts with that size fixed, and what is resident is what is in use.
    """
    family = FAMILIES[name]
    width, ffn, depth, sets = (512, 2048, 4, 2) if len(family.stacks) == 1 else (256, 1024, 6, 3)
    flags = [*family.sets(sets), "--max-epoch", 10, "--max-update", 10_000, "--lr", 1e-4]
    for stack in family.stacks:
        flags += [f"--{stack}-embed-dim", width, f"--{stack}-ffn-embed-dim", ffn, f"--{stack}-layers", depth]
    save_dir = folder / "save"
    words = train_words(family, make_data(folder / "data", sentences=100)[name], save_dir, *flags)
    code = f"{LEAK if leak else ''}\nfrom fairseq_cli.train import cli_main\ncli_main()"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**17)}
    samples: dict[int, list[int]] = {}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen([sys.executable, "-c", code, *words], env=environment, stdout=log, stderr=log)
        while process.poll() is None:
            done = sum((save_dir / f"checkpoint{epoch}.pt").exists() for epoch in range(1, 11))
            samples.setdefault(done + 1, []).append(resident_bytes(process.pid))
            time.sleep(0.005)
    assert process.returncode == 0, (folder / "log").read_text("utf-8")[-3000:]
    shutil.rmtree(save_dir)
    largest = {epoch: max(found) for epoch, found in samples.items()}
    print({epoch: f"{found / 2**20:.1f} MiB" for epoch, found in largest.items()})
    return largest


@pytest.mark.slow
@EVERY_FAMILY
def test_resident_memory_does_not_grow(name, tmp_path):
    """From the second epoch to the tenth: the largest of all samples of an epoch."""
    largest = largest_in_each_epoch(name, tmp_path)
    assert largest[10] < 1.02 * largest[2], largest


@pytest.mark.slow
def test_a_copy_of_the_model_that_stays_would_be_noticed(tmp_path):
    largest = largest_in_each_epoch("masked language model", tmp_path, leak=True)
    assert largest[3] > 1.02 * largest[2] and largest[10] > 1.2 * largest[2], largest
