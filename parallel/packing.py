"""Sequences in one packed row (Megatron's thd layout), and a context-parallel rank's share of it.

Every sequence gets a slot. Under context parallelism of C a slot is a multiple of 2C tokens, cut
into 2C pieces of which rank r holds pieces r and 2C - 1 - r: so all ranks look back equally far
(TransformerEngine expects the same order). Padding stands at the end of a slot, where a causal
model never looks at it, and where no objective does.
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
    """Where a rank stands among the others, as far as its batches depend on it."""

    data: int = 1  # data-parallel ranks
    data_rank: int = 0
    context: int = 1  # context-parallel ranks
    context_rank: int = 0
    tensor: int = 1  # tensor-parallel ranks
    round: int = 1  # an interleaved pipeline takes micro-batches by so many

    @classmethod
    def here(cls) -> RankPlace:
        """That of the process groups that stand."""
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
        """The tokens of every slot are a multiple of this."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def row(self) -> int:
        """Those of a whole row are a multiple of this: sequence parallelism splits it once more."""
        return lcm(self.slot, self.context * self.tensor)


@dataclass(kw_only=True)
class PackedRow(PackedSeqParams):
    """One row of T tokens, as Megatron's layers are told of it.

    `starts` int64 are the places in the row where the slots start, and T; `own` int64 [T / C] the
    places of the tokens that this context-parallel rank holds, in its order. `real` bool [T / C] is
    false on padding. `routes` int64 [routed layers, T / C, experts_per_token] are the experts to
    use, or None. `views` is what the attention makes of the row for itself; `remembered` and
    `moved` are what the routers do (`parallel.model.routing`).
    """

    starts: np.ndarray
    own: np.ndarray
    real: torch.Tensor
    routes: torch.Tensor | None = None
    views: Any = None
    remembered: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    moved: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """T, on all context-parallel ranks together."""
        return int(self.starts[-1])


def lay_out(lengths: list[int], place: RankPlace, slot: int | None = None) -> PackedRow:
    """A row for sequences of these lengths; `slot` makes all slots that long at least (padding).

    No sequence at all gives a row of padding, so that a rank without samples can keep step.
    """
    slots = [_round_up(max(length, slot or 1), place.slot) for length in lengths]
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
    """The places int64 [T / C] of a row that one context-parallel rank holds, in its order."""
    if place.context == 1:
        return np.arange(starts[-1])
    pieces, rank = 2 * place.context, place.context_rank
    places = []
    for start, end in pairwise(starts):
        size = (end - start) // pieces
        for piece in (rank, pieces - 1 - rank):
            places.append(np.arange(start + piece * size, start + (piece + 1) * size))
    return np.concatenate(places)


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
