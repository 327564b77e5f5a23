"""Sequence packing: rows of slots (Megatron's thd layout), and each context-parallel rank's share.

Every sequence gets a slot. Under context parallelism of C a slot is a multiple of 2C tokens, cut
into 2C pieces of which rank r holds pieces r and 2C - 1 - r: this balances causal attention over
the ranks, and is the order TransformerEngine expects. Padding is at the end of a slot, where no
token of a causal model attends to it and no objective reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import lcm
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from parallel.device import device


@dataclass(frozen=True)
class RankPlace:
    """The position of a rank in the layout, as far as its batches depend on it."""

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
        return 2 * self.context if self.context > 1 else 1

    @property
    def row(self) -> int:
        """The number of tokens that a row is a multiple of; sequence parallelism splits it too."""
        return lcm(self.slot, self.context * self.tensor)


@dataclass(kw_only=True)
class PackedRow(PackedSeqParams):
    """One row of T tokens, in the form that Megatron's layers take."""

    starts: np.ndarray  # int64, the position of every slot in the row, and T
    own: np.ndarray  # int64 [T / C], the positions of this context-parallel rank's tokens, in order
    real: torch.Tensor  # bool [T / C], false on padding
    # The experts to replay, int64 [routed layers, T / C, experts_per_token].
    routes: torch.Tensor | None = None
    views: Any = None  # a cache of the attention
    # Caches of the routers (`parallel.model.routing.RouterMemory`).
    remembered: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    moved: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """T, on all context-parallel ranks together."""
        return int(self.starts[-1])


def lay_out(lengths: list[int], place: RankPlace, slot: int | None = None) -> PackedRow:
    """Return a row for sequences of these lengths, with slots of at least `slot` tokens.

    Without sequences the row is padding only, so that a rank without samples still takes part in
    the collectives of a forward pass.
    """
    slots = [-(-max(length, slot or 1) // place.slot) * place.slot for length in lengths]
    filler = -sum(slots) % place.row or (0 if slots else place.row)
    if filler:
        slots.append(filler)
    starts = np.concatenate([[0], np.cumsum(slots)])
    own = own_places(starts, place)
    real = np.zeros(starts[-1], bool)
    for start, length in zip(starts, lengths, strict=False):
        real[start : start + length] = True
    edges = torch.from_numpy(starts.astype(np.int32)).to(device())
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=edges,
        cu_seqlens_kv=edges,
        max_seqlen_q=max(slots),
        max_seqlen_kv=max(slots),
        starts=starts,
        own=own,
        real=torch.from_numpy(real[own]).to(device()),
    )


def own_places(starts: np.ndarray, place: RankPlace) -> np.ndarray:
    """Return the positions, int64 [T / C], that a context-parallel rank holds, in its order."""
    if place.context == 1:
        return np.arange(starts[-1])
    pieces, rank = 2 * place.context, place.context_rank
    places = []
    for start, end in pairwise(starts):
        own = np.arange(start, end).reshape(pieces, -1)[[rank, pieces - 1 - rank]]
        places.append(own.flatten())
    return np.concatenate(places)
