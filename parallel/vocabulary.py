"""Log-probabilities from logits whose vocabulary is split over the tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region


def log_softmax(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Normalise over the whole vocabulary.

    logits [..., vocabulary / TP]; returns log-probabilities of the same shape in fp32, each rank
    holding those of its own part of the vocabulary.
    """
    scaled = logits.float() / temperature
    largest = scaled.detach().amax(-1, keepdim=True)
    group = parallel_state.get_tensor_model_parallel_group()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shifted = scaled - largest
    total = reduce_from_tensor_model_parallel_region(shifted.exp().sum(-1, keepdim=True))
    return shifted - total.log()


def gather_targets(log_probabilities: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Pick the targets' entries: [..., vocabulary / TP] and int64 [...] give fp32 [...]."""
    size = log_probabilities.shape[-1]
    first = parallel_state.get_tensor_model_parallel_rank() * size
    mine = (targets >= first) & (targets < first + size)
    index = (targets - first).clamp(0, size - 1)
    picked = log_probabilities.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return reduce_from_tensor_model_parallel_region(picked * mine)


def sum_vocabulary(values: torch.Tensor) -> torch.Tensor:
    """Sum [..., vocabulary / TP] over the whole vocabulary, giving [...]."""
    return reduce_from_tensor_model_parallel_region(values.sum(-1))
