"""Causal core attention in plain torch, for machines without TransformerEngine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch.nn import functional


class CausalAttention(MegatronModule):
    """torch's scaled_dot_product_attention in the place of Megatron's core attention.

    Padding stands on the right of every sequence, so the causal mask alone keeps a real token from
    seeing it, and no mask tensor is needed. Megatron's local DotProductAttention would build a
    [batch, heads, length, length] score tensor instead.
    """

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """query [length, batch, heads, head_dim], key and value with the key-value heads.

        Returns [length, batch, heads * head_dim].
        """
        mixed = functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=True,
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)
