"""Export to CTranslate2 (translation and language models) through its own converter for fairseq.

The converter builds the plain model; equal tensors, and so what layers share, are stored once and known by N names. It
looks only at the modules that it knows. So whatever else a model has is refused here, before any work: left out in
silence, it would make another model.

Source: https://opennmt.net/CTranslate2/guides/fairseq.html, and ``ctranslate2.converters.fairseq``.
"""

import re
import tempfile
from argparse import Namespace
from pathlib import Path

import torch

from .export_fairseq import copy_texts, plain_model
from .files import need
from .trained import Trained, as_plain, check_sentencepiece, dictionary_files, find_data

TASKS = {"translation": "translation", "language": "language_modeling"}
ACTIVATIONS = ("relu", "gelu", "gelu_accurate", "gelu_fast", "swish")
# The parameters and buffers that the converter reads, or may leave alone.
READ = re.compile(
    r"(encoder|decoder)\.(version|(embed_tokens|output_projection|project_in_dim|project_out_dim)\.weight"
    r"|embed_positions\.(weight|_float_tensor)|(layer_norm|layernorm_embedding)\.(weight|bias)"
    r"|layers\.\d+\.((self_attn|encoder_attn)\.(q_proj|k_proj|v_proj|out_proj)|fc1|fc2"
    r"|(self_attn|encoder_attn|final)_layer_norm)\.(weight|bias))"
)


def check_packages() -> None:
    """Refuse to start without CTranslate2."""
    need("ctranslate2", "--to ctranslate2")


def export(trained: Trained, args):
    """Return the function that writes the folder, and what to print after it.

    Raises:
        ValueError: CTranslate2 has no place for something in the model, or no dictionaries were found.
    """
    check(trained)
    data = find_data(trained, args.data)
    dictionaries = dictionary_files(trained, data)
    if not dictionaries:
        raise ValueError("--to ctranslate2 needs dictionaries: give --data, the folder of fairseq-preprocess")
    check_sentencepiece(args.sentencepiece_model, dictionaries)
    if args.benchmark is not None:
        from .benchmark import check_benchmark

        check_benchmark(trained, data, args)
    config, weights = plain_model(trained)
    strangers = [name for name in weights if not READ.fullmatch(name)]
    if strangers:
        refuse(trained, f"has {strangers[0]}, for which CTranslate2 has no place")

    def write(folder: Path) -> None:
        convert(trained, config, weights, data, args.quantization, folder)
        copy_texts(trained, data, {}, args.sentencepiece_model, folder)

    return write, []


def refuse(trained: Trained, why: str) -> None:
    """Raise the sentence."""
    raise ValueError(f"--to ctranslate2: {trained.path} {why}")


def check(trained: Trained) -> None:
    """Refuse what CTranslate2 cannot hold.

    Raises:
        ValueError: with the option and its value.
    """
    config = trained.config
    if trained.family not in TASKS:
        refuse(trained, f"is a {trained.family} model; CTranslate2 takes fairseq's translation and language models")
    stacks = ("encoder", "decoder") if trained.family == "translation" else ("decoder",)
    for name in ("adaptive_softmax_cutoff", "adaptive_input", "character_embeddings", "base_layers"):
        if getattr(config, name, None):
            refuse(trained, f"was trained with --{name.replace('_', '-')}, which CTranslate2 does not have")
    for name in ("no_token_positional_embeddings", "cross_self_attention", "no_cross_attention"):
        if getattr(config, name, False):
            refuse(trained, f"was trained with --{name.replace('_', '-')}, which CTranslate2 does not have")
    activation = getattr(config, "activation_fn", "relu")
    if activation not in ACTIVATIONS:
        refuse(trained, f"has --activation-fn {activation}, and CTranslate2 knows {', '.join(ACTIVATIONS)}")
    if len(stacks) == 1:
        if config.decoder_input_dim != config.decoder_output_dim:
            refuse(
                trained,
                f"has --decoder-input-dim {config.decoder_input_dim} and --decoder-output-dim "
                f"{config.decoder_output_dim}; CTranslate2 projects at both ends or at none",
            )
        return
    if getattr(config, "no_decoder_final_norm", False) and config.decoder_normalize_before:
        refuse(trained, "was trained with --no-decoder-final-norm, which CTranslate2 does not have in translation")
    factorized = getattr(config, "factorized_embed_dim", None)  # multiplied out by the plain export
    if not factorized and int(config.decoder_output_dim) != config.decoder_embed_dim:
        refuse(
            trained,
            f"has --decoder-output-dim {config.decoder_output_dim} and --decoder-embed-dim {config.decoder_embed_dim}; "
            "CTranslate2 does not project before the output in translation",
        )
    for name in ("attention_heads", "normalize_before"):
        encoder, decoder = (getattr(config, f"{stack}_{name}") for stack in stacks)
        if encoder != decoder:
            flag = name.replace("_", "-")
            refuse(
                trained, f"has --encoder-{flag} {encoder} and --decoder-{flag} {decoder}; CTranslate2 needs them equal"
            )


def convert(trained: Trained, config: dict, weights: dict, data: Path, quantization: str | None, folder: Path) -> None:
    """Let CTranslate2 convert the plain model; its converter wants arguments as old versions of fairseq kept them."""
    from ctranslate2.converters import FairseqConverter

    from ..upstream.checkpoint_files import allow_checkpoint_classes

    task = {**trained.task, "task": TASKS[trained.family], "data": str(data)}
    arguments = Namespace(**{**task, **config, "arch": config["_name"], "task": TASKS[trained.family]})
    allow_checkpoint_classes()  # the Namespace
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as scratch:
        file = Path(scratch) / "plain.pt"
        torch.save({"args": as_namespace(arguments), "model": weights}, file)
        converter = FairseqConverter(str(file), str(data))
        converter.convert(str(folder), quantization=quantization, force=True)


def as_namespace(arguments: Namespace) -> Namespace:
    """Return the arguments in plain types."""
    return Namespace(**as_plain(arguments))
