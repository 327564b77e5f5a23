"""The gradients of recomputed modules and of overlapped sums, compared with the plain ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from parallel.settings import LayoutSettings, ModelSettings, RoutingLossSettings
from tests.layouts.cases import MODEL, SGD, accumulate, batches, build, samples, train

LOSSES = RoutingLossSettings(load_balance=0.1, z_loss=0.01)


@contextmanager
def overridden(flags: dict[str, bool]) -> Iterator[None]:
    """Override `parallel.machine.capabilities.data_parallel_flags` for policies built within."""
    from parallel.model import policy as policies

    original = policies.data_parallel_flags
    policies.data_parallel_flags = lambda *machine: original(*machine) | flags
    try:
        yield
    finally:
        policies.data_parallel_flags = original


def gradients(
    layout: LayoutSettings, model: ModelSettings, flags: dict[str, bool]
) -> list[torch.Tensor]:
    """Return this rank's summed gradients of four micro-batches."""
    with overridden(flags):
        policy = build(layout, SGD, losses=LOSSES, model=model)
    drawn = samples(24)
    accumulate(policy, "cross_entropy", drawn, batches(drawn, count=4))
    parameters = [parameter for chunk in policy.chunks for parameter in chunk.parameters()]
    return [parameter.main_grad.clone() for parameter in parameters]


def trained(layout: LayoutSettings, flags: dict[str, bool]) -> list[torch.Tensor]:
    """Return this rank's weights after three steps of Adam."""
    with overridden(flags):
        policy = build(layout)
    list(train(policy, range(3)))
    return [parameter.detach() for chunk in policy.chunks for parameter in chunk.parameters()]


def passes(layout: LayoutSettings, model: ModelSettings) -> dict[str, int]:
    """Return the forward passes of each kind of module in a step of one micro-batch."""
    policy = build(layout, SGD, model=model)
    counted = dict.fromkeys(("dense", "experts", "shared_experts"), 0)
    for chunk in policy.chunks:
        for layer in chunk.decoder.layers:
            routed = hasattr(layer.mlp, "router")
            parts = {"experts": layer.mlp.experts} if routed else {"dense": layer.mlp}
            if routed and layer.mlp.shared_experts is not None:
                parts["shared_experts"] = layer.mlp.shared_experts
            for kind, module in parts.items():
                module.register_forward_hook(partial(_count, counted, kind))
    drawn = samples(8)
    accumulate(policy, "cross_entropy", drawn, batches(drawn))
    return counted


def _count(counted: dict[str, int], kind: str, *_: Any) -> None:
    counted[kind] += 1


def difference(layout: LayoutSettings, plain: LayoutSettings, model: ModelSettings) -> float:
    """Return the largest relative difference of the gradients under two layouts."""
    return largest(gradients(layout, model, {}), gradients(plain, model, {}))


def overlap_difference(layout: LayoutSettings) -> tuple[float, float]:
    """Return the differences that overlapped sums make to gradients, and to trained weights."""
    whole = layout.model_copy(update={"distributed_optimizer": False})
    flags = {"overlap_grad_reduce": True}
    summed = (gradients(whole, MODEL, each) for each in (flags, {}))
    stepped = (trained(layout, each) for each in (flags, {}))
    return largest(*summed), largest(*stepped)


def largest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float((one - other).norm() / other.norm().clamp(min=1e-6)) for one, other in pairs)
