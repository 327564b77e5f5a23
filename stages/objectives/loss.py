"""The loss of one micro-batch of responses: clipped surrogate, KL penalty, entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from stages.objectives.aggregation import AGGREGATIONS, Totals, masked_sum, sequence_means
from stages.objectives.correction import sequence_mask
from stages.objectives.kl import FULL, KL_ESTIMATORS
from stages.objectives.ratios import RATIOS
from stages.objectives.settings import KLSettings, ObjectiveSettings, RatioSettings
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


@dataclass(frozen=True)
class Tokens:
    """What is known of B responses of at most T tokens, [B, T] each where it says nothing else.

    Log-probabilities are of the sampled tokens, in nats: of the policy, with gradient; of the
    policy that sampled, as the trainer recomputes it (pi_old) and as the engine reported it (mu);
    and of the reference. `mask` is bool, true on response tokens; elsewhere all may be anything.

    `drawn_log_probs` are those of the policy that sampled a token, for the estimator `unbiased_k3`:
    pi_old's, but mu's where older weights sampled it. None is pi_old's everywhere.
    `weights` multiply the surrogate of what pi_old did not draw (`stages.objectives.correction`),
    and not the KL; `router_movement` lowers the ratio (`stages.objectives.router_shift`).
    `reference_kl` and `entropy`, over the whole vocabulary, have gradient.
    `length_weights` [B] multiply everything (`stages.objectives.length_weights`).
    """

    log_probs: Tensor
    old_log_probs: Tensor
    engine_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    drawn_log_probs: Tensor | None = None
    weights: Tensor | None = None
    router_movement: Tensor | None = None
    reference_log_probs: Tensor | None = None
    reference_kl: Tensor | None = None
    entropy: Tensor | None = None
    length_weights: Tensor | None = None

    def cleared(self) -> Tokens:
        """With 0 wherever the mask is false: else NaN times 0 would reach a gradient."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, values in given.items():
            if values is not None and name not in ("mask", "length_weights"):
                given[name] = values.masked_fill(~self.mask, 0.0)
        return Tokens(**given)


def policy_loss(
    tokens: Tokens, totals: Totals, settings: ObjectiveSettings, kl_coefficient: float
) -> PolicyLoss:
    """The objective of `settings` over one micro-batch, normalised by the step's `totals`.

    `kl_coefficient` is the one of this update, which settings only begin with. Raises ValueError
    when it is not 0 and there is no reference, or where anything else is missing that the settings
    ask for.
    """
    tokens = tokens.cleared()

    def aggregate(values: Tensor) -> Tensor:
        if tokens.length_weights is not None:
            values = values * tokens.length_weights.unsqueeze(-1)
        return AGGREGATIONS[settings.aggregation](values, tokens.mask, totals)

    surrogate = _surrogate(tokens, settings.ratio)
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


def _surrogate(tokens: Tokens, settings: RatioSettings) -> Surrogate:
    more = {}
    if settings.name == "rspo":
        if tokens.router_movement is None:
            raise ValueError("objective.ratio is rspo, but no movements of routers were given")
        more["movement"] = tokens.router_movement
    return RATIOS[settings.name](
        tokens.log_probs, tokens.old_log_probs, tokens.advantages, tokens.mask, settings, **more
    )


def _corrected(
    tokens: Tokens, values: Tensor, settings: ObjectiveSettings, metrics: dict[str, MetricSum]
) -> Tensor:
    """The surrogate as far as what drew the sample is near enough to the policy."""
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
        left_out = sequence_means((~kept).to(values.dtype), tokens.mask)
        metrics["masked_sequences"] = MetricSum(left_out.sum(), "sequences")
    return values


def _penalty(tokens: Tokens, settings: KLSettings) -> Tensor:
    if settings.estimator == FULL:
        return _needed(tokens.reference_kl, "kl.coefficient", "KL to the reference")
    reference = _needed(
        tokens.reference_log_probs, "kl.coefficient", "log-probabilities of the reference"
    )
    drawn = tokens.old_log_probs if tokens.drawn_log_probs is None else tokens.drawn_log_probs
    return KL_ESTIMATORS[settings.estimator](tokens.log_probs, reference, drawn)


def _needed(values: Tensor | None, setting: str, name: str) -> Tensor:
    if values is None:
        raise ValueError(f"objective.{setting} is above 0, but no {name} were given")
    return values


def _policy_metrics(tokens: Tokens, surrogate: Surrogate) -> dict[str, MetricSum]:
    """Ratio and clip fraction, averaged within each response first, and the sampled entropy.

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
