"""Attention over packed rows in plain torch, for machines without TransformerEngine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch.nn import functional


class PackedPositions:
    """Rotary angles that count from 0 in every sequence of a row.

    Megatron's count through the row. Only differences of positions reach the scores, but angles
    that are rounded elsewhere than the engine's cost a digit of agreement with it.
    """

    def __init__(self, rotary: torch.nn.Module) -> None:
        self.positions: torch.Tensor | None = None
        rotary.register_forward_hook(self._select)

    def _select(self, _module: object, _arguments: object, angles: torch.Tensor) -> torch.Tensor:
        """[W, 1, 1, dimension] of a row's positions give [W, rows, 1, dimension]."""
        assert self.positions is not None
        return angles[:, 0][self.positions.T]


class PackedAttention(MegatronModule):
    """torch's scaled_dot_product_attention in the place of Megatron's core attention.

    Megatron's local DotProductAttention refuses packed sequences and builds the whole
    [batch, heads, length, length] score tensor.
    """

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """query [length, rows, heads, head_dim], key and value with the key-value heads.

        `attention` is bool [rows, 1, length, length], true where a token may look.
        Returns [length, rows, heads * head_dim].
        """
        mixed = functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=attention,
            scale=self.softmax_scale,
            enable_gqa=True,
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)
