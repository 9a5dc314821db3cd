"""Each change to fairseq, with the fault it mends."""

import argparse
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, TINY, build, build_dictionary
from fairseq import checkpoint_utils, search, tasks, utils
from fairseq.data import Dictionary, FairseqDataset, ListDataset, MaskTokensDataset, data_utils
from fairseq.data.audio.data_cfg import S2TDataConfig
from fairseq.data.audio.speech_to_text_dataset import SpeechToTextDatasetCreator
from fairseq.file_io import PathManager
from fairseq.models.transformer import TransformerModel
from fairseq.tasks import FairseqTask
from families import FAMILIES, configure, make_data

from fairseq_sharing import upstream
from fairseq_sharing.upstream import checkpoint_files, hooks, moving_average


def test_checkpoints_load_with_weights_only(tmp_path):
    state = {
        "args": argparse.Namespace(arch="transformer"),
        "meters": [np.float64(1.5), np.int64(3), np.array([1, 2])],
        "model": {"w": torch.ones(2)},
    }
    torch.save(state, tmp_path / "checkpoint.pt")
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert loaded["args"].arch == "transformer" and loaded["meters"][:2] == [1.5, 3]


class Payload:
    """A pickle that would create a file when loaded without care."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_hostile_checkpoint_is_refused_and_does_not_run(tmp_path):
    torch.save({"model": {}, "cfg": Payload(tmp_path / "ran")}, tmp_path / "hostile.pt")
    with pytest.raises(pickle.UnpicklingError, match="_io.open|io.open"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "hostile.pt"))
    assert not (tmp_path / "ran").exists()


def test_applying_twice_changes_nothing():
    before = (utils.move_to_cpu, PathManager.copy, checkpoint_utils.torch_persistent_save)
    upstream.apply()
    assert before == (utils.move_to_cpu, PathManager.copy, checkpoint_utils.torch_persistent_save)


def test_what_upstream_no_longer_has_is_left_alone():
    owner = types.SimpleNamespace()
    upstream.replace(owner, "gone", max)
    upstream.replace(None, "gone", max)
    assert not vars(owner)


def test_move_to_cpu_keeps_aliases_apart_from_equals():
    one, equal = torch.ones(3, dtype=torch.float16), torch.ones(3, dtype=torch.float16)
    view = one[:2]
    assert utils.move_to_cpu(torch.eye(3).to_sparse()).is_sparse
    moved = utils.move_to_cpu({"a": one, "b": one, "c": equal, "d": [view], "n": 3, "empty": torch.empty(0)})
    assert moved["a"] is moved["b"] and moved["a"] is not moved["c"]
    assert moved["a"].dtype == torch.float32 and moved["d"][0].shape == (2,) and moved["n"] == 3


class WithoutAddress(torch.Tensor):
    """As on a TPU, whose tensors all say that they are at 0."""

    def data_ptr(self) -> int:
        return 0


def test_tensors_without_address_are_not_taken_for_one():
    one, two = (torch.full((3,), float(number)).as_subclass(WithoutAddress) for number in (1, 2))
    moved = utils.move_to_cpu({"one": one, "two": two, "again": one})
    assert moved["two"].tolist() == [2, 2, 2] and moved["again"] is moved["one"]
    assert moving_average.first_name_of({"one": one, "two": two}) == {"one": "one", "two": "two"}


def test_a_failed_copy_leaves_the_old_checkpoint(tmp_path, monkeypatch, caplog):
    source, target = tmp_path / "checkpoint1.pt", tmp_path / "checkpoint_last.pt"
    source.write_bytes(b"new" * 1000)
    target.write_bytes(b"old")

    def fill_the_disk(src, dst):
        with open(dst, "wb") as file:
            file.write(b"new")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_files.shutil, "copyfile", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        PathManager.copy(str(source), str(target), overwrite=True)
    assert target.read_bytes() == b"old" and [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []
    assert "No space left on device" in caplog.text and "checkpoint_last.pt" in caplog.text


def test_a_copy_appears_whole_and_through_links(tmp_path, monkeypatch):
    source, target, link = tmp_path / "new.pt", tmp_path / "old.pt", tmp_path / "checkpoint_last.pt"
    source.write_bytes(b"new")
    target.write_bytes(b"old")
    link.symlink_to(target)
    replaced = []
    monkeypatch.setattr(checkpoint_files.os, "replace", lambda a, b, real=os.replace: (replaced.append(b), real(a, b)))
    assert PathManager.copy(str(source), str(link), overwrite=True)
    assert link.is_symlink() and target.read_bytes() == b"new" and replaced == [str(target)]


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch, caplog):
    path = tmp_path / "checkpoint1.pt"
    path.write_bytes(b"old")

    def fill_the_disk(obj, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_utils, "_torch_persistent_save", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        checkpoint_utils.torch_persistent_save({}, str(path))
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["checkpoint1.pt"]
    assert "cannot write checkpoint" in caplog.text and "MiB are free there" in caplog.text


def test_an_average_in_the_models_place_keeps_aliases(tmp_path):
    tensor, equal = torch.ones(3, dtype=torch.float16), torch.ones(3, dtype=torch.float16)
    average = {"a": tensor, "b": tensor, "c": equal, "n": torch.tensor(1)}
    torch.save({"model": {}, "extra_state": {"ema": average}}, tmp_path / "a.pt")
    model = checkpoint_utils.load_ema_from_checkpoint(str(tmp_path / "a.pt"))["model"]
    assert model["a"] is model["b"] and model["a"] is not model["c"]
    assert all(torch.equal(model[key], value.float()) for key, value in average.items())


def test_speech_is_augmented_by_seed_epoch_and_clip(tmp_path, monkeypatch):
    """Not by what numpy's random numbers were used for before: a resumed run must see the same masks."""
    folder = str(make_data(tmp_path, sentences=8)["speech"])
    config, dictionary = S2TDataConfig(Path(folder, "config.yaml")), Dictionary.load(f"{folder}/dict.txt")

    def clip(index: int, epoch: int, seed: int = 1, part: str = "train"):
        dataset = SpeechToTextDatasetCreator.from_tsv(
            folder, config, part, dictionary, None, None, is_train_split=part == "train", epoch=1, seed=seed
        )
        dataset.set_epoch(epoch)
        return dataset[index].source

    np.random.seed(3)
    first, state = clip(0, epoch=1), np.random.get_state()[1].tolist()
    np.random.seed(4)
    assert torch.equal(clip(0, epoch=1), first)
    np.random.seed(3)
    assert np.random.get_state()[1].tolist() == state  # and leaves them alone
    assert not torch.equal(clip(0, epoch=2), first) and not torch.equal(clip(0, epoch=1, seed=2), first)
    masked = [clip(index, epoch=1).numpy() != np.load(f"{folder}/clip-train{index}.npy") for index in range(6)]
    assert len({each[:12].tobytes() for each in masked}) > 2  # of the twelve frames that every clip has
    assert torch.equal(clip(0, epoch=1, part="valid"), clip(0, epoch=2, part="valid"))
    # It would take numpy's state from a thread that loads what is for training.
    monkeypatch.setattr(data_utils, "numpy_seed", None)
    clip(0, epoch=1, part="valid")


def test_each_epoch_has_masks_of_its_own():
    """Of source and target alike, as in a dataset that begins with that epoch."""
    dictionary = build_dictionary()
    mask, sentences = dictionary.add_symbol("<mask>"), [torch.arange(4, 36) for _ in range(2)]

    def masked_parts() -> tuple:
        plain = ListDataset(sentences, np.full(2, 32))
        return MaskTokensDataset.apply_mask(plain, dictionary, dictionary.pad(), mask, mask_prob=0.5)

    def read(parts: tuple, epoch: int) -> list[torch.Tensor]:
        for part in parts:
            part.set_epoch(epoch)
        return [part[index] for part in parts for index in range(2)]

    parts = masked_parts()
    found = {epoch: read(parts, epoch) for epoch in (1, 2, 3)}
    for epoch, masked in found.items():
        assert all(map(torch.equal, masked, read(masked_parts(), epoch)))
        for source, target in zip(masked[:2], masked[2:], strict=True):
            changed = source.ne(sentences[0])
            assert changed.any() and target[changed].equal(sentences[0][changed])
    assert not any(map(torch.equal, found[1], found[2])) and not any(map(torch.equal, found[2], found[3]))


@pytest.mark.parametrize("name", ["speech", "masked language model"])
def test_data_workers_mask_as_the_process_itself(name, tmp_path):
    """In each epoch anew, and after resuming within the second."""
    config = configure(FAMILIES[name], make_data(tmp_path, sentences=20)[name], tmp_path / "save", stock=True)
    task = tasks.setup_task(config.task)

    def read(workers: int) -> list[list[torch.Tensor]]:
        task.load_dataset("train", combine=False, epoch=1)

        def batches(epoch: int):
            return task.get_batch_iterator(
                task.dataset("train"), max_sentences=8, num_workers=workers, data_buffer_size=10, epoch=epoch
            )

        iterator = batches(1)
        found = [[each["net_input"]["src_tokens"] for each in iterator.next_epoch_itr()] for _ in range(3)]
        place = {**iterator.state_dict(), "epoch": 2, "iterations_in_epoch": 1}
        task.load_dataset("train", combine=False, epoch=2)
        resumed = batches(2)
        resumed.load_state_dict(place)
        resumed = [each["net_input"]["src_tokens"] for each in resumed.next_epoch_itr()]
        assert len(resumed) == len(found[1]) - 1 and all(map(torch.equal, resumed, found[1][1:]))
        return found

    alone = read(0)
    for epoch, with_worker in zip(alone, read(1), strict=True):
        assert len(epoch) > 1 and all(map(torch.equal, epoch, with_worker))
    sums = [sum(float(batch.double().sum()) for batch in epoch) for epoch in alone]
    assert len(set(sums)) == 3  # the same sentences under other masks


def test_checks_come_before_loading(monkeypatch):
    seen = []
    monkeypatch.setattr(hooks, "LOADING_CHECKS", [lambda model, state: seen.append((type(model), state))])
    model = build("transformer", *TINY, "--encoder-layers", "1", "--decoder-layers", "1")
    state = model.state_dict()
    model.load_state_dict(state)
    assert seen == [(TransformerModel, state)]


@pytest.mark.parametrize("sentences", [1, 7, 8, 30, 50])
@pytest.mark.parametrize("max_tokens", [40, 200, 10_000])
def test_no_sentence_is_dropped_from_the_last_batch(sentences, max_tokens):
    batches = data_utils.batch_by_size(
        list(range(sentences)),
        num_tokens_fn=None,
        num_tokens_vec=np.full(sentences, 10),
        max_tokens=max_tokens,
        required_batch_size_multiple=8,
    )
    assert np.concatenate(batches).tolist() == list(range(sentences))
    assert all(len(batch) * 10 <= max_tokens for batch in batches)
    assert all(len(batch) % 8 == 0 or len(batch) < 8 for batch in batches[:-1])


def test_batches_may_be_asked_for_without_names():
    """As some tasks do that call upstream's function from their own."""

    class Sentences(FairseqDataset):
        def __getitem__(self, index):
            return torch.arange(4, 36)

        def __len__(self):
            return 6

        def num_tokens(self, index):
            return 32

        def num_tokens_vec(self, indices):
            return np.full(len(indices), 32)

        def size(self, index):
            return 32

    dataset = Sentences()
    names = {"max_sentences": 2, "seed": 3, "epoch": 2}
    in_order = (None, 2, None, False, 1, 3, 1, 0, 0, 2)  # max_tokens to epoch
    found = []
    for args, kwargs in (((), names), (in_order, {})):
        task = FairseqTask(None)
        task.seed_counts_epochs = True
        iterator = task.get_batch_iterator(dataset, *args, **kwargs)
        assert iterator.epoch == 2 and iterator.seed == 2
        found.append([batch.tolist() for batch in iterator.frozen_batches])
    assert found[0] == found[1] and sum(map(len, found[0])) == 6


def test_a_script_keeps_a_function_of_the_same_name(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(
        "def add_defaults(parser, extra=1):\n    return 'mine'\nimport fairseq_sharing\nprint(add_defaults(1, 2))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout.splitlines()[-1] == "mine"


def test_a_model_is_told_of_an_update_once():
    """With --amp upstream calls its function for training anew where a batch overflowed."""
    told = []
    model = types.SimpleNamespace(after_update=lambda trainer, samples: told.append(samples))
    trainer = types.SimpleNamespace(updates=0, get_model=lambda: model)
    trainer.get_num_updates = lambda: trainer.updates

    def overflow(self, samples, retried=False):
        if not retried:
            return hooks.tell_model_about_update(overflow, self, samples, retried=True)
        self.updates += 1

    for number in (1, 2):
        hooks.tell_model_about_update(overflow, trainer, number)
        assert told == list(range(1, number + 1))


def test_diverse_beams_compare_a_sentence_with_itself():
    """Whatever the sentences' numbers in the data, and when some of a batch are finished."""

    def search_three_steps(numbers: list[int]) -> list[torch.Tensor]:
        strategy = search.DiverseBeamSearch(build_dictionary(), num_groups=2, diversity_strength=0.5)
        numbers, scores, found = torch.tensor(numbers), torch.zeros(3, 4, 3), []
        for step, left in enumerate(([0, 1, 2], [0, 1, 2], [0, 2])):
            probabilities = torch.randn(3, 4, 40, generator=torch.Generator().manual_seed(step)).log_softmax(-1)
            found += strategy.step(step, probabilities[left], scores[left, :, :step], None, numbers[left])
        return found

    expected = search_three_steps([0, 1, 2])
    for numbers in ([2, 0, 1], [700, 30, 4]):
        assert all(map(torch.equal, search_three_steps(numbers), expected))


def test_diverse_beams_can_be_scripted():
    """TorchScript compiles upstream's own function, as it does without the plugin."""
    torch.jit.script(search.DiverseBeamSearch(build_dictionary(), num_groups=2, diversity_strength=0.5))
