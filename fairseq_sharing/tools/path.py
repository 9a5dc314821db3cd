"""Print the folder to give to --user-dir, so that fairseq finds the plugin from any working directory.

Example:
    fairseq-train data-bin --user-dir "$(fairseq-sharing path)" --arch transformer_shared_cycle_rev ...
"""

from pathlib import Path

HELP = "print the folder for --user-dir"


def add_arguments(parser) -> None:
    """Take no arguments."""


def run(args) -> None:
    """Print the folder without a trailing slash, which fairseq cannot read in an installed copy."""
    print(Path(__file__).resolve().parent.parent)
