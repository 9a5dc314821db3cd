"""The plugin as a package: ways to import it, who imports whom, and the folder rules of fairseq."""

import ast
import os
import shutil
import subprocess
import sys

import pytest
from conftest import PLUGIN, REPOSITORY

# Who may import whom inside the package: only downward.
LAYERS = [
    {"tools"},
    {"__init__"},
    {"models"},
    {"shared_model", "architecture"},
    {"options", "checkpoint", "upstream"},
    {"embedding", "residual", "gradients"},
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
        depth = len(path.relative_to(PLUGIN).parts)  # 1 at the top, 2 in models/ and tools/
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
