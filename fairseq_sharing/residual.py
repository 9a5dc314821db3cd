"""Admin: residual connections scaled so that deep Post-LN stacks train.

Source: Liu et al., "Understanding the Difficulty of Training Transformers", arXiv 2004.08249. The i-th residual
sublayer of a stack (attention, cross-attention or FFN) computes LN(omega_i * x + f_i(x)) instead of LN(x + f_i(x)),
where omega_i is a trainable vector of the model's width, filled with one number in the beginning. Each of the N layers
has its own, shared or not.

The forward pass of fairseq's layers is not copied: what they call as ``residual_connection`` hands both summands on,
and the LayerNorm that comes next scales and adds them. Omega is a buffer (the number) plus a parameter that starts at
zero: the number becomes known in the first forward pass, and mixed precision has copied the parameters before that.
"""

import copy
import logging
import math

import torch
from torch import nn
from torch.nn import functional

logger = logging.getLogger(__name__)

# The LayerNorm behind each residual sublayer, in the order in which a layer runs them, and the matrices with which that
# sublayer reads what is scaled (cross-attention takes keys and values from the encoder).
READERS = {
    "self_attn_layer_norm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "encoder_attn_layer_norm": ("encoder_attn.q_proj",),
    "final_layer_norm": ("fc1",),
}
SCALE = "residual_scale"


def keep_apart(x, residual):
    """Stand in for a layer's residual connection: return both summands, stacked.

    Args:
        x: what the sublayer computed, T x B x C.
        residual: what it read, T x B x C.
    """
    return torch.stack((x, residual))  # 2 x T x B x C


class ScaledResidualNorm(nn.LayerNorm):
    """The LayerNorm behind a scaled residual connection: LN(omega * residual + x).

    Attributes:
        residual_scale: the number that fills omega at first; not a number until the profile is taken.
        residual_delta: what training has added to it, of width C.
    """

    def __init__(self, norm: nn.LayerNorm, scale: float):
        super().__init__(norm.normalized_shape, norm.eps)
        self.weight, self.bias = norm.weight, norm.bias
        self.register_buffer(SCALE, torch.tensor(scale))
        self.residual_delta = nn.Parameter(torch.zeros_like(norm.weight))

    @property
    def omega(self) -> torch.Tensor:
        """The scaling, of width C."""
        return self.residual_scale + self.residual_delta

    def forward(self, summands):
        """Scale, add and normalise.

        Args:
            summands: from `keep_apart`, 2 x T x B x C.

        Returns:
            T x B x C.
        """
        x = torch.addcmul(summands[0], summands[1], self.residual_scale + self.residual_delta)
        return functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def scale_residuals(layers: nn.ModuleList, method: str) -> None:
    """Give every residual sublayer of a Post-LN stack its own scaling, in place and before layers are tied.

    Args:
        layers: fairseq's Transformer layers.
        method: ``admin``, whose numbers `measure_residual_scales` finds, or ``admin-static``, which takes
            sqrt((n + 1) / ln(n + 1) - 1) for a stack of n residual sublayers, as the package admin-torch does.

    Raises:
        ValueError: the layers are Pre-LN.
    """
    present = [
        (layers[index], name)
        for index in range(len(layers))  # by index: iterating over a LayerDropModuleList skips layers
        for name in READERS
        if getattr(layers[index], name, None) is not None
    ]
    n = len(present)
    scale = math.sqrt((n + 1) / math.log(n + 1) - 1) if method == "admin-static" else math.nan
    for layer, name in present:
        if layer.normalize_before:
            raise ValueError(f"residual scaling {method} is defined for Post-LN layers only")
        setattr(layer, name, ScaledResidualNorm(getattr(layer, name), scale))
        layer.residual_connection = keep_apart


def list_scalings(layers: nn.ModuleList) -> list[ScaledResidualNorm]:
    """Return the scaled LayerNorms of a stack in the order in which they run."""
    norms = [getattr(layers[index], name, None) for index in range(len(layers)) for name in READERS]
    return [norm for norm in norms if isinstance(norm, ScaledResidualNorm)]


def is_measured(norms: list[ScaledResidualNorm]) -> bool:
    """Whether the scalings have their numbers."""
    return not any(norm.residual_scale.isnan() for norm in norms)


@torch.no_grad()
def measure_residual_scales(model: nn.Module, stacks: dict[str, str], args: tuple, kwargs: dict) -> None:
    """Take Admin's profile on one batch and write it into the model.

    A copy of the model runs in training mode and fp32, with every layer in its place. In each stack r starts at 1; the
    next sublayer takes omega = r, and r becomes sqrt(Var(omega * x) + Var(f(x))), the variance over all elements. With
    several workers all take what the first has measured. The random numbers of training are not touched.

    Args:
        model: a model whose stacks went through `scale_residuals`.
        stacks: name in the log -> where the model keeps that stack.
        args: positional arguments of the model's forward pass.
        kwargs: its keyword arguments.
    """
    twin = copy.deepcopy(model).float().train()
    device = next(twin.parameters()).device
    for module in twin.modules():
        if isinstance(module, nn.ModuleList) and hasattr(module, "p"):
            module.p = 0.0  # LayerDrop, which would leave sublayers without a number
    for path in stacks.values():
        follow_variance(list_scalings(twin.get_submodule(path)))
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.autocast(device.type, enabled=False),
    ):
        twin(*args, **kwargs)
    for stack, path in stacks.items():
        norms = list_scalings(model.get_submodule(path))
        found = torch.stack([norm.residual_scale for norm in list_scalings(twin.get_submodule(path))])
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            torch.distributed.broadcast(found, src=0)
        for norm, scale in zip(norms, found, strict=True):
            norm.residual_scale.copy_(scale)
        numbers = " ".join(f"{scale:.2f}" for scale in found.tolist())
        logger.info(f"{stack}: residual scalings measured on the first batch: {numbers}")


def follow_variance(norms: list[ScaledResidualNorm]) -> None:
    """Let each scaling of a stack take its number from the one before when the stack runs."""
    variance = [1.0]

    def measure(norm, inputs):
        x, residual = inputs[0].float()
        norm.residual_scale.fill_(math.sqrt(variance[0]))
        variance[0] = (residual * norm.omega).var().item() + x.var().item()

    for norm in norms:
        norm.register_forward_pre_hook(measure)


def measure_once(model: nn.Module, args: tuple, kwargs: dict) -> None:
    """Take the profile before the first forward pass in training mode, unless a checkpoint has brought it (a hook)."""
    if not model.training:
        return
    model.__dict__.pop("residual_hook").remove()
    if all(is_measured(list_scalings(model.get_submodule(path))) for path in model.STACKS.values()):
        return
    try:
        measure_residual_scales(model, model.STACKS, args, kwargs)
    except Exception:  # such as too little memory, after which fairseq goes on with the next batch
        model.residual_hook = model.register_forward_pre_hook(measure_once, with_kwargs=True)
        raise


def fold_scalings(weights: dict[str, torch.Tensor], stack: str) -> torch.Tensor:
    """Turn scaled layers into plain Post-LN layers that compute the same, exactly.

    Omega of a sublayer goes into weight and bias of the LayerNorm before it, and is divided out of the matrices with
    which the sublayer reads: what travels along the residual connection then is omega * x.

    Args:
        weights: a state dict in which every layer has all its tensors; changed in place, its tensors are not.
        stack: where the layers are, such as ``encoder.layers``.

    Returns:
        Omega of the first sublayer, of width C: what the stack reads must be multiplied by it.

    Raises:
        ValueError: an entry of omega is so small that dividing by it would lose precision.
    """
    first = previous = None
    depth = 1 + max(int(key.split(".")[2]) for key in weights if key.startswith(f"{stack}."))
    for layer in (f"{stack}.{index}" for index in range(depth)):
        for name, readers in READERS.items():
            norm = f"{layer}.{name}"
            if f"{norm}.{SCALE}" not in weights:
                continue
            omega = weights.pop(f"{norm}.{SCALE}").double() + weights.pop(f"{norm}.residual_delta").double()
            smallest = omega.abs().min().item()
            if smallest < 1e-3:
                raise ValueError(f"the scaling in {norm} has an entry of {smallest:.1e}, too small to be divided out")
            for key in (f"{layer}.{reader}.weight" for reader in readers):
                weights[key] = (weights[key].double() / omega).to(weights[key].dtype)
            for key in (f"{previous}.weight", f"{previous}.bias") if previous else ():
                weights[key] = (weights[key].double() * omega).to(weights[key].dtype)
            first, previous = omega if first is None else first, norm
    return first


def compare_scalings(layers: nn.ModuleList, state_dict: dict, prefix: str) -> None:
    """Refuse a state dict that has scalings where the stack has none, and the other way round.

    Raises:
        ValueError: the checkpoint's residual connections are not this stack's.
    """
    if not any(key.startswith(prefix) for key in state_dict):
        return  # this file does not hold the stack at all, which is not for us to judge
    saved = any(key.startswith(prefix) and key.endswith(f".{SCALE}") for key in state_dict)
    if saved != bool(list_scalings(layers)):
        had, has = ("", "no ") if saved else ("no ", "")
        sentence = (
            f"cannot load this checkpoint: its {prefix.rstrip('.')} were saved with {had}residual scaling; "
            f"this model has {has}residual scaling (see --residual-scaling)"
        )
        logger.error(sentence)
        raise ValueError(sentence)
