"""Export to fairseq without this plugin: the plain upstream architecture, with every name that it expects.

What layers share stays one tensor in the file, under N names, so the file is hardly larger; fairseq makes N copies when
it loads it. Everything in it is plain: dictionaries, lists, text, numbers and tensors, as ``weights_only=True`` wants.
"""

import shutil
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq.models import build_model
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from fairseq.modules import SinusoidalPositionalEmbedding
from omegaconf import OmegaConf

from ..residual import fold_scalings
from .model import filler_dictionary
from .trained import (
    OURS,
    SENTENCEPIECE,
    Trained,
    as_checkpoint,
    as_plain,
    check_sentencepiece,
    dictionary_files,
    find_data,
    first_mismatch,
    speech_settings,
)

PLAIN_ARCHS = {
    "translation": "transformer",
    "language": "transformer_lm",
    "speech": "s2t_transformer",
    "masked language": "roberta",
}
ROBERTAS_EPSILON = 1e-5


def export(trained: Trained, args):
    """Return the function that writes the folder, and what to print after it.

    Raises:
        ValueError: upstream has no architecture that computes the same.
    """
    data = find_data(trained, args.data)
    dictionaries = dictionary_files(trained, data)
    check_sentencepiece(args.sentencepiece_model, dictionaries)
    checkpoint = plain_checkpoint(trained, args.sentencepiece_model)

    def write(folder: Path) -> None:
        torch.save(checkpoint, folder / "model.pt")
        copy_texts(trained, data, dictionaries, args.sentencepiece_model, folder)

    return write, [] if dictionaries else ["  no dictionaries: give --data to put them beside it"]


def plain_checkpoint(trained: Trained, sentencepiece_model: str | None = None) -> dict:
    """Return a checkpoint of the plain architecture; building that model from it has been tried."""
    config, weights = plain_model(trained)
    saved = as_plain(trained.state.get("cfg") or {})
    task = strip({**trained.task, "data": "."}, config["_name"])
    task.setdefault("_name", task.get("task"))
    cfg = {**{group: strip(value, config["_name"]) for group, value in saved.items()}, "task": task, "model": config}
    if sentencepiece_model is not None:
        cfg["bpe"] = {"_name": "sentencepiece", "sentencepiece_model": SENTENCEPIECE}
    return as_checkpoint(cfg, weights, as_plain(trained.state.get("optimizer_history")))


def strip(value, arch: str):
    """Leave out this plugin's arguments, wherever fairseq copied them, and name the plain architecture."""
    if not isinstance(value, dict):
        return value
    renamed = {"user_dir": None, "arch": arch}
    return {key: renamed.get(key, strip(entry, arch)) for key, entry in value.items() if key not in OURS}


def plain_model(trained: Trained) -> tuple[dict, dict]:
    """Return configuration and weights of the plain architecture.

    Raises:
        ValueError: upstream has none that computes the same.
    """
    check_encoder(trained)
    weights = trained.plain_state()
    arch = PLAIN_ARCHS[trained.family]
    config = strip(vars(trained.config), arch)
    if trained.family == "language":  # a configuration, which knows no other arguments
        known = {field.name for field in fields(TransformerLanguageModelConfig)}
        config = {name: value for name, value in config.items() if name in known}
    else:
        config["arch"] = arch
    config["_name"] = arch
    if getattr(trained.config, "factorized_embed_dim", None) and trained.family in ("translation", "speech"):
        multiply_out(trained.config, config, weights)
    if str(getattr(trained.config, "residual_scaling", "none")) != "none":
        fold_residuals(trained, config, weights)
    if trained.family == "speech":
        config["load_pretrained_encoder_from"] = None
    check_builds(trained, config, weights)
    return config, weights


def check_encoder(trained: Trained) -> None:
    """Refuse a masked language model that RoBERTa cannot be.

    Raises:
        ValueError: with the option and both values.
    """
    if trained.family != "masked language":
        return
    embed, width = trained.config.factorized_embed_dim, trained.config.encoder_embed_dim
    if embed != width:
        raise ValueError(
            f"--to fairseq: {trained.path} has --factorized-embed-dim {embed} and --encoder-embed-dim {width}; between "
            "the two factors are positions and a LayerNorm, so they cannot be multiplied out, and RoBERTa has only one"
        )
    if trained.config.layernorm_eps != ROBERTAS_EPSILON:
        raise ValueError(
            f"--to fairseq: {trained.path} has --layernorm-eps {trained.config.layernorm_eps}, and that of RoBERTa is "
            f"{ROBERTAS_EPSILON} and cannot be set"
        )


def multiply_out(ours, config: dict, weights: dict) -> None:
    """Replace V x E and E x H by their products V x H, in place; with adaptive softmax the output keeps its factors.

    The tables are not tied any more: each has a projection of its own.
    """
    table = weights.get("encoder.embed_tokens.embedding.weight")
    if table is not None:
        weights["encoder.embed_tokens.weight"] = product(table, weights.pop("encoder.embed_tokens.projection.weight").T)
        del weights["encoder.embed_tokens.embedding.weight"]
    if "decoder.project_in_dim.weight" in weights:
        table, projection = weights["decoder.embed_tokens.weight"], weights.pop("decoder.project_in_dim.weight")
        weights["decoder.embed_tokens.weight"] = product(table, projection.T)
    if "decoder.project_out_dim.weight" in weights and "decoder.output_projection.weight" in weights:
        table, projection = weights["decoder.output_projection.weight"], weights.pop("decoder.project_out_dim.weight")
        weights["decoder.output_projection.weight"] = product(table, projection)
        config["decoder_output_dim"] = ours.decoder_embed_dim
    config.update(decoder_input_dim=ours.decoder_embed_dim, share_decoder_input_output_embed=False)
    config.update(share_all_embeddings=False, encoder_embed_path=None, decoder_embed_path=None)


def fold_residuals(trained: Trained, config: dict, weights: dict) -> None:
    """Rewrite Admin's scaled residual connections into plain Post-LN layers, in place.

    The first sublayer's scaling goes into what a stack reads: its LayerNorm where the embedding has one, else its
    embedding, which is not tied any more, and its positions, which become a table.

    Raises:
        ValueError: a scaling cannot be divided out, or the embedding is adaptive.
    """
    for stack in (stack for stack in ("encoder", "decoder") if f"{stack}.layers.0.fc1.weight" in weights):
        if getattr(trained.config, "cross_self_attention", False):
            raise ValueError(
                f"--to fairseq: {trained.path} has --residual-scaling and --cross-self-attention, which reads scaled "
                "and unscaled states by the same matrices"
            )
        omega = fold_scalings(weights, f"{stack}.layers")
        if f"{stack}.layernorm_embedding.weight" in weights:
            read = [f"{stack}.layernorm_embedding.weight", f"{stack}.layernorm_embedding.bias"]
        elif f"{stack}.embed_tokens.weight" not in weights:
            raise ValueError(
                f"--to fairseq: {trained.path} has --residual-scaling and --adaptive-input: the scaling of the first "
                "sublayer has no table to go into"
            )
        else:
            read = [f"{stack}.embed_positions.weight"]
            if not config.get("no_token_positional_embeddings") and read[0] not in weights:
                weights[read[0]] = tabulate_positions(config, stack, omega)
            config[f"{stack}_learned_pos"] = True
            read = [key for key in read if key in weights]
            if f"{stack}.project_in_dim.weight" in weights:
                key = f"{stack}.project_in_dim.weight"
                weights[key] = (weights[key].double() * omega[:, None]).to(weights[key].dtype)
            else:
                read.append(f"{stack}.embed_tokens.weight")
        for key in read:
            weights[key] = (weights[key].double() * omega).to(weights[key].dtype)
    if "decoder.project_in_dim.weight" not in weights:
        config.update(share_decoder_input_output_embed=False, share_all_embeddings=False)


def tabulate_positions(config: dict, stack: str, like: torch.Tensor) -> torch.Tensor:
    """Return fairseq's sinusoidal positions as the table of its learned ones."""
    limit = {"encoder": "max_source_positions", "decoder": "max_target_positions"}[stack]
    padding = filler_dictionary(8).pad()
    rows = int(config.get(limit) or 1024) + padding + 1
    return SinusoidalPositionalEmbedding.get_embedding(rows, len(like), padding)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply in float64, so that only the rounding of the result remains."""
    return (left.double() @ right.double()).to(left.dtype)


def check_builds(trained: Trained, config: dict, weights: dict) -> None:
    """Build the plain model and load the weights, so that no other program has to find out that it does not work.

    Raises:
        ValueError: with the first name that has no place.
    """
    source, target = map(filler_dictionary, trained.sizes)
    target = source if trained.sizes[0] == trained.sizes[1] else target
    task = SimpleNamespace(source_dictionary=source, target_dictionary=target)
    heads = {"load_checkpoint_heads": True} if trained.family == "masked language" else {}
    model_config = OmegaConf.create({"model": {**config, **heads}}).model
    try:
        build_model(model_config, task, True).load_state_dict(dict(weights), model_cfg=model_config)
    except RuntimeError as error:
        reason = first_mismatch(error)
        raise ValueError(f"{trained.path} cannot be a plain {config['_name']}: {reason}") from None


def copy_texts(trained: Trained, data: Path | None, dictionaries: dict, sentencepiece_model: str | None, folder: Path):
    """Put dictionaries, speech configuration and SentencePiece model beside the model, where fairseq's hub looks."""
    names = {file.relative_to(data) for file in dictionaries.values()}
    if names and (data / "label" / "dict.txt").is_file() and trained.family == "masked language":
        names.add(Path("label", "dict.txt"))
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(data / name, folder / name)
    if trained.family == "speech" and names:
        copy_speech_settings(trained, data, folder)
    if sentencepiece_model is not None:
        shutil.copyfile(sentencepiece_model, folder / SENTENCEPIECE)


def copy_speech_settings(trained: Trained, data: Path, folder: Path) -> None:
    """Copy the description of the speech data and the files that it names, which it then names by their last names."""
    import yaml

    def copy(value):
        if isinstance(value, dict):
            return {key: copy(entry) for key, entry in value.items()}
        file = data / value if isinstance(value, str) else None  # an absolute path stays itself
        if file is None or not file.is_file():
            return value
        shutil.copyfile(file, folder / file.name)
        return file.name

    settings = speech_settings(trained, data)
    settings.pop("audio_root", None)
    name = trained.task.get("config_yaml") or "config.yaml"
    (folder / name).write_text(yaml.safe_dump(copy(settings), sort_keys=False), encoding="utf-8")
