"""Parameters by component, and the bytes that hold them, counted from the tensors' shapes."""

from .model import paths_of, sharing_of, stacks_of

# What modules outside of the stacks belong to, by a part of their name; the first that fits. A tensor that has two
# names, such as a tied output, belongs to the component that comes first.
COMPONENTS = {
    "convolutions": ("encoder.subsample.",),
    "embeddings": ("embed_tokens", "embed_positions", "project_in_dim"),
    "encoder": (),
    "decoder": (),
    "norms": (),
    "head": ("project_out_dim", "output_projection", "adaptive_softmax", "lm_head", "classification_heads"),
    "other": ("",),
}
# Bytes of each parameter: weight, gradient, Adam's two moments, fp32 masters with their gradients (optim/fp16_optimizer
# keeps both, --memory-efficient-fp16 neither), and what workers exchange.
PRECISIONS = {
    "fp32": {"weights": 4, "gradients": 4, "Adam's moments": 8, "fp32 masters": 0},
    "--fp16": {"weights": 2, "gradients": 2, "Adam's moments": 8, "fp32 masters": 8},
    "--memory-efficient-fp16": {"weights": 2, "gradients": 2, "Adam's moments": 8, "fp32 masters": 0},
}


def component_of(name: str, paths: dict[str, str], norms: set[str]) -> str:
    """Return the component of `COMPONENTS` that a parameter of this name belongs to."""
    if name.rpartition(".")[0] in norms:
        return "norms"
    for stack, path in paths.items():
        if name.startswith(path + "."):
            return stack
    return next(component for component, words in COMPONENTS.items() if any(word in name for word in words))


def count_components(model) -> dict[str, dict[str, int]]:
    """Return unique parameters and parameters without sharing by component; they add up to the model."""
    order = list(COMPONENTS)
    paths = paths_of(model)
    norms = {
        name for name, module in model.named_modules(remove_duplicate=False) if hasattr(module, "normalized_shape")
    }
    owner, copies = {}, dict.fromkeys(order, 0)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        component = component_of(name, paths, norms)
        known = owner.get(id(parameter))
        if known is None or order.index(component) < order.index(known[0]):
            owner[id(parameter)] = (component, parameter.numel())
        if known is not None and any(name.startswith(path + ".") for path in paths.values()):
            copies[component] += parameter.numel()  # one more layer uses it
    counts = {}
    for component in order:
        unique = sum(size for each, size in owner.values() if each == component)
        if unique or component not in ("convolutions", "other", *({"encoder", "decoder"} - paths.keys())):
            counts[component] = {"unique": unique, "without sharing": unique + copies[component]}
    return counts


def count_memory(model) -> dict[str, dict[str, int]]:
    """Return bytes in training with Adam, by precision and kind; frozen parameters have a weight only."""
    every = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return {
        precision: {kind: size * (every if kind == "weights" else trained) for kind, size in sizes.items()}
        for precision, sizes in PRECISIONS.items()
    }


def count_checkpoint(model) -> dict[str, int]:
    """Return bytes of the tensors that fairseq writes, each once: fp32, whatever it trained in."""
    tensors = {id(parameter): parameter.numel() * 4 for parameter in model.parameters()}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[id(buffer)] = buffer.numel() * max(4, buffer.element_size())
    records = sum(4 * (len(layers) + 2) for layers in stacks_of(model).values() if sharing_of(layers).shares)
    size = sum(tensors.values()) + records
    return {"model": size, "with optimizer": size + count_memory(model)["fp32"]["Adam's moments"]}
