"""The commands in README.md, docs and the examples' READMEs: the programs they call understand each of them."""

import argparse
import importlib
import keyword
import re
import shlex
from collections.abc import Iterator

import pytest
from conftest import PLUGIN, REPOSITORY
from fairseq import options

from fairseq_sharing.tools.main import COMMANDS

ARCH = "transformer_shared_cycle_rev"
PARSERS = {
    "train": options.get_training_parser,
    "generate": options.get_generation_parser,
    "eval-lm": options.get_eval_lm_parser,
    "interactive": options.get_interactive_generation_parser,
    "preprocess": options.get_preprocessing_parser,
}
OTHERS = {"sharing", "hydra-train"}  # the latter's YAML is tried in test_hydra_configs.py
COMMAND = re.compile(r"(?:^|[\s(])fairseq-([a-z-]+)\)?(?=\s|$)((?:(?!\sfairseq-).)*)")
PAGES = sorted(
    path.relative_to(REPOSITORY)
    for path in (
        REPOSITORY / "README.md",
        *(REPOSITORY / "docs").glob("*.md"),
        *(REPOSITORY / "examples").rglob("README.md"),
    )
)


def read_commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield (program, arguments) of each command in a fenced block."""
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        for found in COMMAND.finditer(line):
            yield found[1], found[2]


EVERY = [(path, *command) for path in PAGES for command in read_commands((REPOSITORY / path).read_text("utf-8"))]


def split(arguments: str) -> list[str]:
    """Return the words that a shell would pass on, up to the end of the command.

    Variables are 1, the plugin has its full path, and what an ellipsis stands for is an architecture.
    """
    words = shlex.split(re.sub(r"\$\w+", "1", arguments.replace("…", f"--arch {ARCH}")), comments=True)
    end = next((number for number, word in enumerate(words) if re.fullmatch(r"[|&;>]+|\d?>.*", word)), len(words))
    return [str(PLUGIN) if word == "fairseq_sharing" else word for word in words[:end]]


@pytest.mark.parametrize(
    ("program", "arguments"),
    [pytest.param(*command, id=f"{path}: {command[0]}") for path, *command in EVERY if command[0] != "hydra-train"],
)
def test_a_documented_command(program, arguments, tmp_path, monkeypatch):
    """In a folder where the plugin and its data are; what the data hold is looked at by other tests."""
    words = split(arguments)
    for name in ("dict.txt", "dict.en.txt", "dict.de.txt", "input0/dict.txt", "label/dict.txt", "train.en-de.en.idx"):
        path = tmp_path / words[0].lstrip("/") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.chdir(tmp_path)
    if program == "preprocess":
        options.get_preprocessing_parser().parse_args(words)
        return
    if program in PARSERS:
        options.parse_args_and_arch(PARSERS[program](), words)
        return
    name, *words = words
    assert name in COMMANDS
    module = importlib.import_module(f"fairseq_sharing.tools.{name}{'_' * keyword.iskeyword(name)}")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    module.add_arguments(parser)
    _, extra = parser.parse_known_args(words)
    if extra and getattr(module, "PASSES_ON", False):
        architecture = [] if "--arch" in extra else ["--arch", ARCH]  # else in the YAML of compare
        options.parse_args_and_arch(options.get_training_parser(), ["", *architecture, *extra])
    else:
        assert not extra


def test_the_commands_are_found(capsys):
    """Of all programs; and a wrong flag is noticed."""
    assert {program for _, program, _ in EVERY} == PARSERS.keys() | OTHERS
    text = "```sh\nOMP=1 fairseq-generate bin \\\n    --beam 4 > out\n```\nor `fairseq-sharing show`"
    assert list(read_commands(text)) == [("generate", " bin      --beam 4 > out")]
    assert split('data --lr "$LR" --user-dir fairseq_sharing | tail') == [
        "data",
        "--lr",
        "1",
        "--user-dir",
        str(PLUGIN),
    ]
    with pytest.raises(SystemExit):
        options.parse_args_and_arch(options.get_training_parser(), ["", "--arch", ARCH, "--encoder-unique", "3"])
    assert "unrecognized arguments: --encoder-unique 3" in capsys.readouterr().err
