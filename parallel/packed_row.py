"""The packed row of a micro-batch, and the ranks' shares of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import lcm
from typing import Any

import numpy as np
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from parallel.micro_batches import slot_multiple


@dataclass(frozen=True)
class RankPlace:
    """The position of a rank in the layout, as far as its batches depend on it.

    Example: 2 context-parallel ranks cut a slot into 4 pieces, and 4 tensor-parallel ranks share
    the tokens of each of them.

        >>> here = RankPlace(context=2, context_rank=1, tensor=4)
        >>> here.slot, here.row
        (4, 8)
    """

    data: int = 1  # data-parallel ranks
    data_rank: int = 0
    context: int = 1  # context-parallel ranks
    context_rank: int = 0
    tensor: int = 1  # tensor-parallel ranks
    round: int = 1  # micro-batches come in multiples of this (interleaved pipeline schedule)

    @classmethod
    def here(cls) -> RankPlace:
        """Return this rank's position in the current process groups."""
        interleaved = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
        return cls(
            data=parallel_state.get_data_parallel_world_size(),
            data_rank=parallel_state.get_data_parallel_rank(),
            context=parallel_state.get_context_parallel_world_size(),
            context_rank=parallel_state.get_context_parallel_rank(),
            tensor=parallel_state.get_tensor_model_parallel_world_size(),
            round=parallel_state.get_pipeline_model_parallel_world_size() if interleaved else 1,
        )

    @property
    def slot(self) -> int:
        """The number of tokens that every slot is a multiple of."""
        return slot_multiple(self.context)

    @property
    def row(self) -> int:
        """The number of tokens that a row is a multiple of; sequence parallelism splits it too."""
        return lcm(self.slot, self.context * self.tensor)


@dataclass(kw_only=True)
class PackedRow(PackedSeqParams):
    """One row of T tokens, in the form that Megatron's layers take.

    Example: sequences of 5 and 3 tokens on 2 context-parallel ranks have slots of 8 and 4.

        starts = [0, 8, 12]
        row:       0  1  2  3  4  .  .  .  8  9 10  .   (. is padding)
        rank 0:    0  1              6  7  8       11   local_positions
        rank 1:          2  3  4  5           9 10
    """

    starts: np.ndarray  # int64, the position of every slot in the row, and T
    # int64 [T / C], the positions in the row of this context-parallel rank's tokens, in order.
    local_positions: np.ndarray
    real: Tensor  # bool [T / C], false on padding
    # The experts to replay, int64 [routed layers, T / C, experts_per_token].
    routes: Tensor | None = None
    views: Any = None  # a cache of the attention
    # Caches of the routers (`parallel.model.routing.RouterMemory`).
    remembered: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    moved: Tensor | None = None

    @property
    def tokens(self) -> int:
        """T, on all context-parallel ranks together."""
        return int(self.starts[-1])


def local_positions(starts: np.ndarray, place: RankPlace) -> np.ndarray:
    """Return the positions, int64 [T / C], that a context-parallel rank holds, in its order.

    Example: of a slot of 8, rank 0 holds the first and the last of 4 pieces.

        >>> [local_positions(np.array([0, 8]), RankPlace(context=2, context_rank=r)).tolist()
        ...  for r in (0, 1)]
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if place.context == 1:
        return np.arange(starts[-1])
    pieces, rank = 2 * place.context, place.context_rank
    places = []
    for start, end in pairwise(starts):
        local = np.arange(start, end).reshape(pieces, -1)[[rank, pieces - 1 - rank]]
        places.append(local.flatten())
    return np.concatenate(places)
