"""The slices of the Hugging Face tensors that each rank of an engine needs; never imports torch.

They equal what vLLM 0.32's weight loaders copy on a tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from parallel.settings import ModelSettings
from parallel.weights.boxes import Box, along
from parallel.weights.names import FusedTensor, ModelWeights, Weight, padded, tensor_prefix


def needed(
    model: ModelSettings, ranks: int, rank: int, expert_parallel: bool = False, data: int = 1
) -> list[tuple[str, Box]]:
    """Return the box of each Hugging Face tensor that an engine rank copies, by bucket.

    Tensors that the rank needs no part of are omitted. `needed_of` explains the arguments.

    Example: of 4 query and 2 key-value heads of 8, the last of 4 engine ranks copies query head 3,
    and key head 1, which rank 2 copies too.

        >>> model = ModelSettings(
        ...     vocabulary_size=64, hidden_size=32, layers=2, attention_heads=4, key_value_heads=2,
        ...     head_dim=8, experts=4, experts_per_token=2, expert_hidden_size=16,
        ... )
        >>> boxes = dict(needed(model, ranks=4, rank=3))
        >>> boxes["model.layers.0.self_attn.q_proj.weight"]
        ((24, 0), (8, 32))
        >>> boxes["model.layers.0.self_attn.k_proj.weight"]
        ((8, 0), (8, 32))
    """
    description = ModelWeights(model)
    needed_boxes = []
    for key in description.buckets:
        weights, prefix = description.weights[description.kind(key)], tensor_prefix(key)
        boxes = needed_of(weights, ranks, rank, expert_parallel, data)
        needed_boxes += [(prefix + name, box) for name, box in boxes]
    return needed_boxes


def needed_of(
    weights: tuple[Weight, ...],
    ranks: int,
    rank: int,
    expert_parallel: bool = False,
    data: int = 1,
) -> Iterator[tuple[str, Box]]:
    """Yield the boxes that a rank needs of a bucket's weights, named within the bucket.

    Of the `ranks` of an engine with `data` members, each member's share all but the experts, which
    the ranks of all members share: slices of each, or with `expert_parallel` whole ones. Then
    members of several ranks give each its part of the tokens (vLLM's `use_sequence_parallel_moe`).
    """
    tensor = ranks // data
    by_tokens = expert_parallel and tensor > 1 and data > 1
    for weight in weights:
        split = (ranks, rank) if weight.experts else (tensor, rank % tensor)
        whole = expert_parallel and weight.experts > 0
        if whole or (by_tokens and weight.with_experts):
            split = (1, 0)
        if weight.once and split[1] > 0:
            continue
        boxes = [_box(fused, weight.dimension, *split) for fused in weight.tensors]
        experts = range(max(1, weight.experts))
        for expert in _linear_placement(weight.experts, ranks, rank) if whole else experts:
            for fused, box in zip(weight.tensors, boxes, strict=True):
                if all(box[1]):
                    yield fused.tensor.format(expert=expert), box


def _linear_placement(experts: int, ranks: int, rank: int) -> range:
    """Return the experts of a rank in vLLM's linear placement: the first ranks have one more."""
    per_rank, remainder = divmod(experts, ranks)
    first_expert = rank * per_rank + min(rank, remainder)
    return range(first_expert, first_expert + per_rank + (rank < remainder))


def _box(fused: FusedTensor, dimension: int | None, ranks: int, rank: int) -> Box:
    if dimension is None or fused.units is None:
        return (0,) * len(fused.shape), fused.shape
    units = fused.units
    places = min(ranks, units.count) if units.repeated else ranks
    per_place = padded(units) // places
    first_unit = min(rank * places // ranks * per_place, units.count)
    last_unit = min(first_unit + per_place, units.count)
    size = fused.shape[dimension] // units.count
    return along(
        fused.shape, dimension, fused.first_row + first_unit * size, (last_unit - first_unit) * size
    )
