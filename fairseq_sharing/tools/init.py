r"""Make a shared model from a trained one, to continue with --finetune-from-model.

Each parameter set takes the first, or the mean, of the layers that will use it; or, with --rule stepwise, the sets
are taken from the trained layers at even steps: set j of M takes layer round(j (N-1) / (M-1)) of N, and the new model
may have any depth. Parts that are not shared stay with their layer. The trained model may share its layers too, in
another way; each of its layers then counts with what it uses. Sizes and everything else that changes what the layers
compute must be those that it was trained with.

Examples:
    fairseq-sharing init --from unshared/checkpoint_best.pt --arch transformer_shared_cycle_rev --encoder-layers 12 \
        --decoder-layers 12 --share-all-embeddings --rule mean --out shared.pt --data data-bin/wmt16_en_de
    fairseq-sharing init --from six-layers.pt --arch transformer_shared_cycle --rule stepwise --out twelve-layers.pt
"""

HELP = "make a shared model from a trained unshared one, for --finetune-from-model"
PASSES_ON = True  # whatever the command does not know is a flag of fairseq-train


def add_arguments(parser) -> None:
    """Add the source, the new architecture, the rule and the output."""
    parser.add_argument("--from", dest="source", required=True, metavar="FILE", help="checkpoint of the trained model")
    parser.add_argument(
        "--arch", required=True, metavar="ARCH", help="architecture of the new model; flags of fairseq-train may follow"
    )
    parser.add_argument(
        "--rule", required=True, choices=["first", "mean", "stepwise"], help="how the sets come from the trained layers"
    )
    add_output_arguments(parser)


def add_output_arguments(parser) -> None:
    """Add the flags that `init` and `untie` have in common."""
    parser.add_argument("--out", required=True, metavar="FILE", help="where to write the new checkpoint")
    parser.add_argument("--force", action="store_true", help="overwrite --out")
    parser.add_argument("--data", metavar="DIR", help="data folder to measure the validation loss on, before and after")
    parser.add_argument(
        "--valid-subset", default="valid", metavar="NAME", help="its part to measure on (default: valid)"
    )


def run(args) -> None:
    """Write the new checkpoint and say where its parameters come from.

    Raises:
        ValueError: the models differ in more than sharing, or a file cannot be read or written.
    """
    from . import convert
    from .files import check_output, quiet_log
    from .model import architecture_of, family_flags, filler_task, parse_architecture, stacks_of

    check_output(args.out, args.force, "--out")
    with quiet_log():
        config = parse_architecture(args.arch, args.extra)
        state, subject = convert.read_source(args.source)
        old = architecture_of(subject.config)
        if family_flags(args.arch) != family_flags(old):
            raise ValueError(f"--arch {args.arch} is of another family than {old} in {args.source}")
        convert.check_same_function(subject.config, config, args.source)
        if hasattr(subject.config, "input_feat_per_channel"):
            config.input_feat_per_channel = subject.config.input_feat_per_channel
        model = convert.build_real(config, filler_task(*subject.sizes), state["model"])
        source = convert.expand(state["model"], subject.model)
        model.load_state_dict(convert.compose(source, subject.model, model, args.rule, args.source))
        losses = measure(args, state, subject, model)
        convert.write_model(args.out, state, config, model)
    old_stacks = stacks_of(subject.model)
    for stack, layers in stacks_of(model).items():
        print(f"{stack}: {describe(old_stacks[stack])} -> {describe(layers)}")
        print_sources(layers, args.rule, len(old_stacks[stack]))
    report(args, losses)
    print(f"continue with fairseq-train and the same flags, and --finetune-from-model {args.out}")


def describe(layers) -> str:
    """Return N, M and the assignment in words."""
    from .model import sharing_of

    sharing = sharing_of(layers)
    return f"{sharing.depth} ({sharing})" if sharing.shares else f"{sharing.depth}, unshared"


def print_sources(layers, rule: str, num_source: int) -> None:
    """Say which layers each parameter set was taken from."""
    from .convert import choose_layers
    from .model import sharing_of

    sharing = sharing_of(layers)
    if not sharing.shares:
        return
    name = next(name for part, name in SHARED_NAMES.items() if part in sharing.parts)
    for owner in sorted(set(sharing.owners)):
        found = choose_layers(sharing, owner, name, rule, num_source)
        what = f"mean of layers {', '.join(map(str, found))}" if len(found) > 1 else f"layer {found[0]}"
        print(f"  set {sharing.assignment[owner]}: {what}")


# A parameter of each part, in which layers share when the part is shared.
SHARED_NAMES = {"attention": "self_attn.k_proj.weight", "ffn": "fc1.weight", "norm": "final_layer_norm.weight"}


def measure(args, state: dict, subject, model):
    """Return what is measured and the validation loss of both models; None without --data."""
    from . import convert

    if args.data is None:
        return None
    task = convert.setup_task_of(state, args.data)
    trained = convert.build_real(subject.config, task, state["model"])
    trained.load_state_dict(state["model"])
    models = {args.source: trained, args.out: model}
    return convert.measure_validation_loss(models, task, state, args.valid_subset)


def report(args, measured) -> None:
    """Print what was written and by how much the validation loss moved."""
    print(f"wrote {args.out}")
    if measured is None:
        print("The validation loss was not measured: give --data.")
        return
    kind, losses = measured
    before, after = losses.values()
    moved = f"moved by {after - before:+.3f}" if after != before else "did not move"
    print(f"validation loss on {args.valid_subset} ({kind}): {before:.3f} before, {after:.3f} after: {moved}")
