"""The objective of a policy: its settings, and its loss of one micro-batch of responses.

The loss is the surrogate, weighted and masked off-policy, plus the KL penalty, less the entropy
bonus, each aggregated alike: from a loss per token to one number, normalised once by a global
count. Importing this module registers every algorithm. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from parallel.settings import Settings
from stages.objectives import advantages, preference, ratios  # noqa: F401  they register
from stages.objectives.advantages.grpo import GrpoAdvantageSettings
from stages.objectives.kl import KLSettings
from stages.objectives.ratios.sequence import SequenceRatioSettings
from stages.objectives.registry import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    METHODS,
    PREFERENCES,
    RATIOS,
    WEIGHT_METHODS,
    AboveZero,
    AdvantageBase,
    Registry,
    aggregation,
    import_modules,
)
from stages.objectives.surrogate import (
    CorrectionSettings,
    RatioBase,
    SequenceMaskSettings,
    Surrogate,
    TisSettings,
    Tokens,
    masked_sum,
    sequence_mask,
    sequence_means,
)

for _package in (advantages, ratios):  # one file each, which registers itself
    import_modules(_package.__name__, _package.__path__)

# The type checker knows the base classes: the unions depend on the files in the packages.
if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    AdvantageSettings = AdvantageBase
    RatioSettings = RatioBase
else:
    AdvantageSettings = ADVANTAGES.settings_union(default="grpo")
    RatioSettings = RATIOS.settings_union(default="sequence")

REGISTRIES: tuple[Registry, ...] = (
    *(ADVANTAGES, RATIOS, AGGREGATIONS, KL_ESTIMATORS, CORRECTIONS),
    *(PREFERENCES, METHODS, WEIGHT_METHODS),  # their kinds import the methods
)


class ObjectiveSettings(Settings):
    """The objective of a policy: advantages, loss and penalties."""

    advantage: AdvantageSettings = GrpoAdvantageSettings()
    scaling: Literal["none", "edge"] = Field(
        default="none", description="edge: divide advantages by the response's relative entropy"
    )
    ratio: RatioSettings = SequenceRatioSettings()
    aggregation: Literal["sequence_mean", "token_mean", "constant", "lambda"] = Field(
        default="sequence_mean", description="mean of the tokens' losses"
    )
    lambda_learning_rate: AboveZero = Field(
        default=0.1, description="of the exponent that the aggregation `lambda` learns"
    )
    kl: KLSettings = KLSettings()
    entropy_bonus: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="coefficient of the entropy, over the ids that a token is sampled from",
    )
    mask_truncated: bool = Field(
        default=False,
        description="train on no token of truncated responses, which still count in the baseline of"
        " their group (DAPO's overlong filtering)",
    )
    correction: CorrectionSettings = TisSettings()
    sequence_mask: SequenceMaskSettings = SequenceMaskSettings()

    @property
    def needs_entropies(self) -> bool:
        """True where the entropies of pi_old are read, which cost a forward pass."""
        return self.scaling == "edge"

    @property
    def learns_length_weights(self) -> bool:
        """True where responses are weighted by a learned power of their length."""
        return self.aggregation == "lambda"

    def violations(self, group_size: int) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, message) for each contradiction between these settings."""
        for block in ("advantage", "kl", "ratio", "correction"):
            for key, message in getattr(self, block).violations(group_size):
                yield f"{block}.{key}", message
        if self.advantage.per_token and self.ratio.per_response:
            yield (
                "ratio.name",
                f"{self.ratio.name} gives all tokens of a response one gradient, which undoes the"
                f" advantage {self.advantage.name} of each; use token, sequence_token or cispo",
            )
        elif self.correction.by_token and not self.ratio.corrected_by_token:
            yield (
                "correction.level",
                f"token has no meaning under ratio {self.ratio.name}, which is defined for whole"
                " responses; use sequence, or another ratio such as sequence_token",
            )


@dataclass(frozen=True)
class Totals:
    """The counts of one optimizer step, over all data-parallel ranks and micro-batches.

    The caller reduces them across ranks before the first backward pass: summed over ranks and
    micro-batches, the aggregates are then the mean over the whole step, however it was cut.
    `sequences` counts the responses, `tokens` their learned tokens, `learned` the responses that
    have any, which metrics are means of; `longest`, the maximum number of tokens of a response,
    is read by `constant` alone.

    Example: an update on responses of 5, 3 and 0 learned tokens, of at most 8:
        Totals(sequences=3, tokens=8, longest=8, learned=2): `sequence_mean` divides by 3,
        `token_mean` by 8, `constant` by 3 x 8, and a metric of responses by 2.
    """

    sequences: float
    tokens: float
    longest: float = 1.0
    learned: float | None = None

    @classmethod
    def together(cls, totals: Collection[Totals]) -> Totals:
        """Return the counts of all `totals`, which count responses of one longest length."""
        return cls(
            sum(domain_totals.sequences for domain_totals in totals),
            sum(domain_totals.tokens for domain_totals in totals),
            max(domain_totals.longest for domain_totals in totals),
            sum(
                domain_totals.sequences if domain_totals.learned is None else domain_totals.learned
                for domain_totals in totals
            ),
        )


# Each aggregation takes `values` [B, T] and `mask` [B, T] bool, and returns this shard's share of
# the step's number, a scalar.


@aggregation("sequence_mean", "GRPO, arXiv 2402.03300; GSPO, 2507.18071")
def sequence_mean(
    values: Float[Tensor, "responses tokens"],
    mask: Bool[Tensor, "responses tokens"],
    totals: Totals,
) -> Float[Tensor, ""]:
    """Return the mean over responses of each one's mean over tokens; 0 for one without tokens."""
    return sequence_means(values, mask).sum() / max(totals.sequences, 1)


@aggregation("token_mean", "DAPO, arXiv 2503.14476")
def token_mean(
    values: Float[Tensor, "responses tokens"],
    mask: Bool[Tensor, "responses tokens"],
    totals: Totals,
) -> Float[Tensor, ""]:
    """Return the mean over tokens, so that long responses weigh more."""
    return masked_sum(values, mask) / max(totals.tokens, 1)


@aggregation("constant", "Dr. GRPO, arXiv 2503.20783")
def constant(
    values: Float[Tensor, "responses tokens"],
    mask: Bool[Tensor, "responses tokens"],
    totals: Totals,
) -> Float[Tensor, ""]:
    """Return the sum over (responses x longest length), so that every token weighs the same."""
    return masked_sum(values, mask) / (max(totals.sequences, 1) * totals.longest)


@aggregation("lambda", "Lambda-GRPO, arXiv 2510.06870")
def weighted_token_mean(
    values: Float[Tensor, "responses tokens"],
    mask: Bool[Tensor, "responses tokens"],
    totals: Totals,
) -> Float[Tensor, ""]:
    """Return the mean over tokens, which `LengthWeights` has weighted by length."""
    return token_mean(values, mask, totals)


@dataclass(frozen=True)
class MetricSum:
    """A detached scalar sum over one shard, and the count of the whole step that divides it."""

    total: Float[Tensor, ""]
    denominator: Literal["sequences", "tokens"]


@dataclass(frozen=True)
class PolicyLoss:
    """One shard's share of the step's loss, a scalar to call backward on, and its metrics.

    `kl` [B, T] is the penalty of every token, without gradient; None without a coefficient.
    """

    loss: Float[Tensor, ""]
    metrics: dict[str, MetricSum]
    kl: Float[Tensor, "responses tokens"] | None = None


def policy_loss(
    tokens: Tokens, totals: Totals, settings: ObjectiveSettings, kl_coefficient: float
) -> PolicyLoss:
    """Return the loss of one micro-batch, normalised by the step's `totals`.

    `kl_coefficient` is that of this update; the settings have only its initial value. The metrics
    `ratio` and `clip_fraction` are averaged within each response first, so that a sequence ratio
    counts once a response and the two kinds of ratio read alike. `entropy` is the mean of -log pi
    over the sampled tokens, which estimates it on-policy.

    Raises:
        ValueError: the settings need an input that `tokens` lacks.

    Example: responses of 2 tokens and 1, on-policy, with advantages 1.5 and -0.5:
        >>> import torch
        >>> logprobs = torch.tensor([[-0.5, -1.0], [-2.0, 0.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> advantages = mask * torch.tensor([[1.5], [-0.5]])
        >>> tokens = Tokens(logprobs, logprobs, logprobs, advantages, mask)
        >>> result = policy_loss(tokens, Totals(2, tokens=3), ObjectiveSettings(), 0.0)
        >>> result.loss, result.metrics["entropy"].total  # (-1.5 + 0.5) / 2; 3.5 nats over 3 tokens
        (tensor(-0.5000), tensor(3.5000))
    """
    # First of all: whatever is computed of a NaN at a masked token has a NaN gradient.
    tokens = tokens.cleared()
    mask = tokens.mask

    def aggregate(values: Float[Tensor, "responses tokens"]) -> Float[Tensor, ""]:
        if tokens.length_weights is not None:
            values = values * tokens.length_weights.unsqueeze(-1)
        return AGGREGATIONS[settings.aggregation].function(values, mask, totals)

    def per_token(values: Float[Tensor, "responses tokens"]) -> MetricSum:
        return MetricSum(masked_sum(values.detach(), mask), "tokens")

    def per_response(values: Float[Tensor, "responses tokens"]) -> MetricSum:
        return MetricSum(sequence_means(values.detach(), mask).sum(), "sequences")

    if settings.ratio.needs_router_shift:
        _require(tokens.router_movement, f"ratio is {settings.ratio.name}", "router movements")
    surrogate: Surrogate = RATIOS[settings.ratio.name].function(tokens.weighted(), settings.ratio)
    metrics = {
        "ratio": per_response(surrogate.ratio),
        "clip_fraction": per_response(surrogate.clipped.to(surrogate.ratio.dtype)),
        "entropy": per_token(-tokens.logprobs),
    }
    if tokens.router_movement is not None:
        metrics["router_movement"] = per_token(tokens.router_movement)
    values = surrogate.loss
    if tokens.weights is not None:
        # Only the value: `weighted` has seen to the gradient. A weight of 1 changes no bit.
        values = (values * tokens.weights).detach() + (values - values.detach())
        metrics["correction"] = per_response(tokens.weights)
    if settings.sequence_mask.enabled:
        keep_mask = sequence_mask(tokens, settings.sequence_mask)
        values = values * keep_mask
        metrics["masked_sequences"] = per_response((~keep_mask).to(values.dtype))
    loss, kl = aggregate(values), None
    if kl_coefficient > 0:
        penalty = _penalty(tokens, settings.kl)
        loss = loss + kl_coefficient * aggregate(penalty)
        metrics["kl"], kl = per_token(penalty), penalty.detach()
    if settings.entropy_bonus > 0:
        entropy = _require(tokens.entropy, "entropy_bonus is above 0", "entropies")
        loss = loss - settings.entropy_bonus * aggregate(entropy)
        metrics["full_entropy"] = per_token(entropy)
    return PolicyLoss(loss, metrics, kl)


def _penalty(tokens: Tokens, settings: KLSettings) -> Float[Tensor, "responses tokens"]:
    why = "kl.coefficient is above 0"
    if settings.needs_logits:
        return _require(tokens.reference_kl, why, "KL to the reference")
    reference = _require(tokens.reference_logprobs, why, "log-probabilities of the reference")
    sampling = tokens.sampling_logprobs
    sampling = tokens.old_logprobs if sampling is None else sampling
    return KL_ESTIMATORS[settings.estimator].function(tokens.logprobs, reference, sampling)


def _require(values: Tensor | None, setting: str, name: str) -> Tensor:
    if values is None:
        raise ValueError(f"objective.{setting}, but no {name} were given")
    return values
