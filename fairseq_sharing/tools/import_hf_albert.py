"""Import of Hugging Face's ALBERT as `albert_encoder`, the published layout too.

Only the files are read: config.json, the weights, and the vocabulary. The symbols change places, since fairseq's own
four come first and ``<mask>`` last; segment 0, which Hugging Face adds to every position, goes into the positions.
"""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import torch

from ..strategies import build_assignment
from . import hf_albert as names
from .files import need
from .hf_dictionary import order_symbols, read_json, read_special, read_vocabulary

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
HEAD = "sentence_classification_head"  # as fairseq's task calls it


def read(folder: Path, args):
    """Read the folder.

    Returns:
        The checkpoint, the files to put beside it (name -> text or file), and what to print.

    Raises:
        ValueError: something is missing, truncated, or has no place in `albert_encoder`.
    """
    config, theirs = read_config(folder), read_weights(folder)
    symbols, places = order_symbols(read_vocabulary(folder), read_special(folder), config["vocab_size"])
    args = build_arguments(config, symbols)
    model, notes = build_model(args, config, theirs, symbols, places)
    checkpoint = build_checkpoint(args, model)
    beside = {"dict.txt": "".join(f"{symbol} 1\n" for symbol in symbols[4:-1])}  # fairseq's tasks add <mask>
    if (folder / "spiece.model").is_file():
        beside["sentencepiece.bpe.model"] = folder / "spiece.model"
    return checkpoint, beside, [*notes, *describe(folder, args)]


def read_config(folder: Path) -> dict:
    """Return config.json with the defaults of AlbertConfig that Hugging Face leaves out.

    Raises:
        ValueError: it is not there, or of another model.
    """
    found = read_json(folder / "config.json")
    if found.get("model_type") != "albert":
        raise ValueError(f"{folder} has no config.json of an ALBERT: model_type is {found.get('model_type')}")
    defaults = {
        **{"vocab_size": 30000, "embedding_size": 128, "hidden_size": 4096, "num_hidden_layers": 12},
        **{"num_hidden_groups": 1, "num_attention_heads": 64, "intermediate_size": 16384, "inner_group_num": 1},
        **{"hidden_act": "gelu_new", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        **{"max_position_embeddings": 512, "layer_norm_eps": 1e-12, "classifier_dropout_prob": 0.1},
        "tie_word_embeddings": True,
    }
    config = {**defaults, **found}
    if config["hidden_act"] not in names.ACTIVATIONS.values():
        raise ValueError(f"{folder}: hidden_act {config['hidden_act']} is none of fairseq's activations")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError(f"{folder}: position_embedding_type {config['position_embedding_type']} must be absolute")
    return config


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors, with the names of a model with a head.

    Raises:
        ValueError: there are none, or the file is no such file, or truncated.
    """
    file = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        raise ValueError(f"there is no {' or '.join(WEIGHTS)} in {folder}")
    if file.suffix == ".safetensors":
        need("safetensors", "--from hf-albert")
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        errors, load = (SafetensorError, OSError), load_file
    else:
        import pickle

        errors = (RuntimeError, OSError, EOFError, pickle.UnpicklingError)
        load = lambda path: torch.load(path, map_location="cpu", weights_only=True)  # noqa: E731
    try:
        tensors = load(str(file))
    except errors as error:
        raise ValueError(f"{file} cannot be read, it may be truncated: {str(error).splitlines()[0]}") from None
    bare = "embeddings.word_embeddings.weight" in tensors  # an AlbertModel without head
    return {f"albert.{name}" if bare else name: tensor.float() for name, tensor in tensors.items()}


def build_arguments(config: dict, symbols: list[str]) -> Namespace:
    """Return the arguments with which fairseq-train would build the model.

    Raises:
        ValueError: with fairseq's flags, where sizes do not fit together.
    """
    from fairseq import options

    inner = config["inner_group_num"]
    order = names.order_of_groups(config["num_hidden_layers"], config["num_hidden_groups"])
    assignment = [group * inner + step for group in order for step in range(inner)]
    activation = next(ours for ours, theirs in names.ACTIVATIONS.items() if theirs == config["hidden_act"])
    unique, num_layers = len(set(assignment)), len(assignment)
    if unique == num_layers:
        sharing = {"encoder-sharing": "none"}
    elif assignment == build_assignment("sequence", num_layers, unique):
        sharing = {"encoder-unique-layers": unique}
    else:
        sharing = {"encoder-assignment": ",".join(map(str, assignment))}
    flags = {
        "encoder-layers": num_layers,
        **sharing,
        "encoder-embed-dim": config["hidden_size"],
        "encoder-ffn-embed-dim": config["intermediate_size"],
        "encoder-attention-heads": config["num_attention_heads"],
        "factorized-embed-dim": config["embedding_size"],
        "activation-fn": activation,
        "layernorm-eps": config["layer_norm_eps"],
        "max-positions": config["max_position_embeddings"],
        "tokens-per-sample": config["max_position_embeddings"],
        "dropout": config["hidden_dropout_prob"],
        "attention-dropout": config["attention_probs_dropout_prob"],
        "pooler-dropout": config["classifier_dropout_prob"],
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    if not config["tie_word_embeddings"]:
        words.append("--untie-weights-roberta")
    task = ["--task", "masked_lm", "--criterion", "masked_lm", "--arch", "albert_encoder"]
    args = options.parse_args_and_arch(options.get_training_parser(), ["", *task, *words])  # no data to look at
    args.data, args._name = ".", "albert_encoder"  # as in a checkpoint, whose data may be elsewhere
    return args


def build_model(args, config: dict, theirs: dict, symbols: list[str], places: list[int]):
    """Build `albert_encoder` and give it the weights.

    Returns:
        The model, and sentences about what is left out or new.

    Raises:
        ValueError: a tensor is missing or has another shape than config.json says.
    """
    from fairseq.models import build_model

    from .model import filler_dictionary

    model = build_model(args, SimpleNamespace(source_dictionary=filler_dictionary(len(symbols)))).eval()
    theirs, notes = dict(theirs), []
    theirs.pop("albert.embeddings.position_ids", None)  # older files have this buffer

    def pop(name: str) -> torch.Tensor:
        if name not in theirs:
            raise ValueError(f"the weights lack {name}")
        return theirs.pop(name)

    ours = {}
    with_output = "predictions.dense.weight" in theirs
    for their_module, our_module in names.MODULES.items():
        if with_output or not their_module.startswith("predictions"):
            for leaf in ("weight", "bias"):
                ours[f"{our_module}.{leaf}"] = pop(f"{their_module}.{leaf}")
    inner = config["inner_group_num"]
    layers = model.encoder.sentence_encoder.layers
    for layer, number in enumerate(layers.sharing.assignment):
        if layers.sharing.owners[layer] == layer:
            prefix = f"{names.THEIR_GROUPS}.{number // inner}.albert_layers.{number % inner}"
            for their_module, our_module in names.LAYER_MODULES.items():
                for leaf in ("weight", "bias"):
                    ours[f"{names.LAYERS}.{layer}.{our_module}.{leaf}"] = pop(f"{prefix}.{their_module}.{leaf}")
    ours[names.TABLE] = pop(names.THEIR_TABLE)
    if len(ours[names.TABLE]) != len(places):
        raise ValueError(f"config.json says vocab_size {len(places)}, the table has {len(ours[names.TABLE])} rows")
    ours[names.TABLE] = ours[names.TABLE][places]
    positions = pop(names.THEIR_POSITIONS) + pop(names.THEIR_SEGMENTS)[0]
    ours[names.POSITIONS] = torch.cat([positions.new_zeros(names.FIRST_POSITION, positions.shape[1]), positions])
    projection = {leaf: pop(f"{names.THEIR_PROJECTION}.{leaf}") for leaf in ("weight", "bias")}
    if config["embedding_size"] != config["hidden_size"]:
        ours.update({f"{names.PROJECTION}.{leaf}": tensor for leaf, tensor in projection.items()})
    elif not torch.equal(projection["weight"], torch.eye(len(projection["weight"]))) or projection["bias"].any():
        raise ValueError(
            f"embedding_size and hidden_size are both {config['hidden_size']}, and the layer between them changes "
            "something; albert_encoder has none there"
        )
    if with_output:
        biases = [theirs.pop(name) for name in names.THEIR_OUTPUT_BIASES if name in theirs]
        if not biases:
            raise ValueError(f"the weights lack {names.THEIR_OUTPUT_BIASES[0]}")
        ours[names.OUTPUT_BIAS] = biases[-1][places]  # the decoder's, where both are there: it is the one that is used
        output = theirs.pop(names.THEIR_OUTPUT, None)
        if output is not None and not config["tie_word_embeddings"]:
            ours[names.OUTPUT] = output[places]
    else:
        notes.append("no head for masked language modelling was there: it starts from random weights")
    if "classifier.weight" in theirs and "albert.pooler.weight" in theirs:
        model.register_classification_head(HEAD, num_classes=len(theirs["classifier.weight"]))
        for their_module, our_module in names.HEAD_MODULES.items():
            for leaf in ("weight", "bias"):
                ours[f"{names.HEADS}.{HEAD}.{our_module}.{leaf}"] = pop(f"{their_module}.{leaf}")
    if theirs:
        notes.append(f"left out: {', '.join(sorted(theirs))}")
    copy_weights(model, ours)
    return model, notes


def copy_weights(model, ours: dict[str, torch.Tensor]) -> None:
    """Copy the tensors into the model's parameters.

    Raises:
        ValueError: a shape differs.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, tensor in ours.items():
            if parameters[name].shape != tensor.shape:
                expected, found = tuple(parameters[name].shape), tuple(tensor.shape)
                raise ValueError(f"config.json makes {name} {expected}, and the weights have {found}")
            parameters[name].copy_(tensor)


def build_checkpoint(args, model) -> dict:
    """Return what fairseq's trainer would write."""
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from omegaconf import OmegaConf

    from .trained import as_checkpoint

    cfg = OmegaConf.to_container(convert_namespace_to_omegaconf(args), resolve=True, enum_to_str=True)
    cfg["model"] = args
    return as_checkpoint(cfg, model.state_dict())


def describe(folder: Path, args) -> list[str]:
    """Return the flags to train on with, and what a text needs before it is cut into pieces."""
    if args.encoder_assignment is not None:
        sharing = f"--encoder-assignment {args.encoder_assignment}"
    elif args.encoder_sharing == "none":
        sharing = "--encoder-sharing none"
    else:
        sharing = f"--encoder-unique-layers {args.encoder_unique_layers}"
    lines = [
        "flags to train on with:",
        f"  --arch albert_encoder --encoder-layers {args.encoder_layers} {sharing} \\",
        f"  --encoder-embed-dim {args.encoder_embed_dim} --encoder-ffn-embed-dim {args.encoder_ffn_embed_dim} \\",
        f"  --encoder-attention-heads {args.encoder_attention_heads} "
        f"--factorized-embed-dim {args.factorized_embed_dim} --max-positions {args.max_positions} \\",
        f"  --activation-fn {args.activation_fn} --layernorm-eps {args.layernorm_eps}"
        + (" --untie-weights-roberta" if args.untie_weights_roberta else ""),
    ]
    settings = read_json(folder / "tokenizer_config.json")
    albert = settings.get("tokenizer_class", "AlbertTokenizer").startswith("AlbertTokenizer")
    if albert and settings.get("do_lower_case", True):
        accents = "" if settings.get("keep_accents") else " and lose its accents"
        lines.append(f"text must become lower case{accents} before SentencePiece: Hugging Face's tokenizer does it")
    return lines
