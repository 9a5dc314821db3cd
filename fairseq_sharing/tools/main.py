"""Entry point of ``fairseq-sharing``."""

import argparse
import importlib
import importlib.util
import keyword
import sys

COMMANDS = (
    *("path", "show", "compare", "average", "curves", "gradients", "unigram", "init", "untie", "export", "import"),
)
NO_FAIRSEQ = (
    "fairseq_sharing found no fairseq to plug into: install one with pip install 've-fairseq==0.12.3', "
    "or your own build from source"
)


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: arguments after the program's name; those of the process when not given.

    Returns:
        0, or 2 after one sentence on standard error when the input was wrong.
    """
    parser = argparse.ArgumentParser(
        prog="fairseq-sharing", description="Tools for models whose layers share parameters."
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands = {}
    for name in COMMANDS:
        file = f"{name}_" if keyword.iskeyword(name) else name
        module = commands[name] = importlib.import_module(f".{file}", __package__)
        subparser = subparsers.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(subparser)
    args, extra = parser.parse_known_args(argv)
    module = commands[args.command]
    if extra and not getattr(module, "PASSES_ON", False):
        subparsers.choices[args.command].error(f"unrecognized arguments: {' '.join(extra)}")
    args.extra = extra
    try:
        if importlib.util.find_spec("fairseq") is None:
            raise ValueError(NO_FAIRSEQ)
        return module.run(args) or 0
    except (ValueError, OSError) as error:
        print(f"fairseq-sharing {args.command}: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
