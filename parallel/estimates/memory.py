"""The bytes that a rank holds, from the settings alone. Never imports torch.

Parameters, gradients and optimizer state are counted as megatron-core lays them out, padding
included. Activations are an estimate: see parallel/estimates/activations.py.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace

from parallel.estimates.activations import kept_activations
from parallel.estimates.tensor_sizes import BYTES, FP32, Tensors, rank_chunks
from parallel.settings import LayoutSettings, ModelSettings, OptimizerSettings

OPTIMIZER_STATES = {"adam": 2, "sgd": 1}  # fp32 numbers a parameter: two moments, or a momentum

# megatron-core's distributed optimizer starts every tensor of its buffers at a multiple of the
# first and ends every buffer at one of the second (param_and_grad_buffer.py).
TENSOR_ALIGNMENT, BUFFER_ALIGNMENT = 64, 128


@dataclass(frozen=True)
class RankMemory:
    """Bytes one rank holds while a stage runs; `frozen` are models that no optimizer changes.

    `host_optimizer` is the optimizer's state in host memory, besides all that the total counts.
    """

    parameters: int
    gradients: int = 0
    optimizer: int = 0
    frozen: int = 0
    activations: int = 0
    host_optimizer: int = 0

    @property
    def total(self) -> int:
        """All of them together, without the state in host memory."""
        models = self.parameters + self.gradients + self.optimizer + self.frozen
        return models + self.activations

    def beside(self, other: RankMemory) -> RankMemory:
        """Add a model that trains in turn with this one: only one at a time has activations."""
        both = RankMemory(*map(sum, zip(astuple(self), astuple(other), strict=True)))
        return replace(both, activations=max(self.activations, other.activations))


def training_memory(
    model: ModelSettings,
    layout: LayoutSettings,
    optimizer: OptimizerSettings,
    row_tokens: int,
    frozen_models: int = 0,
    averages: int = 0,
    values: bool = False,
) -> list[RankMemory]:
    """Return the memory of one rank of every pipeline rank while it trains, first rank first.

    Args:
        model, layout: without `layout_violations`.
        row_tokens: tokens of the fullest micro-batch, on all context-parallel ranks together
            (`parallel.micro_batches.most_row_tokens`).
        frozen_models: references and teachers held beside the policy.
        averages: of the policy's weights over its updates, which are kept in fp32.
        values: true for a critic's model, whose head gives one value and no logits.
    """
    if optimizer.algorithm != "adam":  # megatron-core's distributed optimizer has only Adam
        layout = layout.model_copy(update={"distributed_optimizer": False})
    precision, low = BYTES[model.precision], model.precision == "bf16"
    moment = BYTES["bf16"] if low and optimizer.precision_aware else FP32
    # Of an element: its moments, and bf16's master weight in fp32.
    states = OPTIMIZER_STATES[optimizer.algorithm] * moment + low * FP32
    ranks = []
    for rank in range(layout.pipeline):
        chunks = rank_chunks(model, layout, rank, values)
        sizes = [_buffers(chunk, layout) for chunk in chunks]
        buffered, updated = (sum(counts) for counts in zip(*sizes, strict=True))
        weights = sum(chunk.elements for chunk in chunks)
        on_host = round(optimizer.cpu_offload * states * updated)
        ranks.append(
            RankMemory(
                parameters=precision * buffered,
                gradients=FP32 * buffered,
                optimizer=states * updated - on_host,
                frozen=weights * (precision * frozen_models + FP32 * averages),
                activations=kept_activations(model, layout, rank, row_tokens, values),
                host_optimizer=on_host,
            )
        )
    return ranks


def reading_memory(model: ModelSettings, layout: LayoutSettings) -> list[RankMemory]:
    """Return the memory of one rank of every pipeline rank for a model that is only read."""
    precision = BYTES[model.precision]
    return [
        RankMemory(precision * sum(chunk.elements for chunk in rank_chunks(model, layout, rank)))
        for rank in range(layout.pipeline)
    ]


def head_bytes(model: ModelSettings, layout: LayoutSettings) -> int:
    """Return the bytes of the output head on a rank of the last pipeline stage."""
    return BYTES[model.precision] * model.vocabulary_size * model.hidden_size // layout.tensor


def _buffers(chunk: Tensors, layout: LayoutSettings) -> tuple[int, int]:
    """Return the elements of a chunk's gradient buffers, and of the optimizer state on this rank.

    Of a sharded optimizer both are padded, as are the weights, and the rank has a share of the
    state. Each chunk has one buffer of dense weights and one of experts: without overlapped
    reduction megatron-core does not cut them into buckets.
    """
    if not layout.distributed_optimizer:
        return chunk.elements, chunk.elements
    dense = layout.ranks // (layout.tensor * layout.pipeline)  # ranks with a copy of each weight
    experts = layout.ranks // (layout.expert_tensor * layout.expert * layout.pipeline)
    sizes = _padded(chunk.dense, dense), _padded(chunk.experts, experts)
    return sum(sizes), sizes[0] // dense + sizes[1] // experts


def _padded(tensors: list[tuple[int, int]], copies: int) -> int:
    aligned = sum(count * _up(size, TENSOR_ALIGNMENT) for size, count in tensors)
    return _up(aligned, math.lcm(copies, BUFFER_ALIGNMENT))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
