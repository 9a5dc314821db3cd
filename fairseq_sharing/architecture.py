"""What the architecture functions of all families have in common: defaults, and checks of widths while parsing.

fairseq notices widths that do not fit only when it builds the model, after it has made --save-dir.
"""

from .refusals import as_text, refuse


def set_defaults(args, **defaults) -> None:
    """Set what the user did not."""
    for name, value in defaults.items():
        setattr(args, name, getattr(args, name, value))


def check_heads(args, *stacks: str) -> None:
    """Refuse a width that its attention heads cannot divide among themselves.

    Raises:
        ValueError: with both flags and values.
    """
    for stack in stacks:
        width, heads = getattr(args, f"{stack}_embed_dim"), getattr(args, f"{stack}_attention_heads")
        if heads < 1 or width < 1 or width % heads:
            refuse(f"--{stack}-embed-dim {width} must be a multiple of --{stack}-attention-heads {heads}")


def check_quant_noise(args, *stacks: str) -> None:
    """Refuse widths that are no multiple of the blocks of --quant-noise-pq: fairseq stops with an assertion.

    Raises:
        ValueError: with both flags and values.
    """
    size = getattr(args, "quant_noise_pq_block_size", None)
    if not getattr(args, "quant_noise_pq", 0):
        return
    names = [f"{stack}_{width}" for stack in stacks for width in ("embed_dim", "ffn_embed_dim")]
    for name in (*names, "factorized_embed_dim", "decoder_input_dim"):
        width = getattr(args, name, None)
        if width is not None and (size < 1 or int(width) % size):
            refuse(
                f"--quant-noise-pq-block-size {size} must divide --{name.replace('_', '-')} {width}, "
                f"since --quant-noise-pq is {args.quant_noise_pq}"
            )


def check_adaptive_softmax(args) -> None:
    """Refuse an adaptive softmax with a tied output: fairseq trains such a model and cannot load its checkpoint."""
    for name in ("share_all_embeddings", "share_decoder_input_output_embed", "merge_src_tgt_embed"):
        if args.adaptive_softmax_cutoff is not None and getattr(args, name, False):
            refuse(
                f"--adaptive-softmax-cutoff {as_text(args.adaptive_softmax_cutoff)} has an output of its own and "
                f"cannot be combined with --{name.replace('_', '-')}: fairseq could not load the checkpoint"
            )


def resolve_factorized_embedding(args, *widths: str) -> None:
    """Give fairseq's own options for a narrower embedding the value of --factorized-embed-dim, where it is given.

    Args:
        args: arguments before the architecture's other defaults.
        widths: names of the options that must be E, such as ``decoder_output_dim``.

    Raises:
        ValueError: E is below 1, or one of those options was given another value.
    """
    args.factorized_embed_dim = width = getattr(args, "factorized_embed_dim", None)
    if width is None:
        return
    if width < 1:
        refuse(f"--factorized-embed-dim {width} must be at least 1")
    if getattr(args, "adaptive_input", False):
        refuse(f"--factorized-embed-dim {width} cannot be combined with --adaptive-input, which is factorised already")
    for name in widths:
        given = getattr(args, name, None)
        if given is not None and int(given) != width:
            refuse(f"--{name.replace('_', '-')} {given} contradicts --factorized-embed-dim {width}")
        setattr(args, name, width)
