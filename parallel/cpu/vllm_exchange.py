"""The exchange of tokens between the members of a vLLM engine, which its CPU build lacks.

With data-parallel attention every layer's tokens are gathered before the experts and reduced after
them. vLLM 0.32 has both for GPUs; its communicator for CPUs inherits methods that raise
NotImplementedError. The members have different numbers of tokens, so gloo gathers them padded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def provide() -> None:
    """Give vLLM's CPU communicator both; call in a rank's process, before it loads a model."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _all_gatherv(
    self: Any, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
) -> Tensor | list[Tensor]:
    """Return every member's rows, one member after another; `sizes` are their numbers of rows."""
    assert dim == 0, "vLLM gathers tokens, which are rows"
    if isinstance(input_, list):
        return [_gathered(self, rows, sizes) for rows in input_]
    return _gathered(self, input_, sizes)


def _gathered(self: Any, rows: Tensor, sizes: list[int] | None) -> Tensor:
    counts = sizes or [len(rows)] * self.world_size
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    everyone = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(everyone, padded, group=self.device_group)
    return torch.cat(
        [member_rows[:count] for member_rows, count in zip(everyone, counts, strict=True)]
    )


def _reduce_scatterv(
    self: Any, input_: Tensor, dim: int = -1, sizes: list[int] | None = None
) -> Tensor:
    """Return this member's rows of the sum over all members."""
    assert dim == 0, "vLLM reduces tokens, which are rows"
    counts = sizes or [len(input_) // self.world_size] * self.world_size
    summed = input_.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=self.device_group)
    start = sum(counts[: self.rank_in_group])
    return summed[start : start + counts[self.rank_in_group]].clone()
