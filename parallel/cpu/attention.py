"""Attention over a packed row in plain torch, for machines without TransformerEngine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import functional

from parallel.batch import PackedRow, RankPlace, own_places

SMALLEST_GRID = 64  # sequences up to this long share one call; longer ones wait for their like


class PackedAttention(MegatronModule):
    """A replacement of Megatron's core attention by torch's scaled_dot_product_attention.

    Megatron's local DotProductAttention refuses packed rows and context parallelism, and builds the
    whole [batch, heads, length, length] score tensor.
    """

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *_: Any,
        packed_seq_params: PackedRow,
        **__: Any,
    ) -> Tensor:
        """Return causal attention within every sequence, [T / C, heads * value head_dim].

        query is [T / C, heads, head_dim]; key and value have the key-value heads.
        """
        row = packed_seq_params
        row.views = row.views or _grids(row, RankPlace.here(), query.device)
        grids, back = row.views
        if parallel_state.get_context_parallel_world_size() > 1:
            group = parallel_state.get_context_parallel_group()
            key, value = (
                gather_from_sequence_parallel_region(part.contiguous(), group=group)
                for part in (key, value)
            )
        mixed = [
            functional.scaled_dot_product_attention(
                query[grid.queries].transpose(1, 2),
                key[grid.keys].transpose(1, 2),
                value[grid.keys].transpose(1, 2),
                attn_mask=grid.sees,
                is_causal=grid.sees is None,
                scale=self.softmax_scale,
                enable_gqa=True,
            )
            for grid in grids
        ]
        flat = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in mixed])
        return flat[back].flatten(1)


@dataclass
class _Grid:
    """A batch of sequences of similar length, padded with the row's first token.

    keys int64 [S, L] into the gathered row; queries int64 [S, L / C] into this rank's; sees bool
    [S, 1, L / C, L], or None where that is simply causal.
    """

    queries: Tensor
    keys: Tensor
    sees: Tensor | None


def _grids(row: PackedRow, here: RankPlace, device: torch.device) -> tuple[list[_Grid], Tensor]:
    """Return the grids of a row, and the index of each local token in their flattened outputs."""
    starts, slots = row.starts[:-1], np.diff(row.starts)
    # Where a place of the row is after the gathering, which puts one rank's tokens after another's.
    places = [own_places(row.starts, replace(here, context_rank=r)) for r in range(here.context)]
    gathered = np.argsort(np.concatenate(places))
    own_starts = starts // here.context
    back = np.zeros(len(row.own), np.int64)
    grids, offset = [], 0
    widths = np.maximum(SMALLEST_GRID, 2 ** np.ceil(np.log2(slots)).astype(int))
    for width in np.unique(widths):
        chosen = np.flatnonzero(widths == width)
        length = int(slots[chosen].max())
        keys = _fill(starts[chosen], slots[chosen], length)
        own_slots, own_length = slots[chosen] // here.context, length // here.context
        queries = _fill(own_starts[chosen], own_slots, own_length)
        for line, index in enumerate(chosen):
            begin, count = own_starts[index], own_slots[line]
            back[begin : begin + count] = offset + line * own_length + np.arange(count)
        sees = None
        if here.context > 1:
            # What fills a line up sees the first token, since a softmax over nothing is NaN.
            position = np.maximum(row.own[queries] - starts[chosen][:, None], 0)
            sees = torch.from_numpy(np.arange(length) <= position[..., None])[:, None].to(device)
        own, others = (torch.from_numpy(each).to(device) for each in (queries, gathered[keys]))
        grids.append(_Grid(own, others, sees))
        offset += queries.size
    return grids, torch.from_numpy(back).to(device)


def _fill(starts: np.ndarray, counts: np.ndarray, width: int) -> np.ndarray:
    """Return [S, width]: each of `starts` counted up over `counts` tokens, then 0."""
    step = np.arange(width)
    return np.where(step < counts[:, None], starts[:, None] + step, 0)
