"""Commands in processes of their own, as a shell starts them, without importing torch and fairseq anew each time.

A server imports what all of fairseq's commands import, except the commands themselves and the plugin, and forks one
process for each command. That process gets its own arguments, folder, environment and files, and calls the entry point
that the console script calls. tests/test_plugin.py and the quick start's tests start whole interpreters.
"""

import atexit
import contextlib
import importlib
import multiprocessing
import os
import resource
import sys
import tempfile
from pathlib import Path

# What fairseq and torch would take from a cluster or from several GPUs: the tests are for one process on the CPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
for name in [*os.environ]:
    if name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") or name.startswith("SLURM_"):
        del os.environ[name]
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    [
        *("fairseq.checkpoint_utils", "fairseq.trainer", "fairseq.tasks", "fairseq.models", "fairseq.criterions"),
        *("fairseq.sequence_generator", "fairseq.dataclass.initialize", "torch.utils.tensorboard", "sacrebleu"),
    ]
)
MODULES = {"fairseq-sharing": "fairseq_sharing.tools.main", "sacrebleu": "sacrebleu.sacrebleu"}


def environment(**changes) -> dict[str, str]:
    """Return environment variables for a script of the examples, which finds this Python on its PATH.

    Nothing of the caller's is among them that could be a setting.
    """
    names = ("HOME", "LANG", "LC_ALL", "TMPDIR", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", **changes}


def command_lines() -> list[bytes]:
    """Return those of all processes that are there."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes())
    return lines


class Command:
    """A console script that runs in a process of its own.

    Args:
        command: the script's name, such as ``fairseq-train``, and its arguments.
        cwd: the folder to run in; by default this process's.
        largest_file: the most bytes that the process may write to a file; by default there is no limit.
        env: additions to the environment.
    """

    def __init__(self, command: list, cwd=None, largest_file: int | None = None, **env: str):
        self.folder = tempfile.TemporaryDirectory()
        self.files = [str(Path(self.folder.name, name)) for name in ("stdout", "stderr")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        words = [str(word) for word in command]
        arguments = (words, str(cwd or Path.cwd()), environment, self.files, largest_file)
        self.process = FORKSERVER.Process(target=_call, args=arguments)
        self.process.start()

    def wait(self) -> tuple[int, str, str]:
        """Return the exit status (negative for a signal), standard output and standard error, once it has ended."""
        self.process.join()
        with self.folder:
            return self.process.exitcode, *(Path(file).read_text("utf-8") for file in self.files)


def _call(command: list[str], cwd: str, environment: dict[str, str], files: list[str], largest_file: int | None):
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for target, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), target)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    program = command[0]
    module = MODULES.get(program, "fairseq_cli." + program.removeprefix("fairseq-").replace("-", "_"))
    sys.argv[:] = command
    try:
        entry = importlib.import_module(module)
        sys.exit(getattr(entry, "cli_main", getattr(entry, "main", None))())
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
