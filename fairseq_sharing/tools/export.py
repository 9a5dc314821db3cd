"""Write a trained model for a place where this plugin is not installed, or without its optimizer.

    fairseq      a checkpoint of the plain architecture, for fairseq without this plugin
    ctranslate2  a model of CTranslate2, for translation and language models
    hf-albert    a folder for Hugging Face's AlbertModel and its heads, tokenizer included, from albert_encoder
    safetensors  one copy of each tensor, configuration and sharing as metadata; `import` reads it back

Dictionaries come from --data, by default the folder that the model was trained with, if it is still there.

Examples:
    fairseq-sharing export checkpoints/averaged.pt --to fairseq --sentencepiece-model data/spm.model --out plain
    fairseq-sharing export checkpoints/averaged.pt --to ctranslate2 --quantization int8 --out ct2 --benchmark test
    fairseq-sharing export checkpoints/checkpoint_best.pt --to hf-albert --sentencepiece-model spm.model --out albert
    fairseq-sharing export checkpoints/averaged.pt --to safetensors --out weights
"""

import importlib
from pathlib import Path

HELP = "write a model for plain fairseq, CTranslate2 or Hugging Face, or as safetensors"
# Target -> (file beside this one, flags that only it knows).
TARGETS = {
    "fairseq": ("export_fairseq", ()),
    "ctranslate2": ("export_ctranslate2", ("quantization", "benchmark", "beam")),
    "hf-albert": ("export_hf_albert", ("unshare", "classification_head_name")),
    "safetensors": ("safetensors_file", ()),
}
# What CTranslate2 calls its model types.
QUANTIZATIONS = (
    *("float32", "float16", "bfloat16", "int16"),
    *("int8", "int8_float32", "int8_float16", "int8_bfloat16"),
)


def add_arguments(parser) -> None:
    """Add the flags of all targets."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, averaged or not")
    parser.add_argument("--to", required=True, choices=TARGETS, help="what to write")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write")
    parser.add_argument("--data", metavar="DIR", help="the folder of fairseq-preprocess, for its dictionaries")
    parser.add_argument("--sentencepiece-model", metavar="FILE", help="the model that cut the text into pieces")
    parser.add_argument("--force", action="store_true", help="replace the files of an earlier export")
    parser.add_argument(
        "--quantization", choices=QUANTIZATIONS, help="type of the weights (ctranslate2; default: float32)"
    )
    parser.add_argument(
        "--benchmark",
        metavar="SUBSET",
        help="translate this part of --data with fairseq-generate and with the export, three times in turn, and print "
        "sizes, speed, BLEU and how many translations are equal (ctranslate2, translation)",
    )
    parser.add_argument("--beam", type=int, metavar="K", help="beam of the benchmark (default: 1)")
    parser.add_argument(
        "--unshare",
        action="store_true",
        default=None,
        help="write a copy of the parameters for each layer, where groups of layers cannot say who shares (hf-albert)",
    )
    parser.add_argument(
        "--classification-head-name", metavar="NAME", help="the head to write, if there are several (hf-albert)"
    )


def run(args) -> None:
    """Check, write the folder in one step, and say what is in it."""
    from .files import check_output_folder, quiet_log, write_folder

    module, own = TARGETS[args.to]
    for target, (_, flags) in TARGETS.items():
        for name in flags:
            if getattr(args, name) is not None and name not in own:
                raise ValueError(f"--{name.replace('_', '-')} is for --to {target}, not for --to {args.to}")
    if args.beam is not None and args.beam < 1:
        raise ValueError(f"--beam {args.beam} must be at least 1")
    if args.beam is not None and args.benchmark is None:
        raise ValueError(f"--beam {args.beam} needs --benchmark")
    check_output_folder(args.out, args.force)
    with quiet_log():
        from .trained import load_trained

        exporter = importlib.import_module(f".{module}", __package__)
        if hasattr(exporter, "check_packages"):
            exporter.check_packages()
        trained = load_trained(args.checkpoint)
        write, notes = exporter.export(trained, args)
        write_folder(args.out, write)
        print(format_folder(trained, args), *notes, sep="\n")
        if args.benchmark is not None:
            from .benchmark import benchmark

            benchmark(trained, args)


def format_folder(trained, args) -> str:
    """Return what was read and written, with sizes."""
    lines = [f"{trained.arch}, {Path(trained.path).stat().st_size:,} bytes: {trained.path}"]
    for stack, sharing in trained.sharings().items():
        lines.append(f"  {stack}: {sharing.depth}" + (f": {sharing}" if sharing.shares else ""))
    lines.append(f"{args.to}: {args.out}")
    files = sorted(file for file in Path(args.out).rglob("*") if file.is_file())
    width = max(len(f"{file.stat().st_size:,}") for file in files)
    lines += [f"  {file.stat().st_size:>{width},} bytes  {file.relative_to(args.out)}" for file in files]
    return "\n".join(lines)
