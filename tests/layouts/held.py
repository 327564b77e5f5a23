"""The measured bytes of a rank, to compare with `parallel.estimates.memory`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from parallel.estimates.memory import RankMemory
from parallel.settings import LayoutSettings, ModelSettings, OptimizerSettings
from tests.layouts.cases import MODEL, batches, build, cross_entropy, samples, train


def held(
    layout: LayoutSettings, optimizer: OptimizerSettings, model: ModelSettings = MODEL
) -> tuple[int, RankMemory]:
    """Return this rank's pipeline rank, and the bytes it holds after its first optimizer step."""
    from megatron.core import parallel_state

    policy = build(layout, optimizer, model=model)
    list(train(policy, range(1)))
    parameters = [parameter for chunk in policy.chunks for parameter in chunk.parameters()]
    buffers = [
        buffer
        for module in policy.modules
        for buffer in module.buffers + module.expert_parallel_buffers
    ]
    rank = parallel_state.get_pipeline_model_parallel_rank()
    on_host = policy.host_state.bytes
    elsewhere = [*parameters, on_host]
    return rank, RankMemory(
        parameters=_bytes(parameters),
        gradients=_bytes(buffer.grad_data for buffer in buffers),
        optimizer=_bytes(_optimizer_state(policy), besides=elsewhere),
        host_optimizer=on_host.nbytes,
    )


def kept_for_backward(
    layout: LayoutSettings, tokens: int, model: ModelSettings = MODEL
) -> tuple[int, int]:
    """Return a micro-batch's tokens, at most `tokens`, and the bytes its forward pass keeps."""
    from stages.objectives.loss import Totals

    policy = build(layout, model=model)
    [batch] = batches(samples(tokens // 16))
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.accumulate([batch], partial(cross_entropy, Totals(1, 1)), tokens=1)
    return batch.tokens.numel(), _bytes(kept, besides=policy.chunks[0].parameters())


def _optimizer_state(policy: Any) -> Iterable[torch.Tensor]:
    """Yield every parameter's moments or momentum, and the fp32 master weights."""
    for part in policy.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            # Adam's counter of steps, a scalar, is not worth a line in a plan.
            yield from (tensor for tensor in state.values() if tensor.dim() > 0)


def _bytes(tensors: Iterable[torch.Tensor], besides: Iterable[torch.Tensor] = ()) -> int:
    """Return the bytes of the tensors' storages, each counted once, without those of `besides`."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    for tensor in besides:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(sizes.values())
