"""Micro-batches of a teacher that reads other prompts than the student, with equal responses."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from parallel.batch import MicroBatch, RankPlace, collate


def with_teacher_prompts(batch: MicroBatch) -> MicroBatch:
    """Return the batch as its teacher reads it, which routes by itself.

    It has the samples of `batch` in their order, and so the same responses and masks. A sample
    without a prompt for the teacher keeps its own.
    """
    samples = [
        sample
        if sample.teacher_prompt is None
        else replace(sample, prompt=sample.teacher_prompt, teacher_prompt=None)
        for sample in batch.samples
    ]
    return replace(collate(samples, RankPlace.here(), replay=False), domain=batch.domain)


def aligned(hidden: Tensor, theirs: MicroBatch, ours: MicroBatch) -> Tensor:
    """Return hidden states [n, H] at the response tokens of `ours` that this rank predicts.

    hidden [m, H] are at those that it predicts of `theirs`. Context parallelism cuts sequences by
    their length: with another prompt, another rank may predict a token. Each token is predicted by
    one rank, so that the sum over ranks is exact. Collective over the context-parallel ranks.
    """
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return hidden  # in both the tokens are in the order of the samples
    whole = hidden.new_zeros(ours.mask.numel(), hidden.shape[1])
    whole[theirs.place] = hidden
    dist.all_reduce(whole, group=group)
    return whole[ours.place]
