"""Aggregations of a loss per token to one number, normalised once by a global count (section 2).

Each takes `values` [B, T] and `mask` [B, T] bool, and returns this shard's share, a scalar. Never
imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.objectives.registry import aggregation

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Totals:
    """The counts of one optimizer step, over all data-parallel ranks and micro-batches.

    The caller reduces them across ranks before the first backward pass: summed over ranks and
    micro-batches, the aggregates are then the mean over the whole step, however it was cut.
    `sequences` counts the responses, `tokens` their learned tokens, `learned` the responses that
    have any, which metrics are means of; `longest`, the maximum number of tokens of a response,
    is read by `constant` alone.
    """

    sequences: float
    tokens: float
    longest: float = 1.0
    learned: float | None = None


@aggregation("sequence_mean", "GRPO, arXiv 2402.03300; GSPO, 2507.18071")
def sequence_mean(values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Return the mean over responses of each one's mean over tokens; 0 for one without tokens."""
    return sequence_means(values, mask).sum() / max(totals.sequences, 1)


@aggregation("token_mean", "DAPO, arXiv 2503.14476")
def token_mean(values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Return the mean over tokens, so that long responses weigh more."""
    return masked_sum(values, mask) / max(totals.tokens, 1)


@aggregation("constant", "Dr. GRPO, arXiv 2503.20783")
def constant(values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Return the sum over (responses x longest length), so that every token weighs the same."""
    return masked_sum(values, mask) / (max(totals.sequences, 1) * totals.longest)


@aggregation("lambda", "Lambda-GRPO, arXiv 2510.06870")
def weighted_token_mean(values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Return the mean over tokens, which `LengthWeights` has weighted by length."""
    return token_mean(values, mask, totals)


def sequence_means(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean [B] of each response's unmasked `values` [B, T]; 0 for one without tokens."""
    return values.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum, a scalar, of `values` where `mask`; elsewhere they may even be NaN."""
    return values.masked_fill(~mask, 0.0).sum()
