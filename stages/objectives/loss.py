"""The loss of one micro-batch of responses: clipped surrogate, KL penalty, entropy bonus.

Never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stages.objectives.aggregation import Totals, masked_sum, sequence_means
from stages.objectives.correction import sequence_mask
from stages.objectives.kl import KLSettings
from stages.objectives.registry import AGGREGATIONS, KL_ESTIMATORS, RATIOS
from stages.objectives.settings import ObjectiveSettings
from stages.objectives.surrogate import Surrogate, Tokens

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MetricSum:
    """A detached scalar sum over one shard, and the count of the whole step that divides it."""

    total: Tensor
    denominator: Literal["sequences", "tokens"]


@dataclass(frozen=True)
class PolicyLoss:
    """One shard's share of the step's loss, a scalar to call backward on, and its metrics."""

    loss: Tensor
    metrics: dict[str, MetricSum]


def policy_loss(
    tokens: Tokens, totals: Totals, settings: ObjectiveSettings, kl_coefficient: float
) -> PolicyLoss:
    """Return the loss of one micro-batch, normalised by the step's `totals`.

    `kl_coefficient` is that of this update; the settings have only its initial value.

    Raises:
        ValueError: the settings need an input that `tokens` lacks.
    """
    tokens = tokens.cleared()

    def aggregate(values: Tensor) -> Tensor:
        if tokens.length_weights is not None:
            values = values * tokens.length_weights.unsqueeze(-1)
        total: Tensor = AGGREGATIONS[settings.aggregation](values, tokens.mask, totals)
        return total

    if settings.ratio.needs_router_shift and tokens.router_movement is None:
        raise ValueError(
            f"objective.ratio is {settings.ratio.name}, but no router movements were given"
        )
    surrogate: Surrogate = RATIOS[settings.ratio.name](tokens, settings.ratio)
    metrics = _policy_metrics(tokens, surrogate)
    if tokens.router_movement is not None:
        moved = masked_sum(tokens.router_movement, tokens.mask)
        metrics["router_movement"] = MetricSum(moved, "tokens")
    loss = aggregate(_corrected(tokens, surrogate.loss, settings, metrics))
    if kl_coefficient > 0:
        penalty = _penalty(tokens, settings.kl)
        loss = loss + kl_coefficient * aggregate(penalty)
        metrics["kl"] = MetricSum(masked_sum(penalty.detach(), tokens.mask), "tokens")
    if settings.entropy_bonus > 0:
        entropy = _needed(tokens.entropy, "entropy_bonus", "entropies")
        loss = loss - settings.entropy_bonus * aggregate(entropy)
        metrics["full_entropy"] = MetricSum(masked_sum(entropy.detach(), tokens.mask), "tokens")
    return PolicyLoss(loss, metrics)


def _corrected(
    tokens: Tokens, values: Tensor, settings: ObjectiveSettings, metrics: dict[str, MetricSum]
) -> Tensor:
    """Return the surrogate times the correction's weights and the sequence mask."""
    if tokens.weights is not None:
        values = values * tokens.weights
        means = sequence_means(tokens.weights, tokens.mask)
        metrics["correction"] = MetricSum(means.sum(), "sequences")
    if settings.sequence_mask.enabled:
        kept = sequence_mask(
            tokens.log_probs,
            tokens.engine_log_probs,
            tokens.advantages,
            tokens.mask,
            settings.sequence_mask,
        )
        values = values * kept
        dropped = sequence_means((~kept).to(values.dtype), tokens.mask)
        metrics["masked_sequences"] = MetricSum(dropped.sum(), "sequences")
    return values


def _penalty(tokens: Tokens, settings: KLSettings) -> Tensor:
    if settings.needs_logits:
        return _needed(tokens.reference_kl, "kl.coefficient", "KL to the reference")
    reference = _needed(
        tokens.reference_log_probs, "kl.coefficient", "log-probabilities of the reference"
    )
    drawn = tokens.old_log_probs if tokens.drawn_log_probs is None else tokens.drawn_log_probs
    penalty: Tensor = KL_ESTIMATORS[settings.estimator](tokens.log_probs, reference, drawn)
    return penalty


def _needed(values: Tensor | None, setting: str, name: str) -> Tensor:
    if values is None:
        raise ValueError(f"objective.{setting} is above 0, but no {name} were given")
    return values


def _policy_metrics(tokens: Tokens, surrogate: Surrogate) -> dict[str, MetricSum]:
    """Return ratio and clip fraction, averaged within each response first, and sampled entropy.

    So a sequence ratio counts once a response, and the two kinds of ratio read alike. The entropy
    is the mean of -log pi over the sampled tokens, which estimates it on-policy.
    """
    ratio = sequence_means(surrogate.ratio.detach(), tokens.mask)
    clipped = sequence_means(surrogate.clipped.to(ratio.dtype), tokens.mask)
    return {
        "ratio": MetricSum(ratio.sum(), "sequences"),
        "clip_fraction": MetricSum(clipped.sum(), "sequences"),
        "entropy": MetricSum(masked_sum(-tokens.log_probs.detach(), tokens.mask), "tokens"),
    }
