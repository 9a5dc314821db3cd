"""Make an unshared copy of a shared model, to continue training from with --finetune-from-model.

Every layer gets its own copy of what it used, so the copy computes exactly what the shared model does, and may go
apart from there. Its architecture is the same without sharing, or, with --to stock, fairseq's own, which other
fairseq installations know; refused with the reason where that has no place for something, such as a factorised
embedding.

Examples:
    fairseq-sharing untie --from shared/checkpoint_best.pt --out unshared.pt
    fairseq-sharing untie --from shared/checkpoint_best.pt --to stock --out unshared.pt --data data-bin/wmt16_en_de
"""

from .init import add_output_arguments

HELP = "make an unshared copy of a shared model, to continue training from"


def add_arguments(parser) -> None:
    """Add the source, the kind of the new model and the output."""
    parser.add_argument("--from", dest="source", required=True, metavar="FILE", help="checkpoint of the shared model")
    parser.add_argument(
        "--to",
        choices=["own", "stock"],
        default="own",
        help="the same architecture unshared (default), or fairseq's own",
    )
    add_output_arguments(parser)


def unshared_config(config, stacks):
    """Return the configuration of the same architecture with sharing none."""
    for stack in stacks:
        for name, value in (("sharing", "none"), ("unique_layers", None), ("assignment", None)):
            setattr(config, f"{stack}_{name}", value)
    return config


def stock_config(config, path: str):
    """Return the configuration of fairseq's own architecture that computes the same.

    Raises:
        ValueError: there is none.
    """
    from argparse import Namespace
    from dataclasses import fields

    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.models.transformer_lm import TransformerLanguageModelConfig
    from omegaconf import DictConfig, OmegaConf

    from ..arguments import as_namespace
    from .model import FAMILIES, architecture_of

    names = dict(zip(FAMILIES, ("transformer_lm", "s2t_transformer", "roberta", "transformer"), strict=True))
    arch = architecture_of(config)
    stock = next(name for family, name in names.items() if issubclass(ARCH_MODEL_REGISTRY[arch], family))
    if stock == "transformer_lm":
        known = {each.name for each in fields(TransformerLanguageModelConfig)}
        values = OmegaConf.to_container(config) if isinstance(config, DictConfig) else vars(config)
        return OmegaConf.create({**{key: value for key, value in values.items() if key in known}, "_name": stock})
    config = as_namespace(config)  # fairseq-hydra-train saves something else
    width = getattr(config, "factorized_embed_dim", None)
    if width not in (None, config.encoder_embed_dim):
        raise ValueError(
            f"{path} has --factorized-embed-dim {width}, for which fairseq's {stock} has no place: --to own keeps it"
        )
    if stock == "roberta" and config.layernorm_eps != 1e-5:
        raise ValueError(
            f"{path} has --layernorm-eps {config.layernorm_eps}, and fairseq's roberta always 1e-05: --to own keeps it"
        )
    ours = ("sharing", "unique_layers", "assignment")
    left_out = {"sharing_parts", "factorized_embed_dim", "layernorm_eps"}
    left_out |= {f"{stack}_{name}" for stack in ("encoder", "decoder") for name in ours}
    values = {key: value for key, value in vars(config).items() if key not in left_out}
    return Namespace(**{**values, "arch": stock, "_name": stock})


def run(args) -> None:
    """Write the unshared checkpoint.

    Raises:
        ValueError: a file cannot be read or written, or fairseq's own architecture cannot hold the model.
    """
    from . import convert
    from .files import check_output, quiet_log
    from .init import describe, measure, report
    from .model import architecture_of, filler_task, saved_config, sharing_of, stacks_of

    check_output(args.out, args.force, "--out")
    with quiet_log():
        state, subject = convert.read_source(args.source)
        stacks = stacks_of(subject.model)
        if not any(sharing_of(layers).shares for layers in stacks.values()):
            raise ValueError(f"{args.source} shares nothing: it can be used as it is")
        config = saved_config(state)
        config = unshared_config(config, stacks) if args.to == "own" else stock_config(config, args.source)
        model = convert.build_real(config, filler_task(*subject.sizes), state["model"])
        source = convert.expand(state["model"], subject.model)
        model.load_state_dict(convert.compose(source, subject.model, model, "first", args.source))
        losses = measure(args, state, subject, model)
        convert.write_model(args.out, state, config, model)
    for stack, layers in stacks_of(model).items():
        print(f"{stack}: {describe(stacks[stack])} -> {describe(layers)}")
    report(args, losses)
    none = "".join(f" --{stack}-sharing none" for stack in stacks) if args.to == "own" else ""
    print(
        f"continue with fairseq-train --arch {architecture_of(config)}{none} --finetune-from-model {args.out}, and the "
        "sizes as before"
    )
