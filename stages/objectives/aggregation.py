"""From a loss per token to one number, normalised once by a global count (section 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Totals:
    """What one optimizer step trains on, over all data-parallel ranks and micro-batches.

    The caller reduces them across ranks before the first backward pass. Summed over ranks and
    micro-batches, the aggregates below are then the mean over the whole step, however the step
    was cut. `sequences` counts the responses, `tokens` their learned tokens, `learned` the
    responses that have any, which metrics are means of; `longest` is the number of tokens that a
    response may have at most, which only `constant` reads.
    """

    sequences: float
    tokens: float
    longest: float = 1.0
    learned: float | None = None


def sequence_mean(values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Mean over responses of each one's mean over tokens (GRPO, GSPO).

    `values` [B, T], `mask` [B, T] bool; returns this shard's share, a scalar. A response without
    tokens adds 0.
    """
    return sequence_means(values, mask).sum() / max(totals.sequences, 1)


def token_mean(values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Mean over tokens, so that long responses weigh more (DAPO, arXiv 2503.14476).

    `values` [B, T], `mask` [B, T] bool; returns this shard's share, a scalar.
    """
    return masked_sum(values, mask) / max(totals.tokens, 1)


def constant(values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Mean over responses of each one's sum over the longest length (Dr. GRPO, arXiv 2503.20783).

    So every token weighs the same, in every step. `values` [B, T], `mask` [B, T] bool; returns this
    shard's share, a scalar.
    """
    return masked_sum(values, mask) / (max(totals.sequences, 1) * totals.longest)


def sequence_means(values: Tensor, mask: Tensor) -> Tensor:
    """The mean [B] of each response's unmasked `values` [B, T]; 0 for one without tokens."""
    return values.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """The sum, a scalar, of `values` where `mask`; what is masked may be anything, even NaN."""
    return values.masked_fill(~mask, 0.0).sum()


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, Totals], Tensor]] = {
    "sequence_mean": sequence_mean,
    "token_mean": token_mean,
    "constant": constant,
    "lambda": token_mean,  # of what `stages.objectives.length_weights` weighed
}
