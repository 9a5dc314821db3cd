"""Average the parameters of checkpoints, as fairseq's scripts/average_checkpoints.py does.

Sums in float64, writes each tensor once, and refuses checkpoints whose layers are shared differently. The result
keeps everything else of the first checkpoint except the optimizer's state and the moving average of --store-ema, which
belong to no averaged model.

Examples:
    fairseq-sharing average --inputs checkpoints --num-epoch-checkpoints 10 --output checkpoints/averaged.pt
    fairseq-sharing average --inputs a.pt b.pt c.pt --output averaged.pt
"""

import re
from pathlib import Path

HELP = "average checkpoints"


def add_arguments(parser) -> None:
    """Add the flags of fairseq's script."""
    parser.add_argument(
        "--inputs", nargs="+", required=True, metavar="PATH", help="checkpoint files, or one folder of them"
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="where to write the averaged checkpoint")
    number = parser.add_mutually_exclusive_group()
    number.add_argument(
        "--num-epoch-checkpoints",
        type=int,
        metavar="K",
        help="take the last K files checkpoint<epoch>.pt of the folder",
    )
    number.add_argument(
        "--num-update-checkpoints",
        type=int,
        metavar="K",
        help="take the last K files checkpoint_<epoch>_<update>.pt of the folder",
    )
    parser.add_argument(
        "--checkpoint-upper-bound",
        type=int,
        metavar="N",
        help="leave out files after this epoch (--num-epoch-checkpoints) or update (--num-update-checkpoints)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite the output")


PATTERNS = {
    "num_epoch_checkpoints": r"checkpoint(\d+)\.pt",
    "num_update_checkpoints": r"checkpoint_\d+_(\d+)\.pt",
}


def select_checkpoints(args) -> list[str]:
    """Return the files that the flags name, the last one first, as fairseq does.

    Raises:
        ValueError: the flags do not go together or name too few files.
    """
    wanted = [(name, getattr(args, name)) for name in PATTERNS if getattr(args, name) is not None]
    if not wanted:
        if args.checkpoint_upper_bound is not None:
            raise ValueError("--checkpoint-upper-bound needs --num-epoch-checkpoints or --num-update-checkpoints")
        folders = [path for path in args.inputs if Path(path).is_dir()]
        if folders:
            flags = "--num-epoch-checkpoints or --num-update-checkpoints"
            raise ValueError(f"--inputs {folders[0]} is a folder: say which files with {flags}")
        return args.inputs
    name, number = wanted[0]
    flag = "--" + name.replace("_", "-")
    if number < 1:
        raise ValueError(f"{flag} {number} must be at least 1")
    missing = [path for path in args.inputs if not Path(path).exists()]
    if missing:
        raise ValueError(f"--inputs {missing[0]}: there is no such file or folder")
    if len(args.inputs) != 1 or not Path(args.inputs[0]).is_dir():
        raise ValueError(f"{flag} needs --inputs to be one folder, not {' '.join(args.inputs)}")
    matches = [(re.fullmatch(PATTERNS[name], path.name), path) for path in Path(args.inputs[0]).iterdir()]
    numbered = [(float(match[1]), str(path)) for match, path in matches if match]
    if args.checkpoint_upper_bound is not None:
        numbered = [entry for entry in numbered if entry[0] <= args.checkpoint_upper_bound]
    if len(numbered) < number:
        raise ValueError(f"{flag} {number}: found only {len(numbered)} such files in {args.inputs[0]}")
    return [path for _, path in sorted(numbered, reverse=True)[:number]]


def check_same_sharing(first: dict, other: dict, first_path: str, other_path: str) -> None:
    """Refuse to average models that share differently or have other tensors.

    Raises:
        ValueError: with both assignments, or the first tensor that differs.
    """
    from ..checkpoint import RECORD, decode_sharing

    for key in sorted(key for key in first.keys() | other.keys() if key.endswith("." + RECORD)):
        found = [decode_sharing(model[key]) if key in model else None for model in (first, other)]
        if None in found or not found[0].same_as(found[1]):
            stack = key.removesuffix("." + RECORD)
            shown = ["unshared" if sharing is None else f"shared as {sharing}" for sharing in found]
            raise ValueError(
                f"cannot average differently shared models: {stack} is {shown[0]} in {first_path} "
                f"and {shown[1]} in {other_path}"
            )
    odd = sorted(first.keys() ^ other.keys()) or [key for key in first if first[key].shape != other[key].shape]
    if odd:
        raise ValueError(f"cannot average different models: {first_path} and {other_path} differ in {odd[0]}")


def average_models(paths: list[str]) -> dict:
    """Return the averaged ``model`` dictionary; tensors that were one in the first file are one again.

    Half precision comes out as fp32. Integers are averaged as integers; a record of sharing is the first file's, whose
    numbering of the sets may differ from the others'.
    """
    import torch

    from ..checkpoint import RECORD
    from .files import load_checkpoint

    first, total = None, {}
    for path in paths:
        model = load_checkpoint(path)["model"]
        if first is None:
            first = model
        else:
            check_same_sharing(first, model, paths[0], path)
        for key, value in model.items():
            if key.endswith("." + RECORD):
                continue
            value = value.double() if value.is_floating_point() else value.long()
            total[key] = total[key] + value if key in total else value.clone()
    averaged, seen = {}, {}
    for key, value in first.items():
        if key not in total:
            averaged[key] = value
            continue
        if value.is_floating_point():
            mean = (total.pop(key) / len(paths)).to(torch.promote_types(value.dtype, torch.float32))
        else:
            mean = (total.pop(key) // len(paths)).to(value.dtype)
        alias = seen.setdefault((value.data_ptr(), value.shape, value.stride()), mean)
        averaged[key] = alias if torch.equal(alias, mean) else mean
    return averaged


def run(args) -> None:
    """Average, then write the checkpoint in one step."""
    import torch

    from .files import check_output, load_checkpoint, write_atomically

    check_output(args.output, args.force)
    paths = select_checkpoints(args)
    model = average_models(paths)
    state = load_checkpoint(paths[0])
    state["model"] = model
    state.pop("last_optimizer_state", None)
    if state.get("extra_state"):
        state["extra_state"] = {key: value for key, value in state["extra_state"].items() if not key.startswith("ema")}
    write_atomically(args.output, lambda temporary: torch.save(state, temporary))
    print(f"averaged {len(paths)} checkpoints into {args.output}:", *paths, sep="\n  ")
