"""The scripts of the examples: from data to scores, stopped and resumed, so small that the scores say nothing."""

import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import command_lines, environment
from conftest import REPOSITORY, read_corpus

WMT = REPOSITORY / "examples" / "translation" / "wmt.sh"
SIZES = {"UPDATES": "60", "SAVES": "2", "EMBED": "16", "FFN": "32", "WARMUP": "2"}
LAST = {"language_modeling": "unigram perplexity", "speech_to_text": "all: "}


@pytest.fixture(params=LAST)
def example(request, tmp_path):
    """Return a script and its environment."""
    values = environment(**SIZES, RUN=str(tmp_path / "run"), VOCAB="300")
    if request.param == "language_modeling":
        values["DATA"] = str(tmp_path)
        for split in ("train", "valid", "test"):
            (tmp_path / f"{split}.txt").write_text("\n".join(read_corpus(split, "en")[:300]) + "\n", "utf-8")
    return request.param, REPOSITORY / "examples" / request.param / "run.sh", values


def call(script, values, **changes) -> subprocess.CompletedProcess:
    return subprocess.run(script, env={**values, **changes}, capture_output=True, text=True)


@pytest.mark.slow
def test_stop_resume_finish_and_repeat(example, tmp_path):
    name, script, values = example
    run = Path(values["RUN"])
    with subprocess.Popen([script], env={**values, "UPDATES": "6000"}, stdout=subprocess.PIPE, text=True) as first:
        deadline = time.monotonic() + 600
        while not (run / "checkpoints" / "checkpoint_last.pt").exists():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        first.send_signal(signal.SIGTERM)
        assert first.wait() == 143
    assert (run / "prepare.done").exists() and not (run / "train.done").exists()
    assert not any(os.fsencode(run) in line for line in command_lines())
    refused = call(script, values)
    assert refused.returncode == 2 and "was made with UPDATES=6000, and now UPDATES=60 is asked for" in refused.stderr
    settings = (run / "settings.txt").read_text("utf-8")
    (run / "settings.txt").write_text(settings.replace("UPDATES=6000", "UPDATES=60"), "utf-8")

    finished = call(script, values)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    assert "Loaded checkpoint" in (run / "train.log").read_text("utf-8")
    assert LAST[name] in finished.stdout and (run / "curve.png").stat().st_size > 1000
    repeated = call(script, values)
    steps = len(list(run.glob("*.done")))
    assert repeated.returncode == 0 and repeated.stdout.count("already done") == steps >= 5
    if name == "language_modeling":
        prompted = call(script, values, PROMPT="The whale")
        assert prompted.stdout.count("already done") == steps - 1
        assert "The whale" in prompted.stdout.replace("\u2581", " ").split("== sample")[1]

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    refused = call(script, values, RUN=str(tmp_path / "other"))
    assert refused.returncode == 2 and "is a folder with other contents" in refused.stderr


# --- what the scripts have in common


def write_script(folder: Path, body: str) -> Path:
    """Write a script of steps, which writes to ``run``."""
    path = folder / "script.sh"
    path.write_text(
        f'#!/usr/bin/env bash\nRUN="{folder}/run" NEEDS=sys\nsource "{REPOSITORY}/examples/steps.sh"\n{body}\n', "utf-8"
    )
    path.chmod(0o755)
    return path


SCRIPTS = sorted(path for path in (REPOSITORY / "examples").glob("*/*.sh") if path.name != "desk.sh")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_is_no_option_is_refused(script, tmp_path):
    """--dry-run too, where a script would do all in earnest; --help prints the comment at the top."""
    text = script.read_text("utf-8")
    for option in (name for name in ("--dry-run", "--smoke", "--updates") if name not in text):
        done = call([script, option], environment(RUN=str(tmp_path / "run"), WORK=str(tmp_path / "work")))
        assert done.returncode == 2 and f"{option} is not " in done.stderr and not list(tmp_path.iterdir())
    done = call([script, "--help"], environment())
    assert done.returncode == 0 and f"# {done.stdout.splitlines()[0]}\n" in text


def test_a_folder_with_much_in_it_is_refused(tmp_path):
    """Always: with a long list one in a few calls took it for empty, and then deleted `data` in it."""
    run = tmp_path / "run"
    (run / "data").mkdir(parents=True)
    for number in range(2000):
        (run / f"a thesis in many parts, part {number}.txt").touch()
    script = write_script(tmp_path, "begin\necho accepted")
    for _ in range(5):
        done = call(script, environment())
        assert done.returncode == 2 and "is a folder with other contents" in done.stderr and not done.stdout
    assert len(list(run.iterdir())) == 2001


def test_nothing_below_a_step_outlives_the_script(tmp_path):
    """Not what a function has started either, whose subshell alone was told."""
    script = write_script(tmp_path, "both() { sleep 98765; sleep 98765; }\nbegin\nstep both both")
    with subprocess.Popen([script], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as stopped:
        deadline = time.monotonic() + 60
        while not any(b"98765" in line for line in command_lines()):
            assert stopped.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        stopped.send_signal(signal.SIGTERM)
        assert stopped.wait() == 143
    deadline = time.monotonic() + 10
    while any(b"sleep\x0098765" in line for line in command_lines()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not (tmp_path / "run" / "both.done").exists()


# --- deep Post-LN with and without Admin


def test_deep_table_is_that_of_the_shipped_logs(tmp_path):
    folder = REPOSITORY / "examples" / "translation"
    logs = sorted((folder / "deep").glob("*.log.xz"))
    command = [sys.executable, folder / "deep.py", *logs]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert table.count("\n") > 8 and table in (folder / "README.md").read_text("utf-8")
    (tmp_path / "a.log").write_text("")
    refused = subprocess.run([*command, tmp_path / "a.log"], capture_output=True, text=True)
    assert refused.returncode == 2 and "is not named as deep.sh names its logs" in refused.stderr


@pytest.mark.slow
def test_deep_trains_every_system_and_tabulates_them(tmp_path):
    for split in ("train", "valid", "test"):
        for language in ("en", "de"):
            with lzma.open(tmp_path / f"{split}.{language}.xz", "wt", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in read_corpus(split, language)[:300]))
    run = tmp_path / "run"
    sizes = {"EMBED": "16", "FFN": "32", "VOCAB": "300", "UPDATES": "4", "WARMUP": "2", "VALIDATE": "2"}
    values = environment(**sizes, LOG_INTERVAL="2", LAYERS="6", UNIQUE="3", DATA=str(tmp_path), RUN=str(run))
    done = call(WMT.with_name("deep.sh"), values)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    logs = sorted(run.glob("*.log.xz"))
    assert [log.name.partition("-layers")[0] for log in logs] == ["admin", "admin-static", "none", "pre-ln"]
    assert all(str(tmp_path).encode() not in lzma.decompress(log.read_bytes()) for log in logs)  # they are published
    command = [sys.executable, WMT.with_name("deep.py"), *logs, "--out", tmp_path / "deep.png"]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split("|")[5].strip() for line in table.splitlines()[2:]] == [
        *("Post-LN", "Post-LN, admin", "Post-LN, admin-static", "Pre-LN")
    ]
    assert (tmp_path / "deep.png").stat().st_size > 5000
    again = call(WMT.with_name("deep.sh"), values)
    assert again.returncode == 0 and again.stdout.count("already done") == 5
