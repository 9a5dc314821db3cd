"""One copy of each tensor as safetensors, with everything else that a model needs as metadata, and the way back.

The metadata are texts, as the format wants them:

    format               pt
    fairseq_sharing      the version of this list
    names                JSON: each name in the checkpoint -> the name under which its tensor is stored
    sharing              JSON: each shared stack -> {"assignment": [0, 1, 1, 0], "parts": ["attention", "ffn", "norm"]}
    cfg, args            JSON: its configuration; a Namespace is {"Namespace": {...}}, a tuple {"tuple": [...]}
    optimizer_history    JSON: the number of updates and the like, but no optimizer
"""

import json
import re
from argparse import Namespace
from pathlib import Path

import torch

from ..checkpoint import RECORD, decode_sharing, encode_sharing
from ..sharing import Sharing
from .export_fairseq import copy_texts
from .files import need
from .trained import SENTENCEPIECE, Trained, as_checkpoint, as_plain, check_sentencepiece, dictionary_files, find_data

FILE = "model.safetensors"
FORMAT = "1"


def check_packages() -> None:
    """Refuse to start without safetensors."""
    need("safetensors", "--to safetensors")


def export(trained: Trained, args):
    """Return the function that writes the folder, and what to print after it."""
    from safetensors.torch import save_file

    data = find_data(trained, args.data)
    dictionaries = dictionary_files(trained, data)
    check_sentencepiece(args.sentencepiece_model, dictionaries)
    tensors, metadata = pack(trained.state)

    def write(folder: Path) -> None:
        save_file(tensors, str(folder / FILE), metadata)
        copy_texts(trained, data, dictionaries, args.sentencepiece_model, folder)

    return write, []


def pack(state: dict) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a checkpoint, each once, and the metadata."""
    stored, names, places, sharing = {}, {}, {}, {}
    for name, tensor in state["model"].items():
        if name.endswith(f".{RECORD}"):
            record = decode_sharing(tensor)
            sharing[name.removesuffix(f".{RECORD}")] = {"assignment": record.assignment, "parts": record.parts}
            continue
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        names[name] = places.setdefault(place, name)
        if names[name] == name:
            stored[name] = tensor.contiguous().clone()  # the format wants memory of its own for each
    metadata = {
        "format": "pt",
        "fairseq_sharing": FORMAT,
        "names": json.dumps(names),
        "sharing": json.dumps(sharing),
        "cfg": json.dumps(mark_types(state.get("cfg"))),
        "args": json.dumps(mark_types(state.get("args"))),
        "optimizer_history": json.dumps(as_plain(state.get("optimizer_history"))),
    }
    return stored, metadata


def mark_types(value):
    """Return what JSON can hold; a Namespace and a tuple are told from a dictionary and a list."""
    if isinstance(value, Namespace):
        return {"Namespace": mark_types(vars(value))}
    if isinstance(value, dict):
        return {key: mark_types(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [mark_types(entry) for entry in value]
        return {"tuple": entries} if isinstance(value, tuple) else entries
    return as_plain(value)


def restore_types(value):
    """Undo `mark_types`."""
    if isinstance(value, list):
        return [restore_types(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    restored = {key: restore_types(entry) for key, entry in value.items()}
    if restored.keys() == {"tuple"}:
        return tuple(restored["tuple"])
    return Namespace(**restored["Namespace"]) if restored.keys() == {"Namespace"} else restored


def read(folder: Path, args):
    """Read an exported folder back.

    Returns:
        The checkpoint, the files to put beside it (name -> file), and what to print.

    Raises:
        ValueError: there is no such file, it is truncated, or none of ours.
    """
    need("safetensors", "--from safetensors")
    from safetensors import SafetensorError, safe_open

    file = folder / FILE
    if not file.is_file():
        raise ValueError(f"there is no {FILE} in {folder}")
    try:
        with safe_open(str(file), "pt") as opened:
            metadata = opened.metadata() or {}
            stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no dictionary
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no safetensors file, or a truncated one: {error}") from None
    if "fairseq_sharing" not in metadata:
        raise ValueError(f"{file} was not written by fairseq-sharing export --to safetensors")
    if metadata["fairseq_sharing"] != FORMAT:
        found = metadata["fairseq_sharing"]
        raise ValueError(f"{file} has format {found}, this version of fairseq_sharing reads format {FORMAT}")
    told = {key: json.loads(metadata[key]) for key in ("names", "sharing", "cfg", "args", "optimizer_history")}
    missing = [name for name in told["names"].values() if name not in stored]
    if missing:
        raise ValueError(f"{file} lacks the tensor {missing[0]}")
    model = {name: stored[place] for name, place in told["names"].items()}
    for stack, record in told["sharing"].items():
        sharing = Sharing(tuple(record["assignment"]), tuple(record["parts"]))
        model[f"{stack}.{RECORD}"] = encode_sharing(sharing)
    cfg, arguments = restore_types(told["cfg"]), restore_types(told["args"])
    checkpoint = as_checkpoint(cfg, model, told["optimizer_history"], arguments)
    beside = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    # Not what git or a download of the hub has put there, nor what would take the place of the checkpoint.
    beside = {name: path for name, path in beside.items() if not re.search(r"(^|/)\.", name)}
    beside = {name: path for name, path in beside.items() if name not in (FILE, "model.pt")}
    return checkpoint, beside, [] if SENTENCEPIECE in beside else ["no SentencePiece model beside it"]
