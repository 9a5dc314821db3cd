"""The comparisons of strategies in examples/: which rate is chosen, when Vanilla had ended, and the tables."""

import fcntl
import importlib.util
import json
import lzma
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import environment
from conftest import REPOSITORY

FAMILIES = {"translation": "de.xz", "language_modeling": "txt", "speech_to_text": "txt"}
spec = importlib.util.spec_from_file_location("trainings", REPOSITORY / "examples" / "trainings.py")
trainings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(trainings)


def call(script, values: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run([script], env=values, capture_output=True, text=True)


def read(path) -> list[str]:
    return lzma.decompress(path.read_bytes()).decode("utf-8").splitlines()


def write_log(folder, name: str, seconds: float, losses: list[float]) -> None:
    """Write the log of a training that validates after each thousand updates, so many seconds apart."""
    lines = ["decoder: 6 layers from 3 parameter sets (cycle): 0 1 2 0 1 2", "num. shared model params: 478,208 (…)"]
    for number, loss in enumerate(losses, 1):
        wall, updates = number * seconds, 1000 * number
        lines.append(
            json.dumps(
                {"epoch": 1, "wps": "2000", "ups": str(1000 / seconds), "num_updates": str(updates), "wall": str(wall)}
            )
        )
        valid = {"valid_nll_loss": str(loss), "valid_loss": "9", "valid_ppl": "1", "valid_num_updates": str(updates)}
        lines.append(json.dumps({"epoch": 1, **valid}))
    (folder / f"{name}.log.xz").write_bytes(lzma.compress("\n".join(lines).encode()))


@pytest.fixture
def folder(tmp_path):
    """Vanilla takes 60 seconds for a thousand updates, CYCLE 100; CYCLE is better at 0.004 with the first seed."""
    write_log(tmp_path, "pre-ln-vanilla-lr0.002-seed1", 60, [6, 5, 4])
    write_log(tmp_path, "pre-ln-vanilla-lr0.004-seed1", 60, [6, 5, 4.5])
    write_log(tmp_path, "pre-ln-vanilla-lr0.002-seed2", 60, [6, 5, 5])
    write_log(tmp_path, "pre-ln-cycle-lr0.002-seed1", 100, [6, 5, 3.5])
    write_log(tmp_path, "pre-ln-cycle-lr0.004-seed1", 100, [6, 5, 3])
    write_log(tmp_path, "pre-ln-cycle-lr0.004-seed2", 120, [6, 5, 4])  # the machine did something else too
    write_log(tmp_path, "admin-cycle-lr0.002-seed1", 100, [6, 5, 3.5])
    return tmp_path


def test_the_rate_is_that_of_the_first_seed(folder):
    runs = trainings.read_runs(folder)
    assert [run.lr for run in trainings.group(runs, "pre-ln", "vanilla")] == ["0.002", "0.002"]
    assert [run.loss for run in trainings.group(runs, "pre-ln", "cycle")] == [3, 4]
    (rates,) = (row for row in trainings.tabulate_rates(runs) if row["system"] == "CYCLE" and row["norm"] == "Pre-LN")
    assert rates == {"norm": "Pre-LN", "system": "CYCLE", "0.002": f"{2**3.5:.2f}", "0.004": "8.00"}


def test_when_vanilla_ended(folder):
    """After 180 seconds: CYCLE had done 1,800 updates, 1,000 were saved. Slower trainings of both do not count."""
    write_log(folder, "pre-ln-vanilla-lr0.001-seed1", 250, [6, 5, 4.6])
    runs = trainings.read_runs(folder)
    assert trainings.when_vanilla_ended(runs, "pre-ln-cycle-lr0.004-seed2", 1000) == 1000
    assert trainings.when_vanilla_ended(runs, "admin-cycle-lr0.002-seed1", 1000) is None


def test_the_table_of_perplexities(folder):
    """Mean and standard deviation over the seeds, at the chosen rate; what was not tried is left empty."""
    for name, when, value in (
        ("pre-ln-cycle-lr0.004-seed1", "end", 40),
        ("pre-ln-cycle-lr0.004-seed2", "end", 44),
        ("pre-ln-vanilla-lr0.002-seed1", "end", 50),
        ("pre-ln-vanilla-lr0.002-seed2", "end", 50),
    ):
        (folder / f"{name}.{when}.txt").write_text(f"Loss (base 2): 5.3, Perplexity: {value}\n")
    command = [sys.executable, REPOSITORY / "examples" / "language_modeling" / "strategies.py", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (row,) = (line for line in done.splitlines() if "| CYCLE" in line and "42.00 ± 2.83" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:7] == ["Pre-LN", "CYCLE", "6", "3", "478,208", "0.004", "2"] and cells[-1] == ""
    done = subprocess.run([*command, "--watts", "6"], capture_output=True, text=True, check=True).stdout
    (row,) = (line for line in done.splitlines() if "| CYCLE" in line and "42.00 ± 2.83" in line)
    assert "| 5 " in row and "| 0.5 " in row  # 3 * 100 seconds at 6 W
    empty = subprocess.run([*command[:2], folder.parent], capture_output=True, text=True)
    assert empty.returncode == 2 and "holds no log of a finished training" in empty.stderr


def test_the_table_of_word_error_rates(folder):
    """Means over the seeds; at the end of each source too, where there are several."""
    for name, when, first, second in (
        ("pre-ln-vanilla-lr0.002-seed1", "end", 50, 70),
        ("pre-ln-vanilla-lr0.002-seed2", "end", 52, 72),
        ("pre-ln-cycle-lr0.004-seed1", "end", 100, 90),
        ("pre-ln-cycle-lr0.004-seed2", "end", 100, 94),
        ("pre-ln-cycle-lr0.004-seed1", "same-time", 120, 101),
        ("pre-ln-cycle-lr0.004-seed2", "same-time", 120, 103),
    ):
        lines = (f"reader: {first}.00 (3 clips, 10 words)", "stage: 99.00 (4 clips)", f"all: {second}.00 (7 clips)", "")
        (folder / f"{name}.{when}.txt").write_text("\n".join(lines))
    command = [sys.executable, REPOSITORY / "examples" / "speech_to_text" / "strategies.py", folder]
    header, _, *rows = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = [cell.strip() for cell in header.strip("|").split("|")]
    vanilla, cycle, *_ = (
        dict(zip(names, (cell.strip() for cell in row.strip("|").split("|")), strict=True)) for row in rows[:3]
    )
    assert vanilla["WER"] == "71.0 ± 1.4" and vanilla["WER, reader"] == "51.0 ± 1.4"
    assert cycle["WER, stage"] == "99.0 ± 0.0" and cycle["WER in Vanilla's time"] == "102.0 ± 1.4"
    assert names[-1] == "WER in Vanilla's time" and "WER, all" not in names


@pytest.mark.parametrize(
    ("family", "folder"),
    [
        ("language_modeling", "strategies"),
        ("speech_to_text", "strategies"),
        pytest.param("translation", "strategies", marks=pytest.mark.slow),  # the bootstraps take a minute
        pytest.param("translation", "strategies-long", marks=pytest.mark.slow),
    ],
)
def test_the_tables_in_the_readmes_are_those_of_the_logs(family, folder):
    """Row by row; a README may leave columns out."""
    home = REPOSITORY / "examples" / family
    command = [sys.executable, home / "strategies.py", home / folder, "--watts", "5"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in printed.splitlines()[2:]]
    text = (home / "README.md").read_text("utf-8")
    written = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) >= 4
    for row in rows:
        assert any(is_part(cells, row) for cells in written if len(cells) > 8), row


def is_part(cells: list[str], row: list[str]) -> bool:
    """Whether cells are those of a row in their order, of which some may be missing."""
    left = iter(row)
    return all(cell in left for cell in cells)


def test_the_pictures_of_a_comparison(folder, monkeypatch):
    """One for each normalisation: mean loss of the seeds, minutes of the fastest; a score is of what was decoded."""
    for name in ("pre-ln-vanilla-lr0.002-seed1", "pre-ln-cycle-lr0.004-seed1", "admin-cycle-lr0.002-seed1"):
        (folder / f"{name}.end.txt").touch()
    drawn = []
    monkeypatch.setattr(trainings, "draw", lambda *given: drawn.append(given))
    trainings.draw_runs(trainings.read_runs(folder), "bleu", len, "curves")
    (curves, (scores, label, _), outs), (_, _, others) = drawn
    assert outs == ["curves-pre-ln.png"] and others == ["curves-admin.png"]
    assert [each.minutes * 60 for each in curves["CYCLE"]] == pytest.approx([100, 200, 300])
    assert [each.loss for each in curves["CYCLE"]] == [6, 5, 3.5]  # 3 and 4 at the end
    assert [(each.name, each.score) for each in scores] == [("Vanilla", 1), ("CYCLE", 1)] and label == "BLEU"


def test_the_bootstrap_tells_what_differs(tmp_path):
    """The same translation is no better, one with a single better sentence hardly, and one that is the reference is."""
    spec = importlib.util.spec_from_file_location("bleu", REPOSITORY / "examples" / "translation" / "strategies.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reference = read(REPOSITORY / "examples" / "translation" / "data" / "test.de.xz")
    worse = [" ".join(line.split()[:-1]) for line in reference]
    assert module.bootstrap(worse, list(worse), reference) == 1
    assert 0.05 < module.bootstrap(worse, [reference[0], *worse[1:]], reference) < 0.9
    assert module.bootstrap(worse, reference, reference) < 0.01


def test_translations_must_be_as_many_as_the_references(folder):
    """As they are not where a decoding was stopped and what it had printed counts twice."""
    for name in ("pre-ln-vanilla-lr0.002-seed1", "pre-ln-vanilla-lr0.002-seed2"):
        (folder / f"{name}.end.de.xz").write_bytes(lzma.compress(b"ein Satz\n" * 563))
    script = REPOSITORY / "examples" / "translation" / "strategies.py"
    done = subprocess.run([sys.executable, script, folder], capture_output=True, text=True)
    assert done.returncode == 2 and "has 563 translations" in done.stderr and "562 lines" in done.stderr


def test_a_table_while_vanilla_is_not_yet_decoded(folder):
    """Without the comparison, and without a traceback."""
    for name in ("pre-ln-cycle-lr0.004-seed1", "pre-ln-cycle-lr0.004-seed2"):
        (folder / f"{name}.end.de.xz").write_bytes(lzma.compress(b"ein Satz\n" * 562))
    script = REPOSITORY / "examples" / "translation" / "strategies.py"
    done = subprocess.run([sys.executable, script, folder], capture_output=True, text=True)
    assert done.returncode == 0 and "| BLEU " in done.stdout and "| p " not in done.stdout, done.stderr


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_settings(family, tmp_path):
    script = REPOSITORY / "examples" / family / "strategies.sh"
    for values, sentence in (
        ({"SYSTEMS": "vanilla circle"}, "SYSTEMS=vanilla circle names circle"),
        ({"NORMS": "post-ln"}, "NORMS=post-ln names post-ln"),
        ({"UPDATES": "500"}, "UPDATES=500 must be a multiple of VALIDATE=1000"),
        ({"UPDATES": "0"}, "UPDATES=0 must be a multiple of VALIDATE=1000"),
        ({"AVERAGE": "0"}, "AVERAGE=0 must be at least 1"),
        ({"AVERAGE": "five"}, "AVERAGE=five must be a whole number"),
    ):
        done = call(script, environment(RUN=str(tmp_path / "run"), **values))
        assert done.returncode == 2 and sentence in done.stderr and not list(tmp_path.iterdir())


def test_speech_is_pre_ln_and_needs_data(tmp_path):
    script, run = REPOSITORY / "examples" / "speech_to_text" / "strategies.sh", str(tmp_path / "run")
    done = call(script, environment(RUN=run))
    assert done.returncode == 2 and "DATA= must name a folder" in done.stderr
    done = call(script, environment(RUN=run, DATA=str(tmp_path), NORMS="pre-ln admin"))
    assert done.returncode == 2 and "NORMS=pre-ln admin: fairseq-train has no flag" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.skipif(shutil.which("flock") is None, reason="there is no flock")
def test_a_call_that_waits_for_another_can_be_stopped(family, tmp_path):
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (tmp_path / "settings.txt").touch()
        script = REPOSITORY / "examples" / family / "strategies.sh"
        values = environment(RUN=str(tmp_path), DATA=str(tmp_path))
        with subprocess.Popen([script], env=values, stderr=subprocess.PIPE, text=True) as waiting:
            deadline = time.monotonic() + 60
            while not is_waiting(waiting.pid):
                assert waiting.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            waiting.terminate()
            try:
                assert "stopped" in waiting.communicate(timeout=20)[1] and waiting.returncode == 143
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)


def is_waiting(pid: int) -> bool:
    """Whether a process has a child that waits for a lock."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return any(Path(f"/proc/{child}/comm").read_text() == "flock\n" for child in children)
    except OSError:  # a child that has ended meanwhile
        return False


def test_a_system_is_timed_when_vanilla_comes_later(tmp_path):
    """Its models are kept until then."""
    examples, run = REPOSITORY / "examples", tmp_path / "run"
    script = tmp_path / "script.sh"
    script.write_text(
        f"""#!/usr/bin/env bash
RUN="{run}" NEEDS=sys NORMS=pre-ln LRS=0.004 SEEDS="1 2" UPDATES=10 VALIDATE=5 AVERAGE=1
source "{examples}/steps.sh"
source "{examples}/strategies.sh"
results() {{
    case $1 in
        --best-rate) echo 0.004 ;;
        *) if [ -e "$RUN/pre-ln-vanilla-lr0.004-seed1.finished" ]; then echo 5; fi ;;
    esac
}}
try() {{ echo "$*" >>"$RUN/tried"; }}
compare() {{ mkdir -p "$RUN/$1" && touch "$RUN/$1/checkpoint_1_5.pt" && try_twice "$1" "$2" "$3" try; }}
begin
each_training
""",
        "utf-8",
    )
    script.chmod(0o755)

    def tried(systems: str) -> list[str]:
        (run / "tried").unlink(missing_ok=True)
        done = call(script, environment(SYSTEMS=systems))
        assert done.returncode == 0, done.stderr
        return (run / "tried").read_text().splitlines() if (run / "tried").exists() else []

    cycle, vanilla = ([f"pre-ln-{system}-lr0.004-seed{seed}" for seed in (1, 2)] for system in ("cycle", "vanilla"))
    assert tried("cycle") == [f"{name} end 10" for name in cycle]
    assert len(list(run.glob("*/checkpoint_1_5.pt"))) == 2
    assert tried("cycle") == []
    assert sorted(tried("cycle vanilla")) == sorted(
        [f"{name} end 10" for name in (*cycle, *vanilla)] + [f"{name} same-time 5" for name in cycle]
    )
    assert not list(run.glob("*/checkpoint_1_5.pt")) and tried("vanilla cycle") == []


def test_the_last_models_are_averaged_or_as_many_as_there_are(tmp_path):
    """And where each multiple of VALIDATE ends an epoch there is none, which is said."""
    run, script = tmp_path / "a run", tmp_path / "script.sh"
    script.write_text(
        f"""#!/usr/bin/env bash
RUN="{run}" AVERAGE=2 VALIDATE=5 UPDATES=15
source "{REPOSITORY}/examples/steps.sh"
source "{REPOSITORY}/examples/strategies.sh"
step() {{ echo "$*"; }}
average_models cycle same-time "$LAST"
""",
        "utf-8",
    )
    script.chmod(0o755)
    (run / "cycle").mkdir(parents=True)
    for name in ("1_5", "1_10", "2_15", "_last", "_best"):
        (run / "cycle" / f"checkpoint_{name.lstrip('_')}.pt").touch()
    for last, models in ((5, 1), (10, 2), (15, 2)):
        done = call(script, environment(LAST=str(last)))
        assert f"--num-update-checkpoints {models} --checkpoint-upper-bound {last} " in done.stdout, done.stderr
    done = call(script, environment(LAST="4"))
    assert done.returncode == 2 and "no model saved after VALIDATE=5 updates" in done.stderr and not done.stdout
    (run / "cycle-average-same-time.done").touch()  # its models may be gone then
    assert call(script, environment(LAST="4")).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_systems_from_text_to_table(family, tmp_path):
    """Both rates with the first seed, the better one with the second; divided by two calls. Then all is done."""
    ending, source = FAMILIES[family], REPOSITORY / "examples" / family / "data"
    if family == "speech_to_text":
        shutil.copytree(source, tmp_path / "data")
    else:
        (tmp_path / "data").mkdir()
    for path in source.glob("*.xz"):
        lines = read(path)[: 100 if "train" in path.name else 20]
        (tmp_path / "data" / path.name).write_bytes(lzma.compress("".join(f"{line}\n" for line in lines).encode()))
    run = tmp_path / "run"
    sizes = {"SHARED_WIDTH": "16", "UNIVERSAL_WIDTH": "24", "HEADS": "2", "VOCAB": "300", "WARMUP": "2"}
    steps = {"UPDATES": "8", "VALIDATE": "2", "AVERAGE": "1", "LOG_INTERVAL": "2", "LRS": "0.001 0.004", "SEEDS": "1 2"}
    if family == "speech_to_text":  # at the end of an epoch fairseq saves no model of that update
        steps |= {"MAX_TOKENS": "900", "VALIDATE": "3", "UPDATES": "9", "CONV": "16"}
    values = environment(
        **sizes, **steps, SYSTEMS="vanilla cycle", NORMS="pre-ln", DATA=str(tmp_path / "data"), RUN=str(run)
    )
    script = REPOSITORY / "examples" / family / "strategies.sh"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([script], env=values, **pipes) as other:
        done = call(script, values)
        texts = other.communicate()
    assert done.returncode == other.returncode == 0, (done.stdout + done.stderr)[-3000:] + "".join(texts)[-3000:]
    assert all(path.read_text().count("seconds") == 1 for path in run.glob("*.done"))  # each step by one of the two
    assert len(list(run.glob("*.log.xz"))) == len(list(run.glob(f"*.end.{ending}"))) == 6
    assert all(str(tmp_path).encode() not in lzma.decompress(log.read_bytes()) for log in run.glob("*.log.xz"))
    assert not list(run.glob("*/checkpoint_*_*.pt"))
    reference = ["--reference", tmp_path / "data" / "test.de.xz"] if family == "translation" else []
    command = [sys.executable, script.with_suffix(".py"), run, *reference, "--picture", tmp_path / "curves"]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert table.count("| Pre-LN | ") == 4 and (tmp_path / "curves-pre-ln.png").is_file()
    again = call(script, values)
    assert (
        again.returncode == 0
        and "all is done" in again.stdout
        and again.stdout.count("already done") == again.stdout.count("\n== ")
    )
