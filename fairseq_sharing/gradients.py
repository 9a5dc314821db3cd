"""How large a gradient each of the N layers contributes, a borrower's share apart from its owner's.

A hook on a shared parameter sees the sum over its uses only, so one backward pass of an untied copy tells them apart.
Takase & Kiyono, arXiv 2104.06022, motivate CYCLE (REV) by the observation that higher decoder layers have larger
gradient norms.
"""

import copy

import torch
from torch import nn

from .sharing import untie_layers


def measure_gradient_norms(model: nn.Module, stacks: dict[str, str], compute_loss) -> dict[str, float]:
    """Run one backward pass of an untied copy in training mode and fp32.

    Model, gradients and random numbers of training stay as they are. The copy takes the memory of a model of the same
    depth that shares nothing, and its gradients.

    Args:
        model: a model whose stacks went through `share_layers`.
        stacks: name -> where the model keeps that stack.
        compute_loss: called with the copy; returns the scalar loss to differentiate.

    Returns:
        ``{stack}_{layer}`` -> L2 norm of the gradient of that layer's parameters, layers counted from 0. A layer that
        LayerDrop left out has 0.
    """
    # What is no parameter but was computed from one, such as the weight of a head with --spectral-norm-*, has a history
    # that torch refuses to copy.
    computed = [
        value
        for module in model.modules()
        for value in vars(module).values()
        if torch.is_tensor(value) and not value.is_leaf
    ]
    twin = copy.deepcopy(model, {id(value): value.detach().clone() for value in computed}).float().train()
    for path in stacks.values():
        untie_layers(twin.get_submodule(path))
    device = next(twin.parameters()).device
    with (
        torch.enable_grad(),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.autocast(device.type, enabled=False),
    ):
        compute_loss(twin).backward()
    norms = {}
    for stack, path in stacks.items():
        layers = twin.get_submodule(path)
        for index in range(len(layers)):  # by index: iterating over a LayerDropModuleList skips layers
            gradients = [parameter.grad for parameter in layers[index].parameters() if parameter.grad is not None]
            norms[f"{stack}_{index}"] = float(torch.nn.utils.get_total_norm(gradients))
    return norms
