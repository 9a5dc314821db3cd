#!/usr/bin/env python
"""Check mixed precision and distributed training of shared models on this machine, with fairseq's own commands.

    python scripts/check_gpu.py          # on the GPUs of this machine
    python scripts/check_gpu.py --cpu    # the same without a GPU, where fairseq can do it

Trains a small model of each family for a few updates on data that ships with the repository, in every precision and in
two processes, prints a table and exits with 1 if anything failed. A row passes when all of these hold: every process
ended well; the loss and, between runs that should agree, every parameter are within the bound shown; the checkpoint
holds each shared tensor once; the optimizer's state is that of the unique parameters.

Two processes get a GPU each and talk by NCCL. On a single GPU they share it and talk by gloo.
"""

import argparse
import lzma
import re
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLES = REPOSITORY / "examples"
UPDATES = 4

ENCODER = [
    *("--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 32, "--encoder-attention-heads", 2),
    *("--encoder-layers", 4, "--encoder-unique-layers", 2),
]
DECODER = [
    *("--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 32, "--decoder-attention-heads", 2),
    *("--decoder-layers", 4, "--decoder-unique-layers", 2),
]
# Family -> folder of its data, and the flags of a tiny model: four layers from two parameter sets in each stack.
FAMILIES = {
    "translation": [
        *("translation", "--task", "translation", "--arch", "transformer_shared_cycle_rev", *ENCODER, *DECODER),
        *("--share-all-embeddings", "--criterion", "label_smoothed_cross_entropy", "--batch-size", 6),
    ],
    "language_modeling": [
        *("text", "--task", "language_modeling", "--arch", "transformer_lm_shared_cycle", *DECODER),
        *("--share-decoder-input-output-embed", "--sample-break-mode", "eos", "--batch-size", 6),
    ],
    "speech_to_text": [
        *("speech", "--task", "speech_to_text", "--arch", "s2t_transformer_shared_sequence_s", *ENCODER, *DECODER),
        *(
            "--conv-channels",
            16,
            "--criterion",
            "label_smoothed_cross_entropy",
            "--batch-size",
            2,
            "--max-tokens",
            5000,
        ),
    ],
    "masked_lm": [
        *("text", "--task", "masked_lm", "--arch", "albert_encoder", *ENCODER, "--factorized-embed-dim", 8),
        *("--criterion", "masked_lm", "--sample-break-mode", "eos", "--tokens-per-sample", 64, "--batch-size", 6),
        *("--attention-dropout", 0),
    ],
}
# A large epsilon: Adam would blow up the rounding errors of gradients that are zero but for these.
ADAM = ["--optimizer", "adam", "--adam-eps", 1e-3, "--lr", 1e-2]
SGD = ["--optimizer", "sgd", "--lr", 0.5]
# Families whose models have these options in fairseq.
CHECKPOINTED = ("translation", "language_modeling")
LAYERDROP = {
    "translation": ["--encoder-layerdrop", 0.7, "--decoder-layerdrop", 0.7],
    "language_modeling": ["--decoder-layerdrop", 0.7],
    "masked_lm": ["--encoder-layerdrop", 0.7],
}


def run(command: list) -> tuple[int, str]:
    """Run a command; return its exit status and all it printed."""
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def prepare(folder: Path, run=run) -> None:
    """Make the data of all families: folders ``translation``, ``text`` and ``speech`` under ``folder``."""
    lines = {}
    for language in ("en", "de"):
        with lzma.open(EXAMPLES / "translation" / "data" / f"train.{language}.xz", "rt", encoding="utf-8") as file:
            lines[language] = [next(file) for _ in range(3000)]
    short = [i for i in range(3000) if all(2 < len(side[i].split()) <= 12 for side in lines.values())][:56]
    for language, sentences in lines.items():
        (folder / f"train.{language}").write_text("".join(sentences[i] for i in short[:48]), encoding="utf-8")
        (folder / f"valid.{language}").write_text("".join(sentences[i] for i in short[48:]), encoding="utf-8")
    clips = EXAMPLES / "speech_to_text" / "data"
    preprocess = ["fairseq-preprocess", "--trainpref", folder / "train", "--validpref", folder / "valid"]
    for command in (
        [*preprocess, *("-s", "en", "-t", "de", "--joined-dictionary", "--destdir", folder / "translation")],
        [
            *("fairseq-preprocess", "--only-source", "--trainpref", folder / "train.en"),
            *("--validpref", folder / "valid.en", "--destdir", folder / "text"),
        ],
        [
            *(sys.executable, REPOSITORY / "scripts" / "prepare_speech.py", "--audio-root", clips),
            *("--train", clips / "train.tsv", "--valid", clips / "valid.tsv", "--vocab-type", "char"),
            *("--specaugment", "none", "--out", folder / "speech"),
        ],
    ):
        status, output = run(command)
        if status != 0:
            raise RuntimeError(f"{' '.join(map(str, command))} exited with {status}:\n{output}")


def train_command(family: str, data: Path, save: Path, optimizer=ADAM) -> list:
    """Return fairseq-train for a few updates of a tiny model, without dropout and validation."""
    folder, *flags = FAMILIES[family]
    return [
        *("fairseq-train", data / folder, "--user-dir", REPOSITORY / "fairseq_sharing", "--save-dir", save, *flags),
        *("--dropout", 0, *optimizer, "--lr-scheduler", "fixed", "--max-update", UPDATES),
        *("--required-batch-size-multiple", 1, "--num-workers", 0, "--disable-validation", "--no-progress-bar"),
        *("--log-format", "simple", "--log-interval", 1),
    ]


def split_command(command: list, processes: int, gpus: int) -> list[list]:
    """Return one command for each process of data-parallel training on this machine.

    Args:
        command: fairseq-train with its flags.
        processes: how many.
        gpus: how many GPUs there are; with fewer than processes all share the first, or the CPU.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    backend = "nccl" if gpus >= processes else "gloo"  # NCCL wants a GPU of its own for each process
    distributed = [
        *("--distributed-world-size", processes, "--distributed-init-method", address, "--distributed-no-spawn"),
        *("--distributed-backend", backend),
    ]
    return [
        [*command, *distributed, "--distributed-rank", rank, "--device-id", rank if backend == "nccl" else 0]
        for rank in range(processes)
    ]


@dataclass
class Check:
    """One row of the table.

    Attributes:
        family: a key of `FAMILIES`.
        name: what is checked.
        flags: in addition to the family's.
        processes: how many.
        reference: name of the check whose run it must agree with, or None.
        bound: how far the last loss may be from the reference's.
        parameters: how far any parameter may be from the reference's, or None.
        optimizer: its flags.
    """

    family: str
    name: str
    flags: list
    processes: int = 1
    reference: str | None = None
    bound: float = 0.0
    parameters: float | None = None
    optimizer: tuple = tuple(ADAM)


def list_checks(families, cpu: bool, gpus: int = 0) -> list[Check]:
    """Return all checks of these families."""
    half = [["--bf16"], ["--memory-efficient-bf16"], ["--amp"]]
    if not cpu:
        half = [["--fp16"], ["--fp16", "--fp16-no-flatten-grads"], ["--memory-efficient-fp16"], *half]
    checks = []
    for family in families:
        one, batches = "fp32", "fp32, --update-freq 2"
        checks += [Check(family, one, []), Check(family, batches, ["--update-freq", 2])]
        checks += [Check(family, " ".join(flags), flags, reference=one, bound=0.05) for flags in half]
        if gpus > 1:
            flags = ["--distributed-world-size", 2]
            checks.append(Check(family, "two processes started by fairseq", flags, 1, batches, 1e-3, 1e-5))
        for backend in ("legacy_ddp", "pytorch_ddp"):
            ddp = ["--ddp-backend", backend]
            same = {"processes": 2, "reference": batches, "bound": 1e-3, "parameters": 1e-5}
            checks.append(Check(family, backend, ddp, **same))
            if backend == "legacy_ddp" and family in CHECKPOINTED:
                flags = ["--checkpoint-activations"]
                checks.append(Check(family, f"{backend} {flags[0]}", [*ddp, *flags], **same))
            flags = half[0] if backend == "legacy_ddp" else half[-1]
            name = " ".join([backend, *flags])
            checks.append(Check(family, name, [*ddp, *flags], 2, reference=batches, bound=0.05))
            if family in LAYERDROP:  # SGD: Adam would go on moving a set that has no gradient, or not, by the backend
                unused = ["--find-unused-parameters"] if backend == "pytorch_ddp" else []
                flags = [*ddp, *unused, *LAYERDROP[family]]
                other = {"reference": "legacy_ddp LayerDrop", "bound": 1e-3, "parameters": 1e-5} if unused else {}
                checks.append(Check(family, f"{backend} LayerDrop", flags, 2, optimizer=tuple(SGD), **other))
    return checks


def count_stored(checkpoint: Path) -> tuple[int, int, int]:
    """Return numbers of a checkpoint: stored in the model, stored without aliases, in the optimizer's first moments."""
    import torch

    import fairseq_sharing  # noqa: F401 (lets torch.load read fairseq's classes)

    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    tensors = [t for name, t in saved["model"].items() if t.is_floating_point() and "version" not in name]
    unique = {(t.data_ptr(), t.shape): t.numel() for t in tensors}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // t.element_size() for t in tensors}
    moments = saved["last_optimizer_state"]["state"].values()
    return (
        sum(storages.values()),
        sum(unique.values()),
        sum(each["exp_avg"].numel() for each in moments if "exp_avg" in each),
    )


def largest_difference(one: Path, other: Path) -> float:
    """Return how far apart the parameters of two checkpoints are at most."""
    import torch

    one, other = (torch.load(path, map_location="cpu", weights_only=True)["model"] for path in (one, other))
    if one.keys() != other.keys():
        return float("inf")
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


class Session:
    """Runs checks and keeps what they left.

    Args:
        folder: where `prepare` left the data and checkpoints go.
        cpu: whether to add --cpu.
        gpus: how many GPUs there are.
        run: function that runs one command, as `run`.

    Attributes:
        trained: for each check that ran, whether all processes ended well, what they printed, and the last loss.
    """

    def __init__(self, folder: Path, cpu: bool, gpus: int, run=run):
        self.folder, self.cpu, self.gpus, self.run = folder, cpu, gpus, run
        self.trained: dict[tuple[str, str], tuple[bool, str, float]] = {}

    def checkpoint(self, family: str, name: str) -> Path:
        """Return where a check leaves its checkpoint."""
        return self.folder / "save" / family / re.sub(r"\W+", "_", name) / "checkpoint_last.pt"

    def train(self, check: Check) -> None:
        """Run a check's processes, unless they have run."""
        if (check.family, check.name) in self.trained:
            return
        save = self.checkpoint(check.family, check.name).parent
        command = train_command(check.family, self.folder, save, check.optimizer)
        command += [*(["--cpu"] if self.cpu else ["--distributed-world-size", 1]), *check.flags]
        commands = [command] if check.processes == 1 else split_command(command, check.processes, self.gpus)
        with ThreadPoolExecutor(check.processes) as pool:
            results = list(pool.map(self.run, commands))
        losses = re.findall(r"epoch \d+:.*? loss=([\d.]+)", results[0][1])
        self.trained[check.family, check.name] = (
            all(status == 0 for status, _ in results),
            "\n".join(output for _, output in results),
            float(losses[-1]) if losses else float("nan"),
        )

    def judge(self, check: Check) -> tuple[bool, str]:
        """Return whether a check passed, and its measured figures or the end of what it printed."""
        ended, output, loss = self.trained[check.family, check.name]
        if not ended:
            return False, output.strip().splitlines()[-1] if output.strip() else "no output"
        checkpoint = self.checkpoint(check.family, check.name)
        stored, unique, moments = count_stored(checkpoint)
        number = int(re.search(r"num. shared model params: ([\d,]+)", output)[1].replace(",", ""))
        found, passed = [f"loss {loss:.3f}", f"{stored:,} numbers stored"], stored == unique == number
        if "adam" in check.optimizer:
            passed = passed and moments == number
            found.append(f"{moments:,} first moments")
        if check.reference is not None:
            _, _, expected = self.trained[check.family, check.reference]
            found.append(f"loss off by {abs(loss - expected):.1g} (bound {check.bound:g})")
            passed = passed and abs(loss - expected) <= check.bound
        if check.parameters is not None:
            difference = largest_difference(checkpoint, self.checkpoint(check.family, check.reference))
            found.append(f"parameters off by {difference:.1g} (bound {check.parameters:g})")
            passed = passed and difference <= check.parameters
        return passed, ", ".join(found)


def check_all(families, folder: Path, cpu: bool, gpus: int, jobs: int, run=run) -> int:
    """Run the checks of these families, print the table, and return how many failed."""
    session = Session(folder, cpu, gpus, run)
    checks = list_checks(families, cpu, gpus)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(session.train, checks))
    failed = 0
    for check in checks:
        passed, found = session.judge(check)
        failed += not passed
        print(f"{'ok' if passed else 'FAILED':6}  {check.family:17}  {check.name:42}  {found}", flush=True)
    return failed


def main(argv=None, run=run) -> int:
    """Parse the command line and run; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog="example: python scripts/check_gpu.py --families masked_lm"
    )
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="default: all")
    parser.add_argument("--jobs", type=int, help="runs at the same time (default: 8 on GPUs, 1 on the CPU)")
    args = parser.parse_args(argv)
    start = time.time()
    gpus = 0
    if not args.cpu:
        import torch

        gpus = torch.cuda.device_count()
        if gpus == 0:
            parser.error("torch sees no GPU: --cpu checks what can be checked without one")
        print(f"{gpus} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        prepare(folder, run)
        failed = check_all(args.families, folder, args.cpu, gpus, args.jobs or (1 if args.cpu else 8), run)
    print(f"{failed} failed; {(time.time() - start) / 60:.1f} minutes")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
