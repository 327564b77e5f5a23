"""The state of a distributed optimizer as boxes of the model's tensors; each rank saves its own.

A data-parallel rank owns ranges of the flattened weights, which begin and end within a row.
megatron-core's own layout-independent form (fully_reshardable) gathers all of that state on every
data-parallel rank before it saves. But a range is a few boxes (the end of a row, whole rows, the
beginning of a row), and a checkpoint may hold a tensor in any boxes: so no data needs to move.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from parallel.boxes import boxes


def shards(part: DistributedOptimizer, weights: dict[int, Any]) -> list[ShardedTensor]:
    """Return this rank's shards of the optimizer's tensors; `weights` by the id of the parameter.

    Without the master weights of fp32 parameters, which are the weights themselves.
    """
    found: list[ShardedTensor] = []
    for parameter, start, stop in _owned(part):
        for weight in _pieces(weights[id(parameter)]):
            begin = _position(weight, parameter)
            first, last = max(start, begin), min(stop, begin + weight.data.numel())
            for name, flat in part._get_main_param_and_optimizer_states(parameter).items():
                if name == "param" and parameter.dtype == torch.float32:
                    continue
                named = f"optimizer.state.{'fp32_param' if name == 'param' else name}.{weight.key}"
                held = flat[first - start : max(first, last) - start]
                found += _cut(replace(weight, key=named, data=None), held, first - begin)
    return found


def _owned(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """Yield each parameter that this rank updates, and the range [start, stop) that it updates."""
    for buffer in part.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _pieces(weight: Any) -> list[ShardedTensor]:
    """Return the checkpoint tensors of a weight, each owned by the rank that holds it.

    The weight of a gated layer is two of them, one after the other.
    """
    owned = replace(weight, replica_id=(*weight.replica_id[:2], 0))  # the last is data-parallel
    if isinstance(owned, ShardedTensorFactory):
        return list(nested_values([owned.build()]))
    return [owned]


def _position(piece: ShardedTensor, parameter: torch.nn.Parameter) -> int:
    """Return the offset of a piece in the flattened parameter.

    Raises:
        NotImplementedError: megatron-core rearranges the weight for its checkpoint.
    """
    memory = parameter.untyped_storage().data_ptr()
    if piece.data.untyped_storage().data_ptr() != memory or not piece.data.is_contiguous():
        raise NotImplementedError(f"{piece.key} is not a plain part of its parameter")
    return (piece.data.data_ptr() - parameter.data_ptr()) // parameter.element_size()


def _cut(piece: ShardedTensor, flat: torch.Tensor, start: int) -> Iterator[ShardedTensor]:
    """Yield a range of a piece, from `start`, as separate shards."""
    extra = piece.prepend_axis_num
    for offsets, sizes in boxes(piece.local_shape, start, start + flat.numel()):
        count = math.prod(sizes)
        box, flat = flat[:count].view((1,) * extra + sizes), flat[count:]
        inner = (at + by for at, by in zip(piece.global_offset[extra:], offsets, strict=True))
        yield replace(
            piece,
            data=box,
            dtype=box.dtype,
            local_shape=tuple(box.shape),
            global_offset=(*piece.global_offset[:extra], *inner),
            axis_fragmentations=None,  # no regular grid
            prepend_axis_num=0,
        )
