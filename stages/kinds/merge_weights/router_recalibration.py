"""The routers of a merge of weights, recalibrated on samples of each model's domain (HARC).

Layer by layer, in order: a forward pass of the merged model, whose earlier routers are recalibrated
already, gives the inputs of the layer's router; of the models that are merged only the routers are
read. Inputs stay on the rank that computed them, and sums over them are added up over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from parallel.batch import MicroBatch
from parallel.distributed import gather, is_main
from parallel.errors import UserError
from parallel.model.policy import Policy
from parallel.model.routing import Router, router_inputs
from parallel.weights.names import bucket_of, is_precise, is_router, tensors
from stages.kinds.merge_weights.methods.recalibration import RouterObjective, RouterSamples

# The weight of each model and its tensor of a name, whole, in float64, in the order of the models.
ReadModels = Callable[[str], Iterable[tuple[float, torch.Tensor]]]


class Change(NamedTuple):
    """The objective of a layer's router before and after, and the solver's iterations."""

    before: float
    after: float
    iterations: int


@torch.no_grad()
def recalibrate(
    policy: Policy, key: str, batches: Sequence[list[MicroBatch]], read: ReadModels
) -> None:
    """Replace the routers of a merged policy, and print what each layer gains. Collective.

    `batches` are this rank's, of each model's domain; `key` is that of the stage's block.

    Raises:
        UserError: the merged model overflows on the samples.
    """
    routers = {router.place: router for router in policy.routers}
    # In the order of layers: a router that is replaced changes the inputs of those after it.
    for number, layer in enumerate(policy.routed_layers):
        name = router_name(policy, layer)
        router = routers.get(number)
        inputs = [_inputs(policy, router, model_batches) for model_batches in batches]
        change = None if router is None else _replace(router, inputs, read(name))
        policy.weights_changed()
        outcome = next(rank_change for rank_change in gather(change) if rank_change is not None)
        if not math.isfinite(outcome.after):
            raise UserError(
                f"{key}.method: the merged model overflows on the domains' samples at"
                f" {name}; use smaller weights, or a smaller scale of the method"
            )
        if is_main():
            print(
                f"recalibrated {name}: objective {outcome.before:.3e} -> {outcome.after:.3e} in"
                f" {outcome.iterations} iterations",
                flush=True,
            )


def router_name(policy: Policy, layer: int) -> str:
    """Return the Hugging Face name of a layer's router."""
    names = (name for name in tensors(policy.settings) if bucket_of(name) == layer)
    return next(name for name in names if is_router(name) and not is_precise(name))


def _inputs(
    policy: Policy, router: Router | None, micro_batches: list[MicroBatch]
) -> list[torch.Tensor]:
    """Return the router's inputs, [tokens, H] a micro-batch; all ranks run the passes."""
    if router is None:  # the layer is on another pipeline stage
        policy.evaluate(micro_batches, lambda _: None)
        return []
    with router_inputs(router) as inputs:
        policy.evaluate(micro_batches, lambda _: None)
    return inputs


def _replace(
    router: Router, inputs: list[list[torch.Tensor]], models: Iterable[tuple[float, torch.Tensor]]
) -> Change:
    """Replace a router by the one that minimises the objective. Collective over its ranks."""
    weight, sigmoid = router.weight, router.score_function == "sigmoid"
    samples = [
        RouterSamples(tensor.to(weight.device), model_inputs, sigmoid, share)
        for model_inputs, (share, tensor) in zip(inputs, models, strict=True)
    ]
    objective = RouterObjective(samples, partial(_sum, router.tp_dp_cp_group))
    merged = weight.double()
    recalibrated = objective.solve(merged)
    weight.copy_(recalibrated.router)
    return Change(
        objective.value(merged), objective.value(weight.double()), recalibrated.iterations
    )


def _sum(group: Any, total: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(total, group=group)
    return total
