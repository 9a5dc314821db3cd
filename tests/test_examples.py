"""The scripts of the examples: from data to scores, stopped and resumed, so small that the scores say nothing."""

import argparse
import contextlib
import hashlib
import http.server
import importlib.util
import io
import lzma
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, read_corpus

from fairseq_sharing.tools.model import read_architecture

WMT = REPOSITORY / "examples" / "translation" / "wmt.sh"
SIZES = {"UPDATES": "60", "SAVES": "2", "EMBED": "16", "FFN": "32", "WARMUP": "2"}
LAST = {"language_modeling": "unigram perplexity", "speech_to_text": "all: "}


@pytest.fixture(params=LAST)
def example(request, tmp_path):
    """Return a script and its environment."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, **SIZES, "PATH": path, "RUN": str(tmp_path / "run"), "VOCAB": "300"}
    if request.param == "language_modeling":
        environment["DATA"] = str(tmp_path)
        for split in ("train", "valid", "test"):
            (tmp_path / f"{split}.txt").write_text("\n".join(read_corpus(split, "en")[:300]) + "\n", "utf-8")
    return request.param, REPOSITORY / "examples" / request.param / "run.sh", environment


def command_lines() -> list[bytes]:
    """Return those of all processes that are there."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes())
    return lines


def call(script, environment, **changes) -> subprocess.CompletedProcess:
    return subprocess.run([script], env={**environment, **changes}, capture_output=True, text=True)


@pytest.mark.slow
def test_stop_resume_finish_and_repeat(example, tmp_path):
    name, script, environment = example
    run = Path(environment["RUN"])
    with subprocess.Popen([script], env={**environment, "UPDATES": "6000"}, stdout=subprocess.PIPE, text=True) as first:
        deadline = time.monotonic() + 600
        while not (run / "checkpoints" / "checkpoint_last.pt").exists():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        first.send_signal(signal.SIGTERM)
        assert first.wait() == 143
    assert (run / "prepare.done").exists() and not (run / "train.done").exists()
    assert not any(os.fsencode(run) in line for line in command_lines())
    refused = call(script, environment)
    assert refused.returncode == 2 and "was made with UPDATES=6000, and now UPDATES=60 is asked for" in refused.stderr
    settings = (run / "settings.txt").read_text("utf-8")
    (run / "settings.txt").write_text(settings.replace("UPDATES=6000", "UPDATES=60"), "utf-8")

    finished = call(script, environment)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    assert "Loaded checkpoint" in (run / "train.log").read_text("utf-8")
    assert LAST[name] in finished.stdout and (run / "curve.png").stat().st_size > 1000
    repeated = call(script, environment)
    steps = len(list(run.glob("*.done")))
    assert repeated.returncode == 0 and repeated.stdout.count("already done") == steps >= 5

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    refused = call(script, environment, RUN=str(tmp_path / "other"))
    assert refused.returncode == 2 and "is a folder with other contents" in refused.stderr


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


# --- the recipe of the WMT experiments


def load_wmt():
    spec = importlib.util.spec_from_file_location("wmt", WMT.with_suffix(".py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["wmt"] = module  # its dataclasses ask for it
    spec.loader.exec_module(module)
    return module


def environment(**changes) -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **changes}


def test_wmt_smoke_runs_every_step_once(tmp_path):
    values = environment(WORK=str(tmp_path / "wmt"))
    nowhere = tmp_path.as_uri() + "/nowhere"
    failed = subprocess.run([WMT, "--smoke"], env={**values, "MIRROR": nowhere}, capture_output=True, text=True)
    assert failed.returncode == 2 and f"error: cannot download {nowhere}/wmt13/training-parallel-" in failed.stderr
    first = subprocess.run([WMT, "--smoke"], env=values, capture_output=True, text=True)
    assert first.returncode == 0 and first.stdout.count("already done") == 1, (
        first.stdout[-3000:] + first.stderr[-3000:]
    )
    steps = re.findall(r"^== (\S+)$", first.stdout, re.MULTILINE)
    assert steps == [
        *("imitate", "download", "text", "vocabulary", "pieces", "binarise"),
        *("train", "average", "decode-wmt14", "score-wmt14"),
    ]
    # The one training command took Admin's profile, 2 + 3 residual sublayers for each of 12 layers, and kept it.
    run = tmp_path / "wmt" / "en-de-cycle_rev-12-seed1"
    profiles = re.findall(
        r"(\w+): residual scalings measured on the first batch: (.*)", (run / "train.log").read_text()
    )
    assert {stack: len(numbers.split()) for stack, numbers in profiles} == {"encoder": 24, "decoder": 36}
    averaged = torch.load(run / "checkpoints" / "averaged.pt", weights_only=True)["model"]
    assert averaged["encoder.layers.11.final_layer_norm.residual_scale"] > 1
    # What is scored is what was in the archive, in its order.
    sources = read_corpus("test", "en")[10:20]
    assert (tmp_path / "wmt" / "en-de" / "text" / "wmt14.en").read_text("utf-8").splitlines() == sources
    assert len((run / "wmt14.de").read_text("utf-8").splitlines()) == 10
    assert re.search(r"wmt14  BLEU\|nrefs:1\|case:mixed\|.*\|tok:13a\|.* = \d", first.stdout)

    again = subprocess.run([WMT, "--smoke"], env=values, capture_output=True, text=True)
    assert again.returncode == 0 and again.stdout.count("already done") == len(steps)
    other = subprocess.run([WMT, "--smoke"], env={**values, "LR": "1"}, capture_output=True, text=True)
    assert other.returncode == 2 and "was made with LR=0.002, and now LR=1 is asked for" in other.stderr


# An encoder layer of width d and FFN f: four projections with biases, two matrices with biases, two LayerNorms.
# A decoder layer has four more projections and one more LayerNorm.
def count_layers(d: int, f: int, sets: int) -> int:
    attention, ffn, norm = 4 * (d * d + d), 2 * d * f + d + f, 2 * d
    return sets * ((attention + ffn + 2 * norm) + (2 * attention + ffn + 3 * norm))


@pytest.mark.parametrize(
    "system, layers, width, ffn, sets",
    [
        ("vanilla", None, 512, 2048, 6),
        ("admin", None, 512, 2048, 6),
        ("vanilla_big", None, 1024, 4096, 6),
        ("universal", None, 1024, 4096, 1),
        ("sequence", None, 512, 2048, 6),
        ("cycle", "18", 512, 2048, 6),
        ("cycle_rev", "18", 512, 2048, 6),
    ],
)
def test_wmt_rows_are_the_published_models(tmp_path, system, layers, width, ffn, sets):
    values = environment(WORK=str(tmp_path / "wmt"), SYSTEM=system, **({"N": layers} if layers else {}))
    printed = subprocess.run([WMT, "--dry-run"], env=values, capture_output=True, text=True, cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    assert list(tmp_path.iterdir()) == []
    commands = [shlex.split(line) for line in printed.stdout.splitlines() if line.startswith("python")]
    (train,) = [command for command in commands if "fairseq_cli.train" in command]  # one, whatever needs a profile
    flags = train[4:]
    arch = flags.pop(flags.index("--arch") + 1)
    flags.remove("--arch")
    assert [flags[flags.index(name) + 1] for name in ("--max-tokens", "--update-freq", "--distributed-world-size")] == [
        *("3584", "32", "4")
    ]
    depth = int(layers or (12 if system == "sequence" else 6))
    model = read_architecture(arch, drop(flags, "--user-dir", "--task", "-s", "-t", "--save-dir")).model
    assert len(model.encoder.layers) == len(model.decoder.layers) == depth
    scalings = 5 * depth * width if system in ("admin", "sequence", "cycle", "cycle_rev") else 0
    expected = 32768 * width + count_layers(width, ffn, sets) + scalings
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    penalties = {
        command[command.index("--gen-subset") + 1]: command[command.index("--lenpen") + 1]
        for command in commands
        if "--lenpen" in command
    }
    assert penalties == {"test": "1.0", **{f"test{i}": "0.6" if i == 4 else "1.0" for i in range(1, 7)}}


def drop(flags: list[str], *names: str) -> list[str]:
    """Return flags without these and their values."""
    found = [flags.index(name) for name in names]
    return [flag for index, flag in enumerate(flags) if not {index, index - 1} & set(found)]


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"SYSTEM": "cycle_ref"}, "SYSTEM=cycle_ref is none of vanilla, admin"),
        (
            {"SYSTEM": "vanilla", "RESIDUAL": "admin"},
            "SYSTEM=vanilla has no scaled residual connections (RESIDUAL=admin)",
        ),
        ({"PAIR": "de-fr"}, "PAIR=de-fr is none of en-de, de-en, en-fr, fr-en"),
        ({"SYSTEM": "cycle", "RESIDUAL": "admim"}, "RESIDUAL=admim is none of none, admin, admin-static"),
        ({"N": "5"}, "M=6 must be between 1 and N=5"),
        ({"N": "twelve"}, "N=twelve must be a whole number"),
        ({"GPUS": "3"}, "BATCHES=128 must be a multiple of GPUS=3"),
        ({"GPUS": "0", "DISK": "1000000"}, "needs about 1000000 GB, and"),
        ({"GPUS": "0", "PATH": "{stubs}:/usr/bin:/bin"}, "has no fairseq: activate the environment first"),
    ],
)
def test_wmt_refuses_with_one_sentence(tmp_path, changes, sentence):
    (tmp_path / "stubs").mkdir()
    (tmp_path / "stubs" / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "stubs" / "python").chmod(0o755)
    changes = {name: value.format(stubs=tmp_path / "stubs") for name, value in changes.items()}
    values = environment(WORK=str(tmp_path / "wmt"), DISK="0") | changes
    refused = subprocess.run([WMT], env=values, capture_output=True, text=True)
    assert refused.returncode == 2 and sentence in refused.stderr and refused.stderr.count("\n") == 1
    assert not (tmp_path / "wmt").exists()


class Server(http.server.ThreadingHTTPServer):
    """Serves bytes, as well as it is told to."""

    def __init__(self, content: bytes):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.most, self.ranges, self.asked = content, None, True, []
        self.url = f"http://127.0.0.1:{self.server_port}/corpus.tgz"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, asked = self.server, self.headers.get("Range")
        server.asked.append(asked)
        start = int(asked[len("bytes=") : -1]) if asked and server.ranges else 0
        if start >= len(server.content):
            self.send_error(416)
            return
        body = server.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.most])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server(bytes(range(256)) * 8000) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_download_goes_on_where_it_was_cut_off(server, tmp_path):
    wmt, path = load_wmt(), tmp_path / "corpus.tgz"
    checksum = f"sha256:{hashlib.sha256(server.content).hexdigest()}"
    server.most = 1_500_000
    with pytest.raises(ValueError, match=r"was cut off after 1,500,000 of 2,048,000 bytes: the same command goes on"):
        wmt.fetch(server.url, path, checksum)
    assert not path.exists()
    server.most = None
    wmt.fetch(server.url, path, checksum)
    assert path.read_bytes() == server.content and server.asked == [None, "bytes=1500000-"]

    path.rename(tmp_path / "corpus.tgz.partial")  # killed between the last byte and the name
    wmt.fetch(server.url, path, checksum)
    assert path.read_bytes() == server.content
    path.unlink()
    (tmp_path / "corpus.tgz.partial").write_bytes(server.content[:10])
    server.ranges = False  # a server that starts from the first byte whatever it is asked for
    wmt.fetch(server.url, path, checksum)
    assert path.read_bytes() == server.content


def test_download_refuses_what_is_not_the_file(server, tmp_path, monkeypatch):
    wmt, path = load_wmt(), tmp_path / "corpus.tgz"
    checksum = f"md5:{hashlib.md5(server.content).hexdigest()}"
    right, server.content = server.content, server.content[:-1] + b"x"
    with pytest.raises(ValueError, match=rf"is not what it was: .* and {checksum} is expected; it is deleted here"):
        wmt.fetch(server.url, path, checksum)
    assert list(tmp_path.iterdir()) == []
    server.content = right
    with monkeypatch.context() as patch:
        patch.setattr(wmt.shutil, "disk_usage", lambda _: argparse.Namespace(free=1_000_000))
        with pytest.raises(ValueError, match=r"has 0.00 GB to come, and .* has 0.00 GB free"):
            wmt.fetch(server.url, path, checksum)
    wmt.fetch(server.url, path, checksum)
    assert path.read_bytes() == right
    with pytest.raises(ValueError, match="cannot download http://127.0.0.1:1/x .*refused"):
        wmt.fetch("http://127.0.0.1:1/x", tmp_path / "x", None)
    with pytest.raises(ValueError, match="cannot download file:///nowhere/x .*No such file"):
        wmt.fetch("file:///nowhere/x", tmp_path / "x", None)


def test_wmt_text_of_french_with_a_kept_checksum(tmp_path, monkeypatch, capsys):
    """WMT14's archives: five of them, one with compressed texts; for two of them no checksum is known."""
    wmt = load_wmt()
    data, archives, mirror = tmp_path / "data", tmp_path / "archives", tmp_path / "mirror"
    data.mkdir()
    lines = [f"line {number}" for number in range(10)]
    lines[1], lines[3], lines[9] = (
        "",
        "a\u2028b\x85 c",
        "last",
    )  # an empty side; characters that some readers end lines at
    for language in ("en", "fr"):
        for part in ("train", "test"):
            with lzma.open(data / f"{part}.{language}.xz", "wt", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
    common = ["--pair", "en-fr", "--test-sets", "wmt14/full"]
    assert (
        wmt.main(["imitate", *common, "--data", str(data), "--out", str(mirror), "--pairs", "2", "--test-pairs", "4"])
        == 0
    )
    download = ["download", *common, "--out", str(archives), "--mirror", mirror.as_uri()]
    assert wmt.main(download) == 2
    assert "training-parallel-europarl-v7.tgz is not what it was" in capsys.readouterr().err
    sums = mirror / "SHA256SUMS"
    known = [line for line in sums.read_text().splitlines() if "giga-fren" not in line]
    sums.write_text("".join(f"{line}\n" for line in known))
    assert wmt.main([*download, "--checksums", str(sums)]) == 0
    assert "training-giga-fren.tar: 10,240 bytes, checksum kept" in capsys.readouterr().out
    text = ["text", *common, "--archives", str(archives), "--sacrebleu", str(tmp_path / "sacrebleu"), "--out"]
    assert wmt.main([*text, str(tmp_path / "text")]) == 0
    assert (tmp_path / "text" / "train.fr").read_text("utf-8").split("\n") == [
        *("line 0", "line 2", "a b c", *(f"line {number}" for number in range(4, 9)), "last", "")
    ]
    assert len((tmp_path / "text" / "wmt14.fr").read_text("utf-8").splitlines()) == 4

    # The kept checksum holds from then on: for a file that changed here, and for one that changed there.
    giga = archives / "training-giga-fren.tar"
    giga.write_bytes(giga.read_bytes() + b"x")
    assert wmt.main([*text, str(tmp_path / "text2")]) == 2
    assert f"{giga} has the checksum sha256:" in capsys.readouterr().err and not (tmp_path / "text2").exists()
    giga.unlink()
    there = mirror / "wmt10" / "training-giga-fren.tar"
    whole = there.read_bytes()
    there.write_bytes(whole + b"x")
    assert wmt.main([*download, "--checksums", str(sums)]) == 2
    assert "is not what it was" in capsys.readouterr().err
    there.write_bytes(whole)
    assert wmt.main([*download, "--checksums", str(sums)]) == 0


def test_wmt_texts_of_different_lengths_are_refused(tmp_path):
    wmt = load_wmt()
    corpus = wmt.list_corpora("de")[1]
    archive = wmt.write_archive(
        tmp_path, corpus.url, {"commoncrawl.de-en.en": ["one", "two"], "commoncrawl.de-en.de": ["eins"]}
    )
    files = {"en": io.StringIO(), "de": io.StringIO()}
    with pytest.raises(
        ValueError, match="commoncrawl.de-en.en and commoncrawl.de-en.de differ in length, from line 2 on"
    ):
        wmt.extract_training(corpus, archive, ("en", "de"), files)
    archive.write_bytes(archive.read_bytes()[:60])
    with pytest.raises(ValueError, match="cannot read commoncrawl.de-en.en in "):
        wmt.extract_training(corpus, archive, ("en", "de"), files)


def test_wmt_pairs_that_are_left_out():
    fits = load_wmt().fits
    assert fits(4, 6, 250, 1.5) and not fits(4, 7, 250, 1.5)
    assert fits(250, 250, 250, 1.5) and not fits(251, 250, 250, 1.5)
    assert not fits(0, 0, 250, 1.5)
