"""Make a fairseq checkpoint of a model that was written by another program, or by export.

    hf-albert    a folder of Hugging Face's ALBERT (AlbertModel and its heads; the published ones too) becomes an
                 albert_encoder with its dictionary, to fine-tune or to go on pretraining
    safetensors  a folder of `export --to safetensors` becomes the checkpoint that it was, without its optimizer

Examples:
    fairseq-sharing import albert-base-v2 --from hf-albert --out albert
    fairseq-sharing import weights --from safetensors --out restored
"""

import importlib
from pathlib import Path

HELP = "make a checkpoint from a model of Hugging Face, or from safetensors"
SOURCES = {"hf-albert": "import_hf_albert", "safetensors": "safetensors_file"}


def add_arguments(parser) -> None:
    """Add the flags."""
    parser.add_argument("folder", metavar="DIR", help="the folder to read")
    parser.add_argument("--from", required=True, dest="source", choices=SOURCES, help="what it holds")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write, with model.pt in it")
    parser.add_argument("--force", action="store_true", help="replace the files of an earlier import")


def run(args) -> None:
    """Read, write the folder in one step, and say what is in it."""
    import shutil

    import torch

    from .files import check_output_folder, quiet_log, write_folder

    check_output_folder(args.out, args.force)
    if not Path(args.folder).is_dir():
        raise ValueError(f"there is no folder {args.folder}")
    with quiet_log():
        reader = importlib.import_module(f".{SOURCES[args.source]}", __package__)
        checkpoint, beside, notes = reader.read(Path(args.folder), args)

    def write(folder: Path) -> None:
        torch.save(checkpoint, folder / "model.pt")
        for name, content in beside.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, folder / name)
            else:
                (folder / name).write_text(content, encoding="utf-8")

    write_folder(args.out, write)
    written = ", ".join(["model.pt", *sorted(beside)])
    print(f"{args.source}: {args.folder}", f"fairseq: {args.out}: {written}", *notes, sep="\n")
