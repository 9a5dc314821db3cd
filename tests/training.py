"""The tiny models of scripts/check_gpu.py, trained with fairseq's own code."""

import io
import logging
import sys

import check_gpu
from commands import Command
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import open_dict


def configure(command: list, **common):
    """Return the configuration that fairseq-train makes of its command line, with these settings of ``common``."""
    args = options.parse_args_and_arch(options.get_training_parser(), [str(word) for word in command[1:]])
    cfg = convert_namespace_to_omegaconf(args)
    with open_dict(cfg):
        cfg.common.update(common)
    return cfg


def builder(command: list):
    """Return a function that builds the model of a fairseq-train command."""
    cfg = configure(command)
    task = tasks.setup_task(cfg.task)
    return lambda: task.build_model(cfg.model)


def build(command: list):
    """Build the model of a fairseq-train command."""
    return builder(command)()


def train_here(command: list, **common) -> str:
    """Run fairseq-train in this process, which spares its start; return the log."""
    from fairseq_cli.train import main

    cfg = configure(command, **common)
    log = io.StringIO()
    handler, root = logging.StreamHandler(log), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        main(cfg)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    return log.getvalue()


def run(command: list) -> tuple[int, str]:
    """Run a command as `check_gpu.run` does, but training by one process here and other commands of fairseq forked."""
    if command[0] == "fairseq-train" and "--distributed-init-method" not in command:
        return 0, train_here(command)
    if command[0] == sys.executable:
        return check_gpu.run(command)
    status, out, err = Command(command).wait()
    return status, out + err
