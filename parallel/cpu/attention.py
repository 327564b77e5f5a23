"""Attention over a packed row in plain torch, where TransformerEngine is absent or cannot.

It cannot take attention sinks everywhere (`parallel.machine.capabilities.fuses_sinks`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.nn import functional

from parallel.packed_row import PackedRow, RankPlace, local_positions

SMALLEST_GRID = 64  # sequences up to this long share one call; longer ones wait for their like


class PackedAttention(MegatronModule):
    """A replacement of Megatron's core attention by torch's scaled_dot_product_attention.

    Megatron's local DotProductAttention refuses packed rows and context parallelism, and builds the
    whole [batch, heads, length, length] score tensor.

    With `config.softmax_type` "learnable" every head has a sink, `softmax_offset`: a score that is
    added to the softmax's denominator. A layer may see only a window of tokens (`window_size`).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *_: Any,
        softmax_scale: float | None = None,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window = config.window_size[0] + 1 if windowed else None
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            empty = torch.empty(heads, dtype=config.params_dtype)
            self.softmax_offset = torch.nn.Parameter(empty)

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
        grids, back = sequence_grids(packed_seq_params, query.device)
        if parallel_state.get_context_parallel_world_size() > 1:
            group = parallel_state.get_context_parallel_group()
            key, value = (
                gather_from_sequence_parallel_region(tensor.contiguous(), group=group)
                for tensor in (key, value)
            )
        mixed = [
            self._mix(
                query[grid.queries].transpose(1, 2),
                key[grid.keys].transpose(1, 2),
                value[grid.keys].transpose(1, 2),
                grid.sees(self.window),
            )
            for grid in grids
        ]
        flat = torch.cat([output.transpose(1, 2).flatten(0, 1) for output in mixed])
        return flat[back].flatten(1)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, sees: Tensor | None) -> Tensor:
        """Return the attention of lines, [S, heads, L / C, value head_dim]; all have that order."""
        scale = query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        causal, width = sees is None, value.shape[-1]
        if self.softmax_offset is not None:
            query, key, value = _with_sinks(query, key, value, self.softmax_offset, scale)
            if sees is not None:
                sees = functional.pad(sees, (1, 0), value=True)
            else:  # the line of scores that sees the sink alone keeps the others causal
                query = functional.pad(query, (0, 0, 1, 0))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=sees, is_causal=causal, scale=scale, enable_gqa=True
        )
        if self.softmax_offset is None:
            return mixed
        return mixed[:, :, 1 if causal else 0 :, :width]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return megatron-core's description of the sinks, which tensor parallelism splits."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Prepend a token whose score is the head's sink and whose value is 0.

    The scores of a key differ between the query heads that share it, so each of them has one more
    element: 1 / scale in the head's queries, and its sink in the added key alone.
    """
    groups = key.shape[1]
    share = query.shape[1] // groups
    selectors = torch.eye(share, dtype=query.dtype, device=query.device).repeat(groups, 1) / scale
    query = torch.cat([query, selectors[:, None].expand(*query.shape[:3], share)], -1)
    key, value = (functional.pad(tensor, (0, share)) for tensor in (key, value))
    added = functional.pad(sinks.to(key.dtype).view(groups, 1, share), (key.shape[-1] - share, 0))
    key = torch.cat([added.expand(len(key), *added.shape), key], 2)
    return query, key, functional.pad(value, (0, 0, 1, 0))


@dataclass
class SequenceGrid:
    """A batch of sequences of similar length, padded with the row's first token.

    keys int64 [S, L] into the gathered row; queries int64 [S, L / C] into this rank's; places int64
    [S, L / C], the positions of the queries in their sequences. `split` is true where
    context-parallel ranks share the queries, so that these are fewer than the keys.
    """

    queries: Tensor
    keys: Tensor
    places: Tensor
    split: bool
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def sees(self, window: int | None) -> Tensor | None:
        """Return which keys a query sees, bool [S, 1, L / C, L], or None where simply causal.

        With a `window` it sees the last `window` tokens, its own included.
        """
        length = self.keys.shape[1]
        if window is not None and length <= window:
            window = None
        if window is None and not self.split:
            return None
        if window not in self.masks:
            step, place = torch.arange(length, device=self.places.device), self.places[..., None]
            seen = step <= place
            if window is not None:
                seen &= step > place - window
            self.masks[window] = seen[:, None]
        return self.masks[window]


def sequence_grids(row: PackedRow, device: torch.device) -> tuple[list[SequenceGrid], Tensor]:
    """Return the grids of a row, and the index of each local token in their flattened outputs.

    They are computed once, for the first layer.
    """
    row.views = row.views or _grids(row, RankPlace.here(), device)
    return row.views


def _grids(
    row: PackedRow, here: RankPlace, device: torch.device
) -> tuple[list[SequenceGrid], Tensor]:
    starts, slots = row.starts[:-1], np.diff(row.starts)
    # Where a place of the row is after the gathering, which puts one rank's tokens after another's.
    places = [
        local_positions(row.starts, replace(here, context_rank=r)) for r in range(here.context)
    ]
    gathered = np.argsort(np.concatenate(places))
    own_starts = starts // here.context
    back = np.zeros(len(row.local_positions), np.int64)
    grids, offset = [], 0
    widths = np.maximum(SMALLEST_GRID, 2 ** np.ceil(np.log2(slots)).astype(int))
    for width in np.unique(widths):
        sequences = np.flatnonzero(widths == width)
        length = int(slots[sequences].max())
        keys = _fill(starts[sequences], slots[sequences], length)
        own_slots, own_length = slots[sequences] // here.context, length // here.context
        queries = _fill(own_starts[sequences], own_slots, own_length)
        for line, index in enumerate(sequences):
            begin, count = own_starts[index], own_slots[line]
            back[begin : begin + count] = offset + line * own_length + np.arange(count)
        # What fills a line up sees the first token, since a softmax over nothing is NaN.
        places = np.clip(row.local_positions[queries] - starts[sequences][:, None], 0, length - 1)
        query_index, key_index, positions = (
            torch.from_numpy(array).to(device) for array in (queries, gathered[keys], places)
        )
        grids.append(SequenceGrid(query_index, key_index, positions, here.context > 1))
        offset += queries.size
    return grids, torch.from_numpy(back).to(device)


def _fill(starts: np.ndarray, counts: np.ndarray, width: int) -> np.ndarray:
    """Return [S, width]: each of `starts` counted up over `counts` tokens, then 0."""
    step = np.arange(width)
    return np.where(step < counts[:, None], starts[:, None] + step, 0)
