"""From a trained model to another sharing of its layers: what `init` and `untie` have in common.

Both build the new model, give it a value for every tensor, and write what fairseq's trainer would, so that
--finetune-from-model, --restore-file with --reset-optimizer and decoding read it like any other checkpoint.
"""

import copy
import re

import torch
from fairseq.models import build_model
from fairseq.tasks import setup_task
from omegaconf import OmegaConf

from ..checkpoint import RECORD
from ..sharing import Sharing, is_shared, shared_names
from .files import load_checkpoint, write_atomically
from .model import Subject, inspect_checkpoint, paths_of, register_heads, sharing_of, vocabulary_sizes

RULES = ("first", "mean", "stepwise")
# Options that change what a model computes, though its tensors may keep their shapes.
FUNCTION = (
    *(
        f"{stack}_{name}"
        for stack in ("encoder", "decoder")
        for name in ("embed_dim", "ffn_embed_dim", "attention_heads", "normalize_before", "learned_pos")
    ),
    *("activation_fn", "no_scale_embedding", "no_token_positional_embeddings", "layernorm_embedding", "layernorm_eps"),
    *("share_all_embeddings", "share_decoder_input_output_embed", "untie_weights_roberta", "factorized_embed_dim"),
    *("decoder_input_dim", "decoder_output_dim", "adaptive_input", "adaptive_input_cutoff", "adaptive_input_factor"),
    *("adaptive_softmax_cutoff", "adaptive_softmax_factor", "tie_adaptive_weights", "tie_adaptive_proj"),
    *("conv_version", "conv_channels", "conv_kernel_sizes", "cross_self_attention", "no_cross_attention"),
    *("scale_fc", "scale_attn", "scale_heads", "scale_resids"),
)
# Buffers whose values say nothing about what was learned; each model has its own.
OWN_BUFFERS = re.compile(r"(.*\.)?(version|_float_tensor)")


def read_source(path: str) -> tuple[dict, Subject]:
    """Load a checkpoint and build its model without memory.

    Raises:
        ValueError: it is no checkpoint of the four families.
    """
    state = load_checkpoint(path)
    return state, inspect_checkpoint(path, state)


def build_real(config, task, state: dict):
    """Build a model with numbers in it, and with the classification heads that a checkpoint holds.

    Args:
        config: the model's configuration.
        task: with dictionaries.
        state: the checkpoint's tensors by name.
    """
    model = build_model(config, task, True).eval()
    register_heads(model, state)
    vars(model).pop("startup_lines", None)
    return model


def expand(state_dict: dict, model) -> dict:
    """Return a state dict with every tensor of every layer and without records; what was shared is the same tensor."""
    full = dict(state_dict)
    for path in paths_of(model).values():
        layers = model.get_submodule(path)
        full.pop(f"{path}.{RECORD}", None)
        if sharing_of(layers).shares:
            for borrower, owner, name in shared_names(layers):
                full[f"{path}.{borrower}.{name}"] = full[f"{path}.{owner}.{name}"]
    return full


def choose_layers(sharing: Sharing, index: int, name: str, rule: str, num_source: int) -> list[int]:
    """Return the layers of the source that a parameter of a layer is the mean of.

    With ``stepwise`` the set that is used j-th first of M takes layer round(j (N-1) / (M-1)) of the source's N layers,
    halves to the even one; what is not shared has a set of its own in each layer.

    Args:
        sharing: who shares with whom in the new stack.
        index: the layer.
        name: the parameter's name within its layer.
        rule: one of `RULES`.
        num_source: N, the source's layers.

    >>> [choose_layers(Sharing((0, 1, 2, 2, 1, 0)), i, "fc1.weight", "mean", 6) for i in range(3)]
    [[0, 5], [1, 4], [2, 3]]
    >>> [choose_layers(Sharing((0, 1, 2, 2, 1, 0)), i, "fc1.weight", "stepwise", 6) for i in range(3)]
    [[0], [2], [5]]
    """
    own = list(range(len(sharing.assignment)))
    owners = sharing.owners if sharing.shares and is_shared(name, sharing.parts) else own
    users = [user for user, owner in enumerate(owners) if owner == owners[index]]
    if rule == "stepwise":
        sets = sorted(set(owners))
        steps = len(sets) - 1
        return [round(sets.index(owners[index]) * (num_source - 1) / steps) if steps else 0]
    return users if rule == "mean" else users[:1]


def compose(source: dict, source_model, target_model, rule: str, path: str) -> dict:
    """Return a value for every tensor of every layer of the new model.

    Args:
        source: the expanded state dict of the trained model.
        source_model: the trained model, which may be fake.
        target_model: the new model.
        rule: one of `RULES`.
        path: the source's file, for messages.

    Raises:
        ValueError: the models differ in more than sharing, or in depth where the rule cannot bridge it.
    """
    expected = expand(target_model.state_dict(), target_model)
    composed, stacks = {}, {}
    for stack, name in paths_of(target_model).items():
        depths = len(source_model.get_submodule(name)), len(target_model.get_submodule(name))
        if depths[0] != depths[1] and rule != "stepwise":
            raise ValueError(
                f"--rule {rule} needs equally many layers, but {path} has {depths[0]} in its {stack} and the new model "
                f"--{stack}-layers {depths[1]}: --rule stepwise takes any number"
            )
        stacks[name] = depths[0]
    for key, value in expected.items():
        stack = next((name for name in stacks if re.match(re.escape(name) + r"\.\d+\.", key)), None)
        if stack is None:
            keys = [key]
        else:
            index, _, name = key.removeprefix(stack + ".").partition(".")
            sharing = sharing_of(target_model.get_submodule(stack))
            layers = choose_layers(sharing, int(index), name, rule, stacks[stack])
            keys = [f"{stack}.{layer}.{name}" for layer in layers]
        missing = [each for each in keys if each not in source]
        if missing and not OWN_BUFFERS.fullmatch(key):
            raise ValueError(f"the new model has {key}, for which {path} has no {missing[0]}: they differ in structure")
        found = [source[each] for each in keys if each in source]
        if any(each.shape != value.shape for each in found):
            raise ValueError(
                f"{key} is {tuple(value.shape)} in the new model and {tuple(found[0].shape)} in {path}: give the sizes "
                "that it was trained with"
            )
        if OWN_BUFFERS.fullmatch(key) or not found:
            composed[key] = value
        elif len(found) == 1:
            composed[key] = found[0]
        else:
            composed[key] = torch.stack([each.double() for each in found]).mean(0).to(found[0].dtype)
    leaf_names = [{leaf_of(key, stacks) for key in keys} for keys in (source, expected)]
    left = sorted(leaf_names[0] - leaf_names[1])
    if left:
        raise ValueError(f"{path} has {left[0]}, for which the new model has no place: they differ in structure")
    return composed


def leaf_of(key: str, stacks) -> str:
    """Return a tensor's name, without the number of its layer; layers of one stack have the same names."""
    for stack in stacks:
        match = re.fullmatch(re.escape(stack) + r"\.\d+\.(.+)", key)
        if match:
            return f"{stack}.*.{match[1]}"
    return "" if OWN_BUFFERS.fullmatch(key) else key


def check_same_function(source, target, path: str) -> None:
    """Refuse a new model that would compute something else from the same tensors, or has tensors of other sizes.

    Args:
        source: the trained model's configuration.
        target: the new one's.
        path: the source's file, for messages.

    Raises:
        ValueError: with the option and both values.
    """

    def effective(config, name: str) -> str:
        value = getattr(config, name, None)
        if name == "share_decoder_input_output_embed":  # which fairseq sets when it builds a model with the other
            value = value or getattr(config, "share_all_embeddings", False)
        if name == "layernorm_eps" and value is None:
            value = 1e-5  # torch's, and RoBERTa's
        if name == "factorized_embed_dim" and value is None:
            value = getattr(config, "encoder_embed_dim", None)
        if name == "factorized_embed_dim" and not hasattr(config, "encoder_layers"):
            value = None  # a language model's is in its input and output widths
        if hasattr(value, "_content") or isinstance(value, (list, tuple)):
            value = ",".join(map(str, value))
        return str(value if value is not None else False)

    for name in FUNCTION:
        old, new = effective(source, name), effective(target, name)
        if old != new:
            raise ValueError(
                f"--{name.replace('_', '-')} is {new} in the new model and {old} in {path}: only sharing and depth may "
                "differ"
            )


def write_model(out: str, state: dict, config, model) -> None:
    """Write the source's checkpoint with the new model in it; what belongs to the old one's training is left out.

    Raises:
        ValueError: it could not be written; nothing is left behind.
    """
    saved = OmegaConf.to_container(config, resolve=True, enum_to_str=True) if OmegaConf.is_config(config) else config
    new = {key: value for key, value in state.items() if key != "last_optimizer_state"}
    new["model"] = model.state_dict()
    new["extra_state"] = {
        key: value for key, value in (state.get("extra_state") or {}).items() if not key.startswith("ema")
    }
    if state.get("cfg"):
        new["cfg"] = {**state["cfg"], "model": saved}
    else:
        new["args"] = saved
    write_atomically(out, lambda temporary: torch.save(new, temporary))


def measure_validation_loss(models: dict, task, state: dict, subset: str) -> tuple[str, dict[str, float]]:
    """Return the validation loss of models, as fairseq-validate computes it, on the CPU.

    Args:
        models: models by name; criterion and batch size are those of the checkpoint.
        task: the task of the data, see `setup_task_of`.
        state: the checkpoint.
        subset: the part of the data, such as ``valid``.

    Returns:
        What the loss is, and the loss of each model.

    Raises:
        ValueError: the data has no such part.
    """
    from fairseq import utils
    from fairseq.logging import metrics

    from .progress import progress

    criterion = task.build_criterion(section_of(state, "criterion")).eval()
    limits = section_of(state, "dataset")
    try:
        task.load_dataset(subset, combine=False, epoch=1, task_cfg=section_of(state, "task"))
    except (FileNotFoundError, KeyError) as error:
        raise ValueError(f"--data has no --valid-subset {subset}: {error}") from None
    losses, kind = {}, ""
    for name, model in models.items():
        iterator = task.get_batch_iterator(
            dataset=task.dataset(subset),
            max_tokens=limits.get("max_tokens_valid") or limits.get("max_tokens"),
            max_sentences=limits.get("batch_size_valid") or limits.get("batch_size"),
            max_positions=utils.resolve_max_positions(task.max_positions(), model.max_positions()),
            ignore_invalid_inputs=True,
            seed=section_of(state, "common").get("seed", 1),
            num_workers=0,
            epoch=1,
            disable_iterator_cache=True,  # or the second model would see the masks of a second epoch
        ).next_epoch_itr(shuffle=False)
        logs = [task.valid_step(sample, model, criterion)[2] for sample in progress(iterator, f"validating {name}")]
        with metrics.aggregate(new_root=True) as aggregated:
            task.reduce_metrics(logs, criterion)
            values = aggregated.get_smoothed_values()
        kind = "nll_loss, bits per token" if "nll_loss" in values else "loss"
        losses[name] = float(values.get("nll_loss", values["loss"]))
    return kind, losses


def section_of(state: dict, name: str):
    """Return a copy of a part of a checkpoint's configuration, in the form that fairseq's builders read."""
    section = state["cfg"][name]
    return OmegaConf.create(section) if isinstance(section, dict) else copy.copy(section)


def setup_task_of(state: dict, data: str):
    """Set up the task that a checkpoint was trained with, on other data.

    Raises:
        ValueError: the checkpoint does not say its task, or the data's dictionaries have other sizes than the model's
            embeddings.
    """
    if not {"task", "criterion", "dataset", "common"} <= (state.get("cfg") or {}).keys():
        raise ValueError("--data: the checkpoint does not say which task and criterion it was trained with")
    config = section_of(state, "task")
    config.data = data
    task = setup_task(config)
    sizes = vocabulary_sizes(state["model"])
    target = task.target_dictionary
    found = len(task.source_dictionary or target), len(target)
    if found != sizes:
        raise ValueError(
            f"--data {data} has dictionaries of {found[0]:,} and {found[1]:,} symbols, the model's embeddings have "
            f"{sizes[0]:,} and {sizes[1]:,}"
        )
    return task
