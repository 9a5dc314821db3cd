"""The plugin as a package: ways to import it, who imports whom, and the folder rules of fairseq."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PLUGIN, REPOSITORY

# Who may import whom inside the package: only downward.
LAYERS = [
    {"tools"},
    {"__init__"},
    {"models"},
    {"shared_model", "architecture"},
    {"options", "arguments", "checkpoint", "upstream"},
    {"refusals", "embedding", "residual", "gradients", "attention", "inference"},
    {"sharing"},
    {"strategies"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def module_name(path) -> str:
    return path.relative_to(PLUGIN).parts[0].removesuffix(".py")


def imports_of(path):
    """Yield (imported module, level of dots) for each import statement of a file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module or ''}.{alias.name}", node.level) for alias in node.names)


FILES = sorted(PLUGIN.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PLUGIN)))
def test_imports_point_downward(path):
    ours = module_name(path)
    for name, dots in imports_of(path):
        depth = len(path.relative_to(PLUGIN).parts)  # 1 at the top, 2 in a folder
        if name.startswith("fairseq_sharing."):
            name, dots = name.removeprefix("fairseq_sharing."), depth
        if dots == 0 or dots < depth:
            continue  # outside the package, or a sibling within the folder
        theirs = name.strip(".").split(".")[0]
        assert LEVEL[theirs] > LEVEL[ours], f"{path.name} imports {theirs}"


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("strategies", ("torch", "fairseq", "numpy")),
        ("sharing", ("fairseq",)),
        ("checkpoint", ("fairseq",)),
        ("embedding", ("fairseq",)),
        ("residual", ("fairseq",)),
        ("gradients", ("fairseq",)),
    ],
)
def test_pure_modules_stay_pure(module, forbidden):
    used = {name.split(".")[0] for name, dots in imports_of(PLUGIN / f"{module}.py") if dots == 0}
    assert not used & set(forbidden)


def test_models_never_import_each_other():
    for path in (PLUGIN / "models").glob("[a-z]*.py"):
        assert not [name for name, dots in imports_of(path) if dots == 1]


def test_no_packages_that_shadow_fairseqs():
    for folder in ("examples", "scripts", "tests"):
        assert not list((REPOSITORY / folder).rglob("__init__.py"))


SHOW_ARCH = """
import sys
from fairseq import options
sys.argv[1:] = ["--user-dir", sys.argv[1]]
parser = options.get_training_parser()
from fairseq.models import ARCH_MODEL_REGISTRY
assert "transformer_shared_cycle_rev" in ARCH_MODEL_REGISTRY
import fairseq_sharing
print(fairseq_sharing.__file__)
"""


def import_by(user_dir: str, cwd, path=(), code: str = SHOW_ARCH) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code, user_dir], cwd=cwd, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("user_dir", "cwd"),
    [
        (str(PLUGIN), REPOSITORY.anchor),
        ("fairseq_sharing", REPOSITORY),
        ("./fairseq_sharing", REPOSITORY),
        ("fairseq_sharing/", REPOSITORY),
        ("../fairseq_sharing", REPOSITORY / "tests"),
    ],
)
def test_import_routes(user_dir, cwd):
    result = import_by(user_dir, cwd)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(PLUGIN / "__init__.py")


def test_import_before_user_dir():
    code = SHOW_ARCH.replace(
        "import sys\n", "import sys\nsys.path.insert(0, sys.argv[1].rpartition('/')[0])\nimport fairseq_sharing\n", 1
    )
    result = import_by(str(PLUGIN), REPOSITORY.anchor, code=code)
    assert result.returncode == 0, result.stderr


def test_a_clone_of_the_same_name_beside_us(tmp_path):
    """From the parent of a clone called fairseq_sharing the full path still works."""
    clone = tmp_path / "fairseq_sharing"
    shutil.copytree(PLUGIN, clone / "fairseq_sharing", ignore=shutil.ignore_patterns("__pycache__"))
    result = import_by("fairseq_sharing/fairseq_sharing", tmp_path, path=[clone])
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(clone / "fairseq_sharing" / "__init__.py")


CHOOSE_ARCH = """
import sys
sys.argv[:] = ["fairseq-train", "data", "--arch", "transformer_shared_cycle_rev", "--user-dir", sys.argv[1]]
from fairseq_cli.train import cli_main
cli_main()
"""


def assert_explained(result: subprocess.CompletedProcess, message: str) -> None:
    """Fairseq stops with a message that docs/limits.md explains."""
    assert result.returncode != 0 and message in result.stderr.strip().splitlines()[-1]
    assert f"| `{message}" in (REPOSITORY / "docs" / "limits.md").read_text("utf-8")


def test_the_bare_name_in_the_parent_of_a_clone(tmp_path):
    """There it names the clone's root, where no model is."""
    shutil.copytree(PLUGIN, tmp_path / "fairseq_sharing" / "fairseq_sharing")
    result = import_by("fairseq_sharing", tmp_path, code=CHOOSE_ARCH)
    assert_explained(result, "argument --arch/-a: invalid choice: 'transformer_shared_")


@pytest.mark.slow
def test_a_link_of_another_name(tmp_path):
    """It works alone, and not beside the plugin's own name."""
    (tmp_path / "other").symlink_to(PLUGIN)
    alone = SHOW_ARCH.partition("import fairseq_sharing")[0]
    assert import_by("other", tmp_path, code=alone).returncode == 0
    result = import_by("other", tmp_path, path=[REPOSITORY], code=f"import fairseq_sharing\n{CHOOSE_ARCH}")
    assert_explained(result, "ValueError: Cannot register duplicate model")


@pytest.mark.slow
def test_a_link_of_the_same_name(tmp_path):
    """It works alone, and not where the plugin is imported from the folder itself too."""
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "fairseq_sharing").symlink_to(PLUGIN)
    result = import_by("links/fairseq_sharing", tmp_path)
    assert result.returncode == 0, result.stderr
    code = f"import fairseq_sharing\n{CHOOSE_ARCH}"
    assert_explained(import_by("links/fairseq_sharing", tmp_path, path=[REPOSITORY], code=code), "not globally unique")


@pytest.mark.slow
def test_an_installed_copy_from_any_folder(tmp_path):
    """Fairseq looks beside its own package for a name that is no folder; with a slash behind it stops."""
    site = tmp_path / "site"
    fairseq = Path(importlib.util.find_spec("fairseq").origin).parent
    shutil.copytree(fairseq, site / "fairseq", ignore=shutil.ignore_patterns("__pycache__", "examples"))
    shutil.copytree(PLUGIN, site / "fairseq_sharing", ignore=shutil.ignore_patterns("__pycache__"))
    folder = subprocess.run(
        [sys.executable, "-m", "fairseq_sharing.tools.main", "path"],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert folder == str(site / "fairseq_sharing")
    for user_dir in ("fairseq_sharing", folder, f"{folder}/"):
        result = import_by(user_dir, tmp_path, path=[site])
        assert result.returncode == 0, result.stderr
        assert Path(result.stdout.strip()).resolve() == site / "fairseq_sharing" / "__init__.py"
    assert_explained(
        import_by("fairseq_sharing/", tmp_path, path=[site], code=CHOOSE_ARCH), "ValueError: Empty module name"
    )


# What several GPUs start, and data workers on platforms without fork. Only the number of processes is pretended.
SPAWN = """
import multiprocessing
import sys
import torch
from fairseq_cli.train import cli_main
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    torch.cuda.device_count = lambda: 2
    cli_main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["translation", "language_modeling"])
def test_spawned_processes_find_the_plugin(data, tmp_path, family):
    """Workers that import everything anew: two training processes, each with a spawned data worker."""
    arch, flags = "transformer_shared_cycle", ["--encoder-layers", 2, "--encoder-unique-layers", 1]
    if family == "language_modeling":
        (tmp_path / "data").mkdir()
        for split in ("train", "valid"):
            for end in ("bin", "idx"):
                shutil.copy(data / f"{split}.en-de.de.{end}", tmp_path / "data" / f"{split}.{end}")
        shutil.copy(data / "dict.de.txt", tmp_path / "data" / "dict.txt")
        data, arch, flags = tmp_path / "data", "transformer_lm_shared_cycle", ["--sample-break-mode", "eos"]
    (tmp_path / "train.py").write_text(SPAWN)
    words = [
        *(sys.executable, tmp_path / "train.py", data, "--task", family, "--arch", arch, "--user-dir", PLUGIN, *flags),
        *("--decoder-layers", 2, "--decoder-unique-layers", 1, "--cpu", "--max-update", 2, "--max-tokens", 500),
        *("--optimizer", "adam", "--ddp-backend", "legacy_ddp", "--distributed-backend", "gloo", "--num-workers", 1),
        *("--distributed-world-size", 2, "--disable-validation", "--save-dir", tmp_path / "save", "--log-file"),
        *(tmp_path / "log", "--no-progress-bar"),
    ]
    env = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(list(map(str, words)), cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / "save" / "checkpoint_last.pt").is_file()
    assert "rank 1" in result.stdout + result.stderr


def test_strategies_need_no_fairseq(tmp_path):
    """Without fairseq the package still imports, and the command says what to install."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'fairseq':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'fairseq' else find(name, *a)\n"
    )
    code = "import fairseq_sharing.tools.main as m, sys; sys.exit(m.main([sys.argv[1]]))"
    result = import_by("path", REPOSITORY, path=[tmp_path], code=code)
    assert result.returncode == 2
    assert result.stderr.strip().startswith(
        "fairseq-sharing path: error: fairseq_sharing found no fairseq to plug into"
    )
