"""How far the routers have moved from what they said of the same tokens before (RSPO, arXiv
2510.23027 v2; section 6 of the algorithms)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state

if TYPE_CHECKING:
    from parallel.batch import MicroBatch
    from parallel.model.routing import Router

SMALLEST = 1e-30  # of a probability whose logarithm is taken


class RouterMemory:
    """Watches the routers of one policy in passes without gradients.

    A pass that remembers leaves with its row, of every layer that this rank holds, the experts that
    were chosen and their log-probabilities, [tokens, K] each; one that compares sums up how far
    those are from today's.
    """

    def __init__(self, routers: list[Router], layers: int) -> None:
        """`layers` is the number of all layers that route, wherever they are."""
        self._layers = layers
        self._task: Literal["remember", "compare"] | None = None
        for router in routers:
            router.memory = self

    @contextmanager
    def during(self, task: Literal["remember", "compare"]) -> Iterator[None]:
        """Do so in the passes within."""
        self._task = task
        try:
            yield
        finally:
            self._task = None

    def see(self, router: Router, scores: torch.Tensor, chosen: torch.Tensor) -> None:
        """Of one layer's pass over a row: what it gave every expert, and bool which it chose,
        [tokens, experts] of this rank's tokens."""
        row = router.row
        if self._task is None or row is None:
            return
        log_probs = scores.clamp(min=SMALLEST).log()
        if self._task == "remember":
            experts = chosen.int().topk(router.topk).indices
            row.remembered[router.place] = (experts, log_probs.gather(1, experts))
        else:
            experts, before = row.remembered[router.place]
            moved = (log_probs.gather(1, experts) - before).abs().mean(1)
            row.moved = moved if row.moved is None else row.moved + moved

    def movement(self, batch: MicroBatch) -> torch.Tensor:
        """The mean over layers and chosen experts of |log p - log p before|, in nats, of every
        token that this context-parallel rank holds: [T / C]. Of the last pass that compared.
        Collective."""
        row = batch.row
        tensor = parallel_state.get_tensor_model_parallel_group()
        moved, row.moved = row.moved, None
        if moved is None:  # a pipeline rank without routers
            moved = torch.zeros(len(row.real) // tensor.size(), device=row.real.device)
        if tensor.size() > 1:  # sequence parallelism gave each of its ranks a part of the tokens
            whole = moved.new_empty(len(row.real))
            dist.all_gather_into_tensor(whole, moved.contiguous(), group=tensor)
            moved = whole
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            dist.all_reduce(moved, group=parallel_state.get_pipeline_model_parallel_group())
        return moved / self._layers
