"""Several processes: two with gloo on the CPU train as one does with twice the batches per update, in every family."""

import pickle
import subprocess
import sys

import pytest
import torch
from commands import environment
from conftest import REPOSITORY
from training import check_gpu, configure

FAMILIES = list(check_gpu.FAMILIES)
# The environment's commands come first on PATH, whether it is activated or not.
ENVIRONMENT = environment()
STACKS = {"translation": ("encoder", "decoder"), "language_modeling": ("decoder",), "masked_lm": ("encoder",)}


def judge(session, family: str, name: str) -> None:
    """Run a check of scripts/check_gpu.py and the one it is compared with, unless they ran before; assert it."""
    checks = {check.name: check for check in check_gpu.list_checks([family], cpu=True)}
    check = checks[name]
    for each in (checks.get(check.reference), check):
        if each is not None:
            session.train(each)
    passed, found = session.judge(check)
    assert passed, f"{found}\n{session.trained[family, name][1][-3000:]}"


@pytest.mark.parametrize("backend", ["legacy_ddp", "pytorch_ddp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_train_as_one(tiny, family, backend):
    judge(tiny, family, backend)


def test_other_batches_would_be_noticed(tiny):
    """The comparison is sharp: half the batches per update are far outside the bound."""
    for check in check_gpu.list_checks(["language_modeling"], cpu=True)[:2]:
        tiny.train(check)
    wrong = check_gpu.Check("language_modeling", "fp32", [], 1, "fp32, --update-freq 2", 1e-3, 1e-5)
    passed, found = tiny.judge(wrong)
    assert not passed and "parameters off by 0.0" in found


@pytest.mark.parametrize("family", check_gpu.CHECKPOINTED)
def test_activation_checkpointing(tiny, family):
    judge(tiny, family, "legacy_ddp --checkpoint-activations")


@pytest.mark.parametrize("family", check_gpu.LAYERDROP)
def test_a_set_without_gradient_neither_hangs_nor_crashes(tiny, family):
    """LayerDrop leaves sets out, other ones in each process; both backends end with the same parameters."""
    judge(tiny, family, "legacy_ddp LayerDrop")
    judge(tiny, family, "pytorch_ddp LayerDrop")


@pytest.mark.parametrize("family", check_gpu.LAYERDROP)
def test_a_set_that_is_never_used_keeps_its_parameters(tiny, family):
    """With M=1 and every layer dropped in every update, all else trains as in one process."""
    stacks = {"translation": ("encoder", "decoder"), "language_modeling": ("decoder",), "masked_lm": ("encoder",)}[
        family
    ]
    flags = [word for stack in stacks for word in (f"--{stack}-layerdrop", 1, f"--{stack}-unique-layers", 1)]
    one = check_gpu.Check(family, "all dropped", [*flags, "--update-freq", 2])
    two = check_gpu.Check(
        family, "all dropped, two processes", [*flags, "--ddp-backend", "legacy_ddp"], 2, one.name, 1e-3, 1e-5
    )
    begin = check_gpu.Check(family, "all dropped, the beginning", [*flags, "--lr", 0])
    for check in (begin, one, two):
        tiny.train(check)
    passed, found = tiny.judge(two)
    assert passed, found
    before, after = (torch.load(tiny.checkpoint(family, check.name))["model"] for check in (begin, two))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    layers = {name for name in before if ".layers." in name}
    assert layers and moved and not moved & layers


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configuration_reaches_the_processes_that_fairseq_starts(tiny, family):
    """One process for each GPU gets it by pickle."""
    cfg = configure(check_gpu.train_command(family, tiny.folder, tiny.folder / "unused"))
    assert pickle.loads(pickle.dumps(cfg)) == cfg


def test_block_momentum(tiny):
    """--use-bmuf exchanges parameters, not gradients: each unique one once."""
    bmuf = ["--use-bmuf", "--global-sync-iter", 2, "--warmup-iterations", 1]
    check = check_gpu.Check("language_modeling", "bmuf", bmuf, 2)
    tiny.train(check)
    passed, found = tiny.judge(check)
    assert passed, found


def test_the_example_starts_two_processes(tiny):
    """examples/distributed.sh cpu, as it is typed, ends where the two processes of the other tests do."""
    judge(tiny, "language_modeling", "legacy_ddp")
    save = tiny.checkpoint("language_modeling", "example").parent
    command = [*check_gpu.train_command("language_modeling", tiny.folder, save)[1:], "--ddp-backend", "legacy_ddp"]
    script = ["bash", REPOSITORY / "examples" / "distributed.sh", "cpu", 2, *command]
    done = subprocess.run([str(word) for word in script], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = check_gpu.largest_difference(
        tiny.checkpoint("language_modeling", "example"), tiny.checkpoint("language_modeling", "legacy_ddp")
    )
    assert found < 1e-6


def test_the_example_fails_when_a_process_does():
    script = REPOSITORY / "examples" / "distributed.sh"
    command = ["bash", script, "cpu", "2", "no-such-folder", "--arch", "transformer_shared_cycle"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 1 and "data folder no-such-folder does not exist" in done.stdout + done.stderr
    done = subprocess.run(["bash", script, "cpus", "2"], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2 and "distributed.sh cpu PROCESSES" in done.stderr


def test_the_gpu_check_needs_a_gpu_or_cpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as caught:
        check_gpu.main([])
    assert caught.value.code == 2 and "torch sees no GPU: --cpu checks what" in capsys.readouterr().err


def test_the_gpu_check_counts_what_failed(tiny, tmp_path, capsys):
    def fail(command):
        return 1, "first line\nRuntimeError: out of order"

    failed = check_gpu.check_all(["masked_lm"], tmp_path, cpu=False, gpus=1, jobs=2, run=fail)
    printed = capsys.readouterr().out
    assert failed == len(check_gpu.list_checks(["masked_lm"], cpu=False)) == printed.count("FAILED") > 10
    assert "RuntimeError: out of order" in printed
    commands = check_gpu.split_command(["fairseq-train"], 2, gpus=1), check_gpu.split_command(["fairseq-train"], 2, 2)
    assert [ranks[1][-1] for ranks in commands] == [0, 1]  # one GPU is shared, by gloo
    assert "gloo" in commands[0][0] and "nccl" in commands[1][0]


@pytest.mark.slow
def test_the_gpu_check_runs_to_its_end_without_a_gpu():
    script = [sys.executable, REPOSITORY / "scripts" / "check_gpu.py", "--cpu"]
    status, output = check_gpu.run(script)
    assert status == 0 and "\n0 failed; " in output, output
    assert output.count("ok ") == len(check_gpu.list_checks(FAMILIES, cpu=True))
