"""The output head of a bf16 model whose logits are not rounded (`model.head_precision: fp32`).

The operands stay bf16, whose products fp32 represents exactly; only their sums are no longer
rounded to bf16, of which the large logits of a likely token have two or three digits. vLLM's
`head_dtype: float32` computes the same. Source: MiniMax-M1, arXiv 2506.13585, which found the
rounded head to be the main cause of the training-inference mismatch.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor
from torch.autograd.function import once_differentiable


def head_logits(hidden: Tensor, weight: Tensor, precise: bool) -> Tensor:
    """Return hidden [n, H] times the head's weight [V, H], as [n, V]: fp32 if precise."""
    if not precise or hidden.dtype != torch.bfloat16:
        return hidden @ weight.T
    if hidden.device.type == "cuda":  # without a copy of the weight in fp32
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return hidden.float() @ weight.float().T


def keep_sums(head: Any) -> None:
    """Have megatron-core's output layer return fp32 logits."""

    def forward(
        hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Return the rank's logits for hidden [n, 1, H]; the signature is megatron-core's."""
        # As megatron-core's layer does, the gradient of its input is summed over the ranks.
        hidden = copy_to_tensor_model_parallel_region(hidden)
        return _PreciseHead.apply(hidden, head.weight if weight is None else weight), None

    head.forward = forward


class _PreciseHead(torch.autograd.Function):
    """The fp32 product of bf16 operands; torch's own has no derivative on every device.

    The gradient of the logits is rounded to bf16 before its two products, as that of bf16 logits.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        rows = head_logits(hidden.flatten(0, -2), weight, precise=True)
        return rows.view(*hidden.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        rows = upstream.flatten(0, -2).to(hidden.dtype)
        to_hidden = (rows @ weight).view(hidden.shape)
        return to_hidden, rows.T @ hidden.flatten(0, -2)
