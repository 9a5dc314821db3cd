"""`scripts/prepare_speech.py`: filterbanks against a second implementation, what it writes, and how it fails."""

import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import prepare_speech
import pytest
import soundfile
import yaml
from conftest import REPOSITORY
from fairseq.data.audio.audio_utils import get_features_or_waveform

CLIPS = REPOSITORY / "examples" / "speech_to_text" / "data"
REAL = sorted((CLIPS / "clips").glob("*.flac"))


# --- filterbanks ---


def mel(frequency):
    return 1127 * np.log(1 + np.asarray(frequency) / 700)


def reference_filterbanks(samples: np.ndarray, rate: int, bins: int = 80) -> np.ndarray:
    """Kaldi's log-mel filterbanks written from their definition, in double precision.

    Windows of 25 ms every 10 ms, whole ones only; mean removed; pre-emphasis 0.97, the first sample against itself;
    povey window, that is Hann to the power of 0.85; power spectrum of the next power of two; triangles at equal
    distances on the mel scale from 20 Hz to half the rate; natural logarithm, floored at float32's epsilon.
    """
    length, shift = rate * 25 // 1000, rate * 10 // 1000
    padded = 1 << (length - 1).bit_length()
    starts = range(0, len(samples) - length + 1, shift)
    frames = np.stack([samples[start : start + length] for start in starts]).astype(np.float64)
    frames -= frames.mean(1, keepdims=True)
    frames -= 0.97 * np.concatenate([frames[:, :1], frames[:, :-1]], 1)
    frames *= (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / (length - 1))) ** 0.85
    power = np.abs(np.fft.rfft(frames, padded)) ** 2
    edges = np.linspace(mel(20), mel(rate / 2), bins + 2)
    points = mel(np.arange(padded // 2) * rate / padded)
    rising = (points[None] - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - points[None]) / (edges[2:] - edges[1:-1])[:, None]
    triangles = np.maximum(0, np.minimum(rising, falling))
    return np.log(np.maximum(power[:, :-1] @ triangles.T, np.finfo(np.float32).eps))


@pytest.mark.parametrize("path", REAL[::6], ids=lambda path: path.stem)
def test_filterbanks_of_real_speech_are_kaldis(path):
    samples = prepare_speech.read_audio(path, 16000, resample=False)
    assert 1000 < np.abs(samples).max() <= 2**15
    features = prepare_speech.compute_filterbanks(samples, 16000)
    expected = reference_filterbanks(samples, 16000)
    assert features.shape == expected.shape == (1 + (len(samples) - 400) // 160, 80)
    assert features.dtype == np.float32
    # Kaldi computes in single precision, whose rounding shows in bins that are 70 dB below the loudest of their frame
    # (these clips are 8 kHz recordings: there is nothing above 4 kHz).
    error, quiet = np.abs(features - expected), expected < expected.max(1, keepdims=True) - 7 * np.log(10)
    assert error[~quiet].max() < 1e-3 and error[quiet].max() < 1e-2 and quiet.mean() < 0.5
    assert np.quantile(error, 0.99) < 1e-3


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_filterbanks_of_noise_at_any_rate(rate):
    samples = np.random.default_rng(0).normal(0, 1000, rate // 2).astype(np.float32)
    features = prepare_speech.compute_filterbanks(samples, rate)
    assert np.abs(features - reference_filterbanks(samples, rate)).max() < 1e-3


def test_silence_is_the_floor():
    features = prepare_speech.compute_filterbanks(np.zeros(4000, np.float32), 16000)
    assert np.allclose(features, np.log(np.finfo(np.float32).eps), atol=1e-3)


@pytest.mark.parametrize(
    ("suffix", "subtype"), [("wav", "PCM_16"), ("flac", "PCM_16"), ("ogg", "VORBIS"), ("opus", "OPUS")]
)
def test_every_format_reads_alike(tmp_path, suffix, subtype):
    samples, rate = soundfile.read(REAL[0], dtype="float32")
    path = tmp_path / f"clip.{suffix}"
    soundfile.write(path, samples, rate, format="OGG" if suffix in ("ogg", "opus") else suffix.upper(), subtype=subtype)
    read = prepare_speech.read_audio(path, 16000, resample=False)
    assert np.corrcoef(read[: len(samples)], samples[: len(read)])[0, 1] > 0.98
    if subtype == "PCM_16":
        assert np.array_equal(read, samples * 2**15)


def test_channels_are_averaged_and_rates_converted(tmp_path):
    time = np.arange(8000) / 8000
    tone = 0.5 * np.sin(2 * np.pi * 440 * time)
    soundfile.write(tmp_path / "a.wav", np.stack([tone, np.zeros(8000)], 1), 8000, subtype="FLOAT")
    read = prepare_speech.read_audio(tmp_path / "a.wav", 16000, resample=True)
    expected = 0.25 * 2**15 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    assert len(read) == 16000 and np.abs(read - expected)[500:-500].max() < 30


# --- the whole program ---


def command(out: Path, *flags, vocabulary=("--vocab-type", "char")) -> list[str]:
    splits = [word for part in ("train", "valid", "test") for word in (f"--{part}", CLIPS / f"{part}.tsv")]
    return list(map(str, ["--audio-root", CLIPS, *splits, *vocabulary, "--out", out, *flags]))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    assert prepare_speech.main(command(folder / "zip")) == 0
    assert prepare_speech.main(command(folder / "npy", "--features", "npy", "--specaugment", "none")) == 0
    return folder


def load(folder: Path, part: str):
    from fairseq.tasks.speech_to_text import SpeechToTextTask

    task = SpeechToTextTask.setup_task(
        prepare_speech.argparse.Namespace(data=str(folder), config_yaml="config.yaml", seed=1, train_subset="train")
    )
    task.load_dataset(part)
    return task, task.datasets[part]


@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_fairseq_reads_what_is_written(prepared, part):
    (_, zipped), (task, plain) = load(prepared / "zip", part), load(prepared / "npy", part)
    lines = (CLIPS / f"{part}.tsv").read_text("utf-8").splitlines()[1:]
    assert len(zipped) == len(plain) == len(lines) == (20 if part == "train" else 4)
    for number, line in enumerate(lines):
        audio, text, speaker = line.split("\t")
        assert (plain.ids[number], plain.speakers[number], plain.tgt_texts[number]) == (audio, speaker, text)
        features = plain[number].source.numpy()
        raw = reference_filterbanks(prepare_speech.read_audio(CLIPS / audio, 16000, False), 16000)
        assert np.abs(features - (raw - raw.mean(0)) / raw.std(0)).max() < 1e-2  # utterance CMVN
        known = "".join(
            letter if letter in f" {''.join(task.target_dictionary.symbols)}" else "<unk>" for letter in text
        )
        assert task.target_dictionary.string(plain[number].target, "sentencepiece") == known
        assert known == text or part != "train"
        masked = (zipped[number].source.numpy() != features).mean()
        assert (masked > 0) == (part == "train")  # SpecAugment, while training only


def test_the_dictionary_is_the_vocabulary(prepared):
    letters = {
        letter for line in (CLIPS / "train.tsv").read_text("utf-8").splitlines()[1:] for letter in line.split("\t")[1]
    }
    lines = (prepared / "zip" / "dict.txt").read_text("utf-8").splitlines()
    assert sorted(line.removesuffix(" 1") for line in lines) == sorted(letters - {" "} | {"▁"})
    config = yaml.safe_load((prepared / "zip" / "config.yaml").read_text("utf-8"))
    assert config["feature_transforms"]["_train"] == ["utterance_cmvn", "specaugment"]
    assert config["specaugment"]["freq_mask_N"] == 2
    assert not list(prepared.glob(".*"))


# --- wrong input ---


def fails(capsys, out: Path, *argv) -> str:
    """Run it with input that must be refused in one sentence; nothing may be left behind."""
    assert prepare_speech.main(list(map(str, argv))) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.strip().splitlines()) == 1
    assert not out.exists() and not list(out.parent.glob(".*.partial"))
    return captured.err


@pytest.mark.parametrize(
    ("tsv", "sentence"),
    [
        ("audio\ttext\n", "lists no clips"),
        ("", "the first line must name the columns audio and text, separated by tabs; it names nothing"),
        ("path\ttext\na.wav\tyes\n", "it names path, text"),
        ("audio,text\na.wav,yes\n", "it names audio,text"),
        ("audio\ttext\na.wav\t \n", "line 2: a.wav has no text"),
        ("audio\ttext\na.wav\n", "line 2: must have 2 columns"),
        ("audio\ttext\na.wav\tyes\tno\n", "line 2: must have 2 columns"),
        ("audio\ttext\na.wav\tyes\na.wav\tno\n", "line 3: a.wav is listed twice"),
        pytest.param(f"audio\ttext\na.wav\t{'y' * 200000}\n", "is not a TSV: field larger than", id="no end"),
        ("audio\ttext\nmissing.wav\tyes\n", "line 2: there is no audio file"),
        ("audio\ttext\nnoise.wav\tyes\n", "cannot read the audio of"),
        ("audio\ttext\nshort.wav\tyes\n", "is shorter than one window of 25 ms"),
        ("audio\ttext\nslow.wav\tyes\n", "has 8000 samples a second and must have --sample-rate 16000: add --resample"),
    ],
)
def test_wrong_clips_are_refused(tmp_path, capsys, tsv, sentence):
    soundfile.write(tmp_path / "a.wav", np.full(8000, 0.1), 16000)
    soundfile.write(tmp_path / "slow.wav", np.full(8000, 0.1), 8000)
    soundfile.write(tmp_path / "short.wav", np.full(300, 0.1), 16000)
    (tmp_path / "noise.wav").write_text("this is no audio")
    (tmp_path / "train.tsv").write_text(tsv, "utf-8")
    out = tmp_path / "out"
    argv = ["--audio-root", tmp_path, "--train", tmp_path / "train.tsv", "--vocab-type", "char", "--out", out]
    assert sentence in fails(capsys, out, *argv)


@pytest.mark.parametrize("part", ["valid", "test"])
@pytest.mark.parametrize(
    ("tsv", "sentence"),
    [("audio\ttext\n", "lists no clips"), ("audio\ttext\nmissing.wav\tyes\n", "line 2: there is no audio file")],
)
def test_each_part_needs_clips_and_audio(tmp_path, capsys, part, tsv, sentence):
    (tmp_path / "wrong.tsv").write_text(tsv, "utf-8")
    argv = command(tmp_path / "out")
    argv[argv.index(f"--{part}") + 1] = tmp_path / "wrong.tsv"
    assert sentence in fails(capsys, tmp_path / "out", *argv)


@pytest.mark.parametrize(
    ("vocabulary", "sentence"),
    [
        (["--vocab-size", "5000"], "--vocab-size 5000 is too large: 20 training transcripts yield at most"),
        (["--vocab-size", "10"], "--vocab-size 10 is too small: the characters of the training transcripts alone need"),
        (["--vocab-type", "char", "--vocab-size", "10"], "--vocab-size goes with --vocab-type unigram"),
        ([], "--vocab-size goes with --vocab-type unigram"),
    ],
)
def test_wrong_vocabularies_are_refused(tmp_path, capsys, vocabulary, sentence):
    out = tmp_path / "out"
    assert sentence in fails(capsys, out, *command(out, vocabulary=vocabulary))


def test_wrong_folders_are_refused(tmp_path, capsys):
    (tmp_path / "there").mkdir()
    assert prepare_speech.main(command(tmp_path / "there")) == 2
    assert "exists: remove it or name another" in capsys.readouterr().err
    out = tmp_path / "a:b"
    assert "add --features npy" in fails(capsys, out, *command(out))
    out = tmp_path / "no" / "out"
    assert "there is no folder" in fails(capsys, out, *command(out))
    out = tmp_path / "out"
    argv = ["--audio-root", tmp_path / "no", "--train", CLIPS / "train.tsv", "--vocab-type", "char", "--out", out]
    assert "no such folder" in fails(capsys, out, *argv)
    argv = ["--audio-root", CLIPS, "--train", tmp_path / "no.tsv", "--vocab-type", "char", "--out", out]
    assert "no such file" in fails(capsys, out, *argv)
    (tmp_path / "latin.tsv").write_bytes("audio\ttext\na.wav\tschön\n".encode("latin-1"))
    argv[argv.index(tmp_path / "no.tsv")] = tmp_path / "latin.tsv"
    assert "is not UTF-8" in fails(capsys, out, *argv)


@pytest.mark.parametrize("python", ["raises it", "swallows it", "makes it another error"])
def test_a_stopped_preparation_leaves_nothing(tmp_path, monkeypatch, python):
    real = prepare_speech.write_vocabulary

    def write_vocabulary(*args):
        real(*args)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit:
            if python == "raises it":
                raise
            if python == "makes it another error":
                raise ValueError("from an extension") from None

    monkeypatch.setattr(prepare_speech, "write_vocabulary", write_vocabulary)
    with pytest.raises(SystemExit) as stopped:
        prepare_speech.main(command(tmp_path / "out"))
    assert stopped.value.code == 143
    assert not list(tmp_path.iterdir())


def test_what_fairseq_logs_elsewhere_is_not_silenced(tmp_path):
    """fairseq-train in the same process would show nothing of its training."""
    assert prepare_speech.main(command(tmp_path / "out")) == 0
    assert logging.getLogger("fairseq").level == logging.NOTSET


def test_nothing_asks_for_a_package_that_is_not_needed(tmp_path):
    """One of fairseq's tasks does when it is imported, in each process once."""
    script = [sys.executable, prepare_speech.__file__, *map(str, command(tmp_path / "out"))]
    for line in (script, [sys.executable, "-c", "import fairseq_sharing, fairseq.tasks"]):
        done = subprocess.run(line, capture_output=True, text=True, check=True, cwd=REPOSITORY)
        assert "tensorboardX" not in done.stdout + done.stderr


def test_further_parts_have_their_own_names(tmp_path, capsys):
    argv = command(tmp_path / "out")
    further = ["--part", "test-other", CLIPS / "valid.tsv", "--part", "dev_2", CLIPS / "test.tsv"]
    assert prepare_speech.main([*argv, *map(str, further)]) == 0
    assert re.findall(r"^(\S+): (\d+) clips", capsys.readouterr().out, re.MULTILINE) == [
        *(("train", "20"), ("valid", "4"), ("test", "4"), ("test-other", "4"), ("dev_2", "4"))
    ]
    assert load(tmp_path / "out", "test-other")[1].ids == load(tmp_path / "out", "valid")[1].ids
    for name in ("test", "a/b"):
        sentence = f"--part {name} must be a further name"
        assert sentence in fails(capsys, tmp_path / "no", *command(tmp_path / "no"), "--part", name, CLIPS / "test.tsv")


def test_resume_knows_other_audio_of_the_same_name(tmp_path):
    for folder, content in (("a", b"one"), ("b", b"one"), ("c", b"longer")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.wav").write_bytes(content)
        os.utime(tmp_path / folder / "x.wav", ns=(1, 1))

    def known_by(folder: str, rate: int = 16_000) -> bytes:
        return prepare_speech.fingerprint(rate, {"x.wav": tmp_path / folder / "x.wav"})

    first = known_by("a")
    assert first == known_by("a") and len({first, known_by("b"), known_by("c"), known_by("a", 8000)}) == 4
    (tmp_path / "a" / "x.wav").write_bytes(b"two")
    assert known_by("a") != first


def test_a_stopped_preparation_goes_on_with_resume(tmp_path, capsys, monkeypatch):
    """28 clips in zips of 6: stopped in the fourth, the next call computes what is not in the first three."""
    monkeypatch.setattr(prepare_speech, "CLIPS_IN_ZIP", 6)
    real, read = prepare_speech.read_audio, []

    def read_audio(path, *args):
        read.append(path)
        if len(read) == 21:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(path, *args)

    monkeypatch.setattr(prepare_speech, "read_audio", read_audio)
    with pytest.raises(SystemExit) as stopped:
        prepare_speech.main(command(tmp_path / "out", "--resume"))
    assert stopped.value.code == 143
    assert not (tmp_path / "out").exists() and len(list((tmp_path / ".out.partial").glob("*.zip"))) == 4
    assert prepare_speech.main(command(tmp_path / "out", "--resume")) == 0
    assert len(read) == 21 + 28 - 18 and not list(tmp_path.glob(".*"))

    monkeypatch.setattr(prepare_speech, "CLIPS_IN_ZIP", 10_000)
    assert prepare_speech.main(command(tmp_path / "whole")) == 0
    for part in ("train", "valid", "test"):
        ours, whole = (load(tmp_path / name, part)[1] for name in ("out", "whole"))
        assert (ours.ids, ours.n_frames, ours.tgt_texts) == (whole.ids, whole.n_frames, whole.tgt_texts)
        for one, other in zip(ours.audio_paths, whole.audio_paths, strict=True):
            assert np.array_equal(get_features_or_waveform(one), get_features_or_waveform(other))

    # What was kept is in another order: only the last zip, of the clips of --test, is taken.
    (tmp_path / "out").rename(tmp_path / ".other.partial")
    argv = command(tmp_path / "other", "--resume")
    argv[argv.index("--train") + 1], argv[argv.index("--valid") + 1] = CLIPS / "valid.tsv", CLIPS / "train.tsv"
    before = len(read)
    monkeypatch.setattr(prepare_speech, "CLIPS_IN_ZIP", 6)
    assert prepare_speech.main(list(map(str, argv))) == 0
    assert len(read) - before == 24
    capsys.readouterr()
    assert "--resume needs --features zip, not npy" in fails(
        capsys, tmp_path / "no", *command(tmp_path / "no", "--resume", "--features", "npy")
    )
