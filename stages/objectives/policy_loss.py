"""The loss of one micro-batch of responses: clipped surrogate plus the KL penalty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stages.objectives.aggregation import AGGREGATIONS, Totals, masked_sum, sequence_means
from stages.objectives.kl import KL_ESTIMATORS
from stages.objectives.ratios import RATIOS
from stages.objectives.settings import ObjectiveSettings
from stages.objectives.surrogate import Surrogate

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
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    totals: Totals,
    settings: ObjectiveSettings,
    reference_log_probs: Tensor | None = None,
    importance: Tensor | None = None,
) -> PolicyLoss:
    """The objective of `settings` over one micro-batch, normalised by the step's `totals`.

    All log-probabilities are of the sampled tokens, [B, T] in nats: of the policy (the only one
    with gradient), of the policy that sampled as the trainer recomputes it, and of the reference.
    `advantages` [B]; `mask` [B, T] bool is true on response tokens. `importance` [B] weighs the
    surrogate of samples that other weights drew (`stages.objectives.importance`), not the KL.
    Raises ValueError when the KL coefficient is not 0 and there is no reference.
    """
    aggregate = AGGREGATIONS[settings.aggregation]
    surrogate = RATIOS[settings.ratio.name](
        log_probs - old_log_probs, advantages, mask, settings.ratio
    )
    weighed = surrogate.loss if importance is None else surrogate.loss * importance.unsqueeze(-1)
    loss = aggregate(weighed, mask, totals)
    metrics = _policy_metrics(log_probs, surrogate, mask)
    if settings.kl.coefficient > 0:
        if reference_log_probs is None:
            raise ValueError(
                f"kl.coefficient is {settings.kl.coefficient} but no reference log-probabilities"
                " were given"
            )
        estimate = KL_ESTIMATORS[settings.kl.estimator]
        penalty = estimate(log_probs, reference_log_probs, old_log_probs)
        loss = loss + settings.kl.coefficient * aggregate(penalty, mask, totals)
        metrics["kl"] = MetricSum(masked_sum(penalty.detach(), mask), "tokens")
    return PolicyLoss(loss, metrics)


def _policy_metrics(log_probs: Tensor, surrogate: Surrogate, mask: Tensor) -> dict[str, MetricSum]:
    """Ratio and clip fraction, averaged within each response first, and the sampled entropy.

    So a sequence ratio counts once a response, and the two kinds of ratio read alike. The entropy
    is the mean of -log pi over the sampled tokens, which estimates it on-policy.
    """
    ratio = sequence_means(surrogate.ratio.detach(), mask)
    clipped = sequence_means(surrogate.clipped.to(log_probs.dtype), mask)
    return {
        "ratio": MetricSum(ratio.sum(), "sequences"),
        "clip_fraction": MetricSum(clipped.sum(), "sequences"),
        "entropy": MetricSum(masked_sum(-log_probs.detach(), mask), "tokens"),
    }
