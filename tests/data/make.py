"""Make the checkpoints of this folder: one small model of each family, trained for a moment by fairseq-train.

    python tests/data/make.py

It was run once, with the version that README.md names, and is kept to show how. A checkpoint that is here stays as it
is: the tests hold later versions to it. The data are those of tests/families.py; only what evaluation reads is kept.
"""

import json
import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import families  # noqa: E402
from families import FAMILIES, configure, evaluate, make_data, run_train  # noqa: E402

FEWER = ["--max-update", 200, "--lr", 0.02, "--no-epoch-checkpoints", "--dropout", 0]


def make(name: str, folder: Path) -> None:
    """Train a model of three layers, E = 8 where embeddings are factorised, and record what it computes.

    Paths are given relative to this folder, since a checkpoint keeps its command line.
    """
    family = FAMILIES[name]
    flags = [*family.sets(2), *FEWER]
    for stack in family.stacks:
        flags += [f"--{stack}-layers", 3, f"--{stack}-ffn-embed-dim", 16]
    if name == "masked language model":
        flags += ["--factorized-embed-dim", 8]
    if name != "language model":
        flags += ["--no-save-optimizer-state"]
    run_train(configure(family, folder, Path("run"), *flags))
    shutil.copyfile("run/checkpoint_last.pt", folder / "model.pt")
    shutil.rmtree("run")
    (folder / "expected.json").write_text(json.dumps(evaluate(name, folder, folder / "model.pt"), indent=1) + "\n")
    for path in folder.glob("*train*"):
        path.unlink()


if __name__ == "__main__":
    os.chdir(HERE)
    families.PLUGIN = os.path.relpath(families.PLUGIN)
    for name, folder in make_data(Path(".")).items():
        make(name, folder)
