"""Export of `albert_encoder` to Hugging Face: config.json, model.safetensors and a tokenizer with the dictionary's ids.

AlbertModel, AlbertForMaskedLM and, with a classification head, AlbertForSequenceClassification load the same folder.
"""

import json
from pathlib import Path

import torch

from ..models.albert_encoder import AlbertEncoderModel
from ..sharing import ALL_PARTS
from . import hf_albert as names
from .files import need
from .trained import Trained, check_sentencepiece, dictionary_files, find_data, load_dictionary

NEVER = -1e4  # an output's bias that keeps a symbol from being predicted, also in half precision


def check_packages() -> None:
    """Refuse to start without the packages."""
    for package in ("safetensors", "tokenizers"):
        need(package, "--to hf-albert")


def export(trained: Trained, args):
    """Return the function that writes the folder, and what to print after it.

    Raises:
        ValueError: Hugging Face's ALBERT cannot be this model.
    """
    from safetensors.torch import save_file

    check(trained)
    groups = choose_groups(trained, args.unshare)
    head = choose_head(trained, args.classification_head_name)
    data = find_data(trained, args.data)
    dictionaries = dictionary_files(trained, data)
    pieces = check_sentencepiece(args.sentencepiece_model, dictionaries)
    tokenizer, notes = None, []
    if pieces is None or not dictionaries:
        notes.append("  no tokenizer: it takes --sentencepiece-model and --data")
        unread = []
    else:
        from .hf_tokenizer import build_tokenizer, tokenizer_settings

        tokenizer, unread = build_tokenizer(
            args.sentencepiece_model, load_dictionary(dictionaries["source"], mask=True).symbols
        )
        if unread:
            notes.append(
                f"  {len(unread):,} pieces of SentencePiece are not in the dictionary: their rows read as <unk>"
            )
    config = build_config(trained, groups, head, len(unread), labels_of(data, trained, head))
    tensors = build_tensors(trained, groups, head, len(unread))

    def write(folder: Path) -> None:
        save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
        write_json(folder / "config.json", config)
        if tokenizer is not None:
            (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
            write_json(folder / "tokenizer_config.json", tokenizer_settings(trained.config.max_positions))

    return write, notes


def write_json(file: Path, value: dict) -> None:
    """Write JSON as Hugging Face does."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def refuse(trained: Trained, why: str) -> None:
    """Raise the sentence."""
    raise ValueError(f"--to hf-albert: {trained.path} {why}")


def check(trained: Trained) -> None:
    """Refuse what Hugging Face's ALBERT has no place for.

    Raises:
        ValueError: with the option and its value.
    """
    if not isinstance(trained.model, AlbertEncoderModel):
        refuse(trained, f"is of architecture {trained.arch}, and only albert_encoder is ALBERT")
    config, encoder = trained.config, trained.model.encoder.sentence_encoder
    if config.encoder_normalize_before:
        refuse(trained, "was trained with --encoder-normalize-before, and ALBERT normalises after each sublayer")
    if config.activation_fn not in names.ACTIVATIONS:
        known = ", ".join(names.ACTIVATIONS)
        refuse(trained, f"has --activation-fn {config.activation_fn}; that of ALBERT can be one of {known}")
    if encoder.layernorm_embedding is None or encoder.embed_scale != 1:
        refuse(trained, "has embeddings without LayerNorm or with a scale, and ALBERT's are the other way round")
    if encoder.quant_noise is not None:
        refuse(trained, "was trained with --quant-noise-pq, whose layer after the embedding ALBERT does not have")


def choose_groups(trained: Trained, unshare: bool | None) -> list[tuple[int, ...]]:
    """Return the layers of each of Hugging Face's groups.

    Raises:
        ValueError: groups cannot say who shares, and no copies were asked for.
    """
    sharing = trained.sharings()["encoder"]
    whole = not sharing.shares or set(sharing.parts) == set(ALL_PARTS)
    groups = names.find_groups(sharing.owners) if whole and not unshare else None
    if groups is None and not unshare:
        refuse(
            trained,
            f"shares its layers as {sharing}, which num_hidden_groups and inner_group_num of Hugging Face cannot say: "
            "--unshare writes a copy of the parameters for each layer",
        )
    return groups or [(layer,) for layer in range(len(sharing.assignment))]


def choose_head(trained: Trained, name: str | None) -> str | None:
    """Return the name of the classification head to write, or None where there is none.

    Raises:
        ValueError: there is no such head, there are several, or ALBERT's cannot be this one.
    """
    heads = trained.model.classification_heads
    known = ", ".join(heads) or "none"
    if name is not None and name not in heads:
        raise ValueError(f"--classification-head-name {name}: {trained.path} has {known}")
    if name is None and len(heads) > 1:
        raise ValueError(f"--classification-head-name says which of {known} to write")
    name = name or next(iter(heads), None)
    if name is None:
        return None
    config, width = trained.config, trained.config.encoder_embed_dim
    if config.pooler_activation_fn != "tanh" or getattr(config, "spectral_norm_classification_head", False):
        refuse(trained, f"has a head {name} with another activation than tanh, or with spectral norm")
    if heads[name].dense.out_features != width:
        refuse(trained, f"has a head {name} of width {heads[name].dense.out_features}, and ALBERT's is {width} wide")
    return name


def labels_of(data: Path | None, trained: Trained, head: str | None) -> list[str] | None:
    """Return the names of the classes, where the data tell them."""
    file = data / "label" / "dict.txt" if data else None
    if head is None or file is None or not file.is_file():
        return None
    number = trained.model.classification_heads[head].out_proj.out_features
    symbols = load_dictionary(file).symbols[4:]
    return symbols[:number] if len(symbols) >= number else None


def build_config(
    trained: Trained, groups: list[tuple[int, ...]], head: str | None, num_unread: int, labels: list[str] | None
) -> dict:
    """Return config.json."""
    config = trained.config
    inner = len(groups[0])
    built = {
        "architectures": ["AlbertForSequenceClassification" if head else "AlbertForMaskedLM"],
        "model_type": "albert",
        "vocab_size": trained.sizes[0] + num_unread,
        "embedding_size": config.factorized_embed_dim,
        "hidden_size": config.encoder_embed_dim,
        "intermediate_size": config.encoder_ffn_embed_dim,
        "num_attention_heads": config.encoder_attention_heads,
        "num_hidden_layers": config.encoder_layers // inner,
        "num_hidden_groups": len(groups),
        "inner_group_num": inner,
        "hidden_act": names.ACTIVATIONS[config.activation_fn],
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "classifier_dropout_prob": config.pooler_dropout,
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": 2,
        "layer_norm_eps": config.layernorm_eps,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": not config.untie_weights_roberta,
    }
    if head is not None:
        number = trained.model.classification_heads[head].out_proj.out_features
        labels = labels or [f"LABEL_{label}" for label in range(number)]
        built["id2label"] = dict(enumerate(labels))
        built["label2id"] = {label: index for index, label in enumerate(labels)}
    return built


def build_tensors(trained: Trained, groups: list[tuple[int, ...]], head: str | None, num_unread: int) -> dict:
    """Return the tensors under Hugging Face's names, each with memory of its own."""
    ours, theirs = trained.plain_state(), {}

    def take(their_module: str, our_module: str) -> None:
        for leaf in ("weight", "bias"):
            theirs[f"{their_module}.{leaf}"] = ours[f"{our_module}.{leaf}"]

    for pair in names.MODULES.items():
        take(*pair)
    for group, layers in enumerate(groups):
        for inner, layer in enumerate(layers):
            for their_module, our_module in names.LAYER_MODULES.items():
                take(
                    f"{names.THEIR_GROUPS}.{group}.albert_layers.{inner}.{their_module}",
                    f"{names.LAYERS}.{layer}.{our_module}",
                )
    if head is not None:
        for their_module, our_module in names.HEAD_MODULES.items():
            take(their_module, f"{names.HEADS}.{head}.{our_module}")
    table = ours[names.TABLE]
    embed, width = table.shape[1], trained.config.encoder_embed_dim
    if f"{names.PROJECTION}.weight" in ours:
        take(names.THEIR_PROJECTION, names.PROJECTION)
    else:
        theirs[f"{names.THEIR_PROJECTION}.weight"], theirs[f"{names.THEIR_PROJECTION}.bias"] = identity(width)
    unknown = table[3:4].expand(num_unread, -1)  # fairseq reads such pieces as <unk>
    theirs[names.THEIR_TABLE] = torch.cat([table, unknown])
    theirs[names.THEIR_POSITIONS] = position_table(trained, embed)
    theirs[names.THEIR_SEGMENTS] = torch.zeros(2, embed)
    biases = torch.cat([ours[names.OUTPUT_BIAS], torch.full((num_unread,), NEVER)])
    theirs[names.THEIR_OUTPUT_BIASES[0]] = biases
    if trained.config.untie_weights_roberta:
        output = ours[names.OUTPUT]
        theirs[names.THEIR_OUTPUT] = torch.cat([output, torch.zeros(num_unread, embed)])
        theirs[names.THEIR_OUTPUT_BIASES[1]] = biases
    return {name: tensor.detach().clone().contiguous() for name, tensor in theirs.items()}


def identity(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight and bias of a linear layer that changes nothing."""
    return torch.eye(width), torch.zeros(width)


def position_table(trained: Trained, embed: int) -> torch.Tensor:
    """Return what is added to the symbol at each position: learned, computed, or nothing."""
    positions, number = trained.model.encoder.sentence_encoder.embed_positions, trained.config.max_positions
    if positions is None:
        return torch.zeros(number, embed)
    rows = positions.weight if hasattr(positions, "weight") else positions.weights
    return rows[names.FIRST_POSITION : names.FIRST_POSITION + number]
