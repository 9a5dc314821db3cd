"""The quick start, and its data preparation, on real sentence pairs cut from the example's data."""

import fcntl
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import prepare_translation
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PREPARE = REPOSITORY / "scripts/prepare_translation.py"
QUICKSTART = REPOSITORY / "examples/translation/quickstart.sh"
DATA = REPOSITORY / "examples/translation/data"
SIZES = {"train": 300, "valid": 24, "test": 24}


def environment(**settings) -> dict:
    """Return an environment in which this test's Python comes first and nothing of the caller's settings is left."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "LC_ALL", "TMPDIR") if name in os.environ}
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in settings.items()}}


def cut(part: str, language: str, count: int) -> list[str]:
    with lzma.open(DATA / f"{part}.{language}.xz", "rt", encoding="utf-8", newline="\n") as file:
        return [next(file).rstrip("\n") for _ in range(count)]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for part, count in SIZES.items():
        for language in ("en", "de"):
            write(folder / f"{part}.{language}", cut(part, language, count))
    return folder


def prepare(*arguments, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PREPARE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), **options)


def flags(folder: Path, out: Path, **replaced) -> list:
    """Return the arguments that prepare ``folder`` into ``out``, some of them replaced."""
    chosen = {"source-lang": ["en"], "target-lang": ["de"], "vocab-size": [300], "out": [out]}
    chosen |= {part: [folder / f"{part}.en", folder / f"{part}.de"] for part in SIZES}
    chosen |= {name.replace("_", "-"): value for name, value in replaced.items()}
    return [word for name, value in chosen.items() if value for word in (f"--{name}", *value)]


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "data"
    result = prepare(*flags(corpus, out, max_pieces=[80]))
    assert result.returncode == 0, result.stderr
    return out


# --- the data of the example


def test_example_data_is_aligned_and_as_its_readme_says():
    readme = (DATA / "README.md").read_text("utf-8")
    for part in SIZES:
        texts = [lzma.decompress((DATA / f"{part}.{language}.xz").read_bytes()).decode() for language in ("en", "de")]
        lines = [text.removesuffix("\n").split("\n") for text in texts]
        assert len(lines[0]) == len(lines[1])
        assert [len(text.splitlines()) for text in texts] == [len(side) for side in lines]
        assert all(all(side) for side in lines)
        words = [sum(len(line.split()) for line in side) for side in lines]
        assert f"| {part} | {len(lines[0]):,} | {words[0]:,} | {words[1]:,} |" in readme
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 5 * 2**20
    assert "Mozilla Public License Version 2.0" in (DATA / "LICENSE").read_text("utf-8")


# --- preparation


def test_prepared_data_reads_back(corpus, prepared):
    from fairseq.data import Dictionary
    from fairseq.data.indexed_dataset import MMapIndexedDataset
    from sentencepiece import SentencePieceProcessor

    manifest = json.loads((prepared / "prepared.json").read_text())
    model = SentencePieceProcessor(model_file=str(prepared / "spm.model"))
    dictionary = Dictionary.load(str(prepared / "bin/dict.de.txt"))
    assert len(dictionary) == 300 + 1  # the model has <unk>, <s>, </s>; fairseq's dictionary has <pad> beside them
    assert (prepared / "bin/dict.en.txt").read_bytes() == (prepared / "bin/dict.de.txt").read_bytes()
    for part, count in SIZES.items():
        for language in ("en", "de"):
            raw = (prepared / f"text/{part}.{language}").read_text("utf-8").splitlines()
            data = MMapIndexedDataset(str(prepared / f"bin/{part}.en-de.{language}"))
            assert len(raw) == len(data) == manifest["pairs"][part]
            assert dictionary.string(data[3]).split() == model.encode(raw[3], out_type=str)
        if part != "train":  # long sentences are left out of training only
            assert manifest["pairs"][part] == count
            assert raw == (corpus / f"{part}.de").read_text("utf-8").splitlines()
    train = MMapIndexedDataset(str(prepared / "bin/train.en-de.de"))  # owns the memory of its sizes
    assert manifest["pairs"]["train"] < SIZES["train"]
    assert max(train.sizes) <= 80 + 1
    assert not list(prepared.parent.glob(".*"))


def test_second_preparation_does_nothing_and_other_settings_are_refused(corpus, prepared):
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    again = prepare(*flags(corpus, prepared, max_pieces=[80]))
    assert again.returncode == 0
    assert "nothing to do" in again.stdout
    other = prepare(*flags(corpus, prepared, max_pieces=[80], vocab_size=[250]))
    assert other.returncode == 2
    assert "--vocab-size 300, not 250" in other.stderr
    changed = prepare(*flags(corpus, prepared, max_pieces=[80], test=[corpus / "valid.en", corpus / "valid.de"]))
    assert changed.returncode == 2
    assert "--test with other contents" in changed.stderr
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*")} == before


def bad_inputs(folder: Path, corpus: Path) -> dict:
    """Return case -> (replaced arguments, what the sentence must name)."""
    english = cut("train", "en", 60)
    short = write(folder / "short.de", cut("train", "de", 59))
    gap = write(folder / "gap.en", [*english[:40], " ", *english[41:]])
    (folder / "latin1.de").write_bytes("Datei\nÜberschrift\n".encode("latin-1"))
    (folder / "cut.en.xz").write_bytes((DATA / "train.en.xz").read_bytes()[:5000])
    source, target = write(folder / "ok.en", english), write(folder / "ok.de", cut("train", "de", 60))
    pair = [source, target]
    return {
        "lengths": ({"train": [source, short]}, ["--train", "ok.en has 60 lines", "short.de has 59"]),
        "empty line": ({"train": [gap, target]}, ["gap.en, line 41", "empty"]),
        "missing": ({"train": [folder / "no.en", target]}, ["no such file", "no.en"]),
        "not UTF-8": ({"train": [source, folder / "latin1.de"]}, ["latin1.de, line 2", "UTF-8"]),
        "cut xz": ({"train": [folder / "cut.en.xz", target]}, ["cut.en.xz", "xz"]),
        "vocabulary too large": ({"train": pair, "vocab_size": [8000]}, ["--vocab-size 8000", "too large", "at most"]),
        "vocabulary too small": ({"train": pair, "vocab_size": [10]}, ["--vocab-size 10", "too small"]),
        "no model": ({"spm_model": [folder / "no.model"]}, ["no.model"]),
        "not a model": ({"spm_model": [source]}, ["--spm-model", "not a SentencePiece model"]),
        "too few to split": ({"train": pair, "test": None, "test_size": [40]}, ["60 different", "--test-size 40"]),
        "all too long": ({"max_pieces": [1]}, ["--max-pieces 1"]),
        "same language": ({"target_lang": ["en"]}, ["--source-lang en", "--target-lang en"]),
        "other folder": ({"out": corpus}, ["--out", "was not made by this program"]),
    }


CASES = """lengths|empty line|missing|not UTF-8|cut xz|vocabulary too large|vocabulary too small|no model|not a model
too few to split|all too long|same language|other folder""".replace("\n", "|").split("|")


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_sentence_and_leaves_nothing(case, corpus, tmp_path):
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    replaced, words = bad_inputs(inputs, corpus)[case]
    work = tmp_path / "work"
    work.mkdir()
    result = prepare(*flags(corpus, **{"out": work / "out", **replaced}))
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    message = result.stderr.strip().splitlines()[-1]
    assert all(word in message for word in words), message
    assert not list(work.iterdir())


def test_full_disk_is_one_sentence_and_leaves_nothing(corpus, tmp_path, monkeypatch, capsys):
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare_translation, "write_lines", full)
    assert prepare_translation.main([str(word) for word in flags(corpus, tmp_path / "out")]) == 2
    assert f"cannot write --out {tmp_path / 'out'}: No space left on device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_stopped_preparation_leaves_nothing(corpus, tmp_path):
    command = [sys.executable, str(PREPARE), *map(str, flags(corpus, tmp_path / "out"))]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not (tmp_path / ".out.partial").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("python", ["raises it", "swallows it", "makes it another error"])
def test_a_stop_is_heeded_whatever_python_makes_of_it(corpus, tmp_path, monkeypatch, python):
    real = prepare_translation.train_sentencepiece

    def train_sentencepiece(*args):
        model = real(*args)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit:
            if python == "raises it":
                raise
            if python == "makes it another error":
                raise ValueError("from an extension") from None
        return model

    monkeypatch.setattr(prepare_translation, "train_sentencepiece", train_sentencepiece)
    with pytest.raises(SystemExit) as stopped:
        prepare_translation.main([str(word) for word in flags(corpus, tmp_path / "out")])
    assert stopped.value.code == 143
    assert not list(tmp_path.iterdir())


def test_line_breaks_inside_a_sentence_do_not_shift_lines(tmp_path):
    path = tmp_path / "odd.en"
    path.write_bytes("\ufeffone\u2028still one\r\ntwo\x85still two\nthree\rstill three\n".encode())
    assert prepare_translation.read_lines(path) == ["one still one", "two still two", "three still three"]


def test_split_is_repeatable_disjoint_and_leaves_no_copies_in_training():
    english, german = cut("train", "en", 200), cut("train", "de", 200)
    pairs = list(zip(english, german, strict=True))
    repeated = [*pairs, *pairs[:50], *[(source, f"{target} (2)") for source, target in pairs]]
    sizes = {"valid": 20, "test": 30}
    split = prepare_translation.split_pairs(repeated, sizes, seed=1)
    assert split == prepare_translation.split_pairs(repeated, sizes, seed=1)
    assert split != prepare_translation.split_pairs(repeated, sizes, seed=2)
    assert {part: len(split[part]) for part in sizes} == sizes
    for side in (0, 1):
        sentences = [{pair[side] for pair in split[part]} for part in ("train", "valid", "test")]
        assert all(not a & b for a, b in zip(sentences, [*sentences[1:], sentences[0]], strict=True))
    assert len(split["train"]) == len(set(split["train"])) == 2 * (200 - 50)


def test_model_and_dictionary_of_different_text_are_refused(prepared, tmp_path):
    model, dictionary = prepared / "spm.model", prepared / "dict.txt"
    assert prepare("--spm-model", model, "--check", dictionary).returncode == 0
    lines = dictionary.read_text("utf-8").splitlines()
    swapped = write(tmp_path / "swapped.txt", [*lines[:10], lines[11], lines[10], *lines[12:]])
    shorter = write(tmp_path / "shorter.txt", lines[:-7])
    for wrong, words in ((swapped, "entry 11 is"), (shorter, "the model has 297 pieces and the dictionary 290")):
        result = prepare("--spm-model", model, "--check", wrong)
        assert result.returncode == 2
        assert f"--spm-model {model} does not fit the dictionary {wrong}" in result.stderr
        assert words in result.stderr


# --- the quick start itself

TINY = {
    "LAYERS": 3,
    "UNIQUE": 2,
    "EMBED": 16,
    "FFN": 32,
    "HEADS": 2,
    "VOCAB": 300,
    "UPDATES": 24,
    "SAVES": 3,
    "AVERAGE": 2,
    "MAX_TOKENS": 800,
    "BEAM": 2,
}


def start_quickstart(run: Path, corpus: Path, **settings) -> subprocess.Popen:
    return subprocess.Popen(
        ["bash", str(QUICKSTART)],
        cwd=run.parent,
        env=environment(**{**TINY, "DATA": corpus, "RUN": run, "PROCESSES": 2, **settings}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def call_quickstart(run: Path, corpus: Path, **settings) -> tuple[int, str]:
    process = start_quickstart(run, corpus, **settings)
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def is_gone(group: int) -> bool:
    """Say whether a process group ends within seconds (the script's own half-second naps may be left for that long)."""
    for _ in range(50):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_quickstart_end_to_end_and_again(corpus, tmp_path):
    run = tmp_path / "run"
    status, output = call_quickstart(run, corpus, PROCESSES="")
    assert status == 0, output
    assert f"{min(2, len(os.sched_getaffinity(0)))} process(es) of one thread each" in output
    for name in ("data/prepared.json", "train.log", "checkpoints/averaged.pt", "generate.txt", "scores.txt"):
        assert (run / name).stat().st_size > 0
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").rglob("events.out*"))
    assert len((run / "translation.de").read_text("utf-8").split("\n")) == SIZES["test"] + 1
    assert "encoder: 3 layers from 2 parameter sets (cycle_rev): 0 1 1" in output
    for shown in ("BLEU|nrefs:1|", "chrF2|nrefs:1|", "tensorboard --logdir", "curve.png", "time  "):
        assert shown in output
    assert output.count("\ntranslation ") == 5
    assert "Traceback" not in output

    made = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    status, again = call_quickstart(run, corpus)
    assert status == 0, again
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == made
    assert again.count("already done") == 4
    assert again[again.index("== five") :] == output[output.index("== five") :]

    status, refused = call_quickstart(run, corpus, LAYERS=4)
    assert status == 2
    assert "made with LAYERS=3, and now LAYERS=4" in refused


def test_quickstart_refuses_bad_data_and_leaves_nothing(corpus, tmp_path):
    write(tmp_path / "my.en", cut("train", "en", 30))
    write(tmp_path / "my.de", cut("train", "de", 29))
    for data, words in (
        ("my", "has 30 lines and"),
        ("my.en my.de", "has 30 lines and"),
        ("nothing", "DATA=nothing is no"),
    ):
        status, output = call_quickstart(tmp_path / "run", corpus, DATA=data)
        assert status == 2
        assert words in output
        assert not (tmp_path / "run").exists()
    status, output = call_quickstart(tmp_path / "run", corpus, LAYERS="six")
    assert status == 2
    assert "LAYERS=six" in output


def test_quickstart_beside_another_changes_nothing(corpus, tmp_path):
    """Not the settings of the one that is at work, which it would then be shown with."""
    run = tmp_path / "run"
    run.mkdir()
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, output = call_quickstart(run, corpus, LAYERS=2)
        assert status == 2 and "another quickstart is at work" in output
        assert not (run / "settings.txt").exists()


@pytest.mark.slow
def test_quickstart_goes_on_after_ctrl_c(corpus, tmp_path):
    run = tmp_path / "run"
    long = {"UPDATES": 400, "SAVES": 20, "ARCH": "transformer"}
    process = start_quickstart(run, corpus, **long)
    deadline = time.monotonic() + 120
    while not (run / "checkpoints/checkpoint_last.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "the same command goes on from here" in output
    assert is_gone(process.pid)
    assert not (run / "train.done").exists()

    status, output = call_quickstart(run, corpus, **long)
    assert status == 0, output
    assert "is already prepared: nothing to do" in output
    assert "Loaded checkpoint" in output
    assert "num_updates 400" in (run / "train.log").read_text("utf-8")


@pytest.mark.slow
def test_quickstart_ends_when_one_training_process_dies(corpus, tmp_path):
    run = tmp_path / "run"
    process = start_quickstart(run, corpus, UPDATES=4000)
    deadline = time.monotonic() + 120
    log = run / "train.log"
    while not (log.exists() and "train_inner" in log.read_text("utf-8")) and time.monotonic() < deadline:
        time.sleep(0.1)
    pids = subprocess.run(["pgrep", "-g", str(process.pid), "-f", "distributed-rank 1"], capture_output=True, text=True)
    os.kill(int(pids.stdout.split()[0]), signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "a process ended with an error" in output
    assert str(run / "train.log") in output
    assert is_gone(process.pid)
