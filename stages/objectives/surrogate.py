"""A ratio's tokens and surrogate, PPO's clip (arXiv 1707.06347), and the off-policy corrections.

A correction weighs the surrogate of tokens that pi_old did not sample: the engine or older weights
did. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from parallel.settings import Settings
from stages.objectives.registry import CORRECTIONS, AboveZero, AlgorithmSettings, correction

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

# The ratio is clipped to 1 - clip_low, which must not be below 0.
BelowOne = Annotated[float, Field(gt=0, le=1)]


class RatioBase(AlgorithmSettings):
    """The base of a ratio's settings; the class variables say what it needs.

    `per_response`: all tokens of a response get one gradient. `corrected_by_token`: a correction
    may weigh its tokens one by one. `needs_router_shift`: it reads `Tokens.router_movement`, which
    costs a forward pass an update.
    """

    per_response: ClassVar[bool] = False
    corrected_by_token: ClassVar[bool] = True
    needs_router_shift: ClassVar[bool] = False


class Clipped(RatioBase):
    """A ratio with PPO's clip, and a second bound where the advantage is negative."""

    if TYPE_CHECKING:
        clip_low: float
        clip_high: float

    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        default=None,
        description="upper bound of the ratio where the advantage is negative, such as 3; null: no"
        " bound",
    )


@dataclass(frozen=True)
class Tokens:
    """The inputs of the loss of B responses of at most T tokens, each [B, T] unless it says more.

    Log-probabilities are of the sampled tokens, in nats: of the policy, with gradient; of the
    policy that sampled, as the trainer recomputes it (pi_old) and as the engine reported it (mu);
    and of the reference. `mask` is bool, true on response tokens; elsewhere any value may stand.

    `sampling_logprobs`, for the estimator `unbiased_k3`: pi_old's, but mu's where older weights
    sampled a token; None means pi_old's everywhere.
    `weights`, of a correction, multiply each token's loss and its gradient, and not the KL.
    `router_movement`: mean |log p - log p_old| in nats, over layers and the experts that the old
    router chose.
    `reference_kl` and `entropy`, over the ids that each token was sampled from, have gradient.
    `length_weights` [B], of the aggregation `lambda`, multiply everything.

    Example: responses of 2 tokens and 1, so that the second has padding, which may be NaN:
        >>> import torch
        >>> new, old = torch.tensor([[-0.5, -1.0], [-2.0, torch.nan]]), torch.full((2, 2), -1.0)
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> Tokens(new, old, old, advantages=mask * 1.0, mask=mask).cleared().log_ratio
        tensor([[ 0.5000,  0.0000],
                [-1.0000,  0.0000]])
    """

    logprobs: Float[Tensor, "responses tokens"]
    old_logprobs: Float[Tensor, "responses tokens"]
    engine_logprobs: Float[Tensor, "responses tokens"]
    advantages: Float[Tensor, "responses tokens"]
    mask: Bool[Tensor, "responses tokens"]
    sampling_logprobs: Float[Tensor, "responses tokens"] | None = None
    weights: Float[Tensor, "responses tokens"] | None = None
    router_movement: Float[Tensor, "responses tokens"] | None = None
    reference_logprobs: Float[Tensor, "responses tokens"] | None = None
    reference_kl: Float[Tensor, "responses tokens"] | None = None
    entropy: Float[Tensor, "responses tokens"] | None = None
    length_weights: Float[Tensor, " responses"] | None = None

    @property
    def log_ratio(self) -> Float[Tensor, "responses tokens"]:
        """The log-ratio log pi_theta - log pi_old of every token, in nats."""
        return self.logprobs - self.old_logprobs

    def weighted(self) -> Tokens:
        """Return equal tokens, the gradient of whose log-probabilities is times `weights`.

        Under any ratio a token is then learned by its own weight. Weights that multiply the loss
        instead reach the tokens of a ratio per response only as their mean over the response.
        """
        if self.weights is None:
            return self
        still = self.logprobs.detach()
        return replace(self, logprobs=still + self.weights * (self.logprobs - still))

    def cleared(self) -> Tokens:
        """Return the tokens with 0 where the mask is false: NaN times 0 would reach a gradient."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        del tensors["mask"], tensors["length_weights"]
        present = {name: values for name, values in tensors.items() if values is not None}
        return replace(
            self, **{name: values.masked_fill(~self.mask, 0.0) for name, values in present.items()}
        )


@dataclass(frozen=True)
class Surrogate:
    """The loss, the ratio and the clip of every token, each [B, T]; unspecified where masked.

    `clipped` (bool) is true where the clip binds.

    Example: two tokens with advantages 1 and -2 and ratios 1.5 and 0.9 under PPO's clip of 0.2:
        loss = [-1.2, 1.8]   ratio = [1.5, 0.9]   clipped = [true, false]
    """

    loss: Float[Tensor, "responses tokens"]
    ratio: Float[Tensor, "responses tokens"]
    clipped: Bool[Tensor, "responses tokens"]


def bounded_exp(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return exp of the argument clamped to +-20: one stray token must not overflow a batch."""
    return log_ratio.clamp(-20.0, 20.0).exp()


def sequence_means(
    values: Float[Tensor, "responses tokens"], mask: Bool[Tensor, "responses tokens"]
) -> Float[Tensor, " responses"]:
    """Return the mean [B] of each response's unmasked `values` [B, T]; 0 for one without tokens."""
    return values.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def masked_sum(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Return the sum, a scalar, of `values` where `mask`; elsewhere they may even be NaN."""
    return values.masked_fill(~mask, 0.0).sum()


def clipped_surrogate(
    ratio: Float[Tensor, "responses tokens"],
    advantages: Float[Tensor, "responses tokens"],
    settings: Clipped,
) -> Surrogate:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), elementwise over equal shapes.

    With dual_clip, c, it is max(min(...), c A) where A is negative: a token that became much
    likelier cannot outweigh a batch (arXiv 1912.09729). There is no gradient where a clip binds.
    """
    free = ratio * advantages
    bound = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages
    gain, clipped = free.minimum(bound), bound < free
    if settings.dual_clip is not None:
        least = (settings.dual_clip * advantages).where(advantages < 0, -float("inf"))
        gain, clipped = gain.maximum(least), clipped | (gain < least)
    return Surrogate(loss=-gain, ratio=ratio, clipped=clipped)


class CorrectionBase(AlgorithmSettings):
    """The base of a correction's settings."""

    @property
    def by_token(self) -> bool:
        """True where the tokens of a response differ in weight."""
        return False

    def applies_to_all(self, replay: str, precision: str) -> bool:
        """Return true where it weighs every sample, and not only stale ones.

        `replay` is `routing.replay` and `precision` is `model.precision`.
        """
        return False


class NoCorrectionSettings(CorrectionBase):
    """Every token weighs the same."""

    name: Literal["none"] = "none"


@correction(NoCorrectionSettings)
def uncorrected(
    ratio: Float[Tensor, "responses tokens"], settings: NoCorrectionSettings
) -> Float[Tensor, "responses tokens"]:
    """Return 1 for every token."""
    return ratio.new_ones(ratio.shape)


class ImportanceSettings(CorrectionBase):
    """The ratios pi_old / mu that a correction takes, and the samples it takes them of."""

    level: Literal["token", "sequence"] = Field(
        default="token",
        description="token: each token's gradient by its own ratio; sequence: all tokens by the"
        " geometric mean of the response's, the only one with ratio geometric or rspo",
    )
    samples: Literal["auto", "stale", "all"] = Field(
        default="auto",
        description="stale: only samples that older weights generated, in part or whole. auto: all"
        " where routing.replay is none or model.precision is bf16, since engine and trainer differ"
        " then; else stale",
    )

    @property
    def by_token(self) -> bool:
        return self.level == "token"

    def applies_to_all(self, replay: str, precision: str) -> bool:
        if self.samples == "auto":
            return replay == "none" or precision == "bf16"
        return self.samples == "all"


class TisSettings(ImportanceSettings):
    """Weights of pi_old / mu, no larger than `cap`."""

    name: Literal["tis"] = "tis"
    cap: AboveZero = Field(default=2.0, description="largest weight")


@correction(TisSettings, source="Yao et al. 2025, https://fengyao.notion.site/off-policy-rl")
def truncated(
    ratio: Float[Tensor, "responses tokens"], settings: TisSettings
) -> Float[Tensor, "responses tokens"]:
    """Return min(pi_old / mu, cap): truncated importance sampling."""
    return ratio.clamp(max=settings.cap)


class IcePopSettings(ImportanceSettings):
    """Weights of pi_old / mu, 0 outside of [low, high]."""

    name: Literal["icepop"] = "icepop"
    samples: Literal["auto", "stale", "all"] = Field(
        default="all", description="as for tis, whose default is auto"
    )
    low: AboveZero = Field(default=0.5, description="smallest kept weight")
    high: AboveZero = Field(default=5.0, description="largest kept weight")

    def violations(self, group_size: int) -> Iterator[tuple[str, str]]:
        if self.low >= self.high:
            yield "low", f"{self.low:g} must be less than high = {self.high:g}"


@correction(IcePopSettings, source="Ring-1T, arXiv 2510.18855")
def icepop(
    ratio: Float[Tensor, "responses tokens"], settings: IcePopSettings
) -> Float[Tensor, "responses tokens"]:
    """Return pi_old / mu within [low, high], else 0."""
    return ratio.masked_fill((ratio < settings.low) | (ratio > settings.high), 0.0)


def correction_weights(
    old_logprobs: Float[Tensor, "responses tokens"],
    engine_logprobs: Float[Tensor, "responses tokens"],
    mask: Bool[Tensor, "responses tokens"],
    settings: CorrectionBase,
) -> Float[Tensor, "responses tokens"]:
    """Return the weight of every token, [B, T], without gradient.

    Both log-probabilities [B, T] in nats, pi_old's and mu's, `mask` [B, T] bool. The ratio of a
    sequence is the geometric mean over its tokens, slime's `geometric`: a product, the `sequence`
    of verl, TRL and slime, would vanish with their number.

    Example: the trainer gives two tokens 0.6 and 0.2, the engine gave them 0.2 and 0.4:
        >>> import torch
        >>> old, engine = torch.tensor([[0.6, 0.2]]).log(), torch.tensor([[0.2, 0.4]]).log()
        >>> correction_weights(old, engine, old < 0, TisSettings())  # 3 is more than the cap
        tensor([[2.0000, 0.5000]])
        >>> correction_weights(old, engine, old < 0, TisSettings(level="sequence"))
        tensor([[1.2247, 1.2247]])
    """
    log_ratio = (old_logprobs - engine_logprobs).detach().masked_fill(~mask, 0.0)
    if isinstance(settings, ImportanceSettings) and settings.level == "sequence":
        log_ratio = sequence_means(log_ratio, mask).unsqueeze(-1).expand_as(log_ratio)
    return CORRECTIONS[settings.name].function(bounded_exp(log_ratio), settings)


class SequenceMaskSettings(Settings):
    """Mask of bad responses that the policy has moved away from (DeepSeek-V3.2)."""

    enabled: bool = Field(default=False, description="drop such responses from the policy gradient")
    delta: AboveZero = Field(
        default=0.5, description="nats a token by which mu may exceed the policy"
    )


def sequence_mask(
    tokens: Tokens, settings: SequenceMaskSettings
) -> Bool[Tensor, "responses tokens"]:
    """Return M of DeepSeek-V3.2 (arXiv 2512.02556), [B, T] bool: the tokens that are kept.

    False where the advantage is negative and mean_t(log mu - log pi_theta) of the response is above
    delta: a bad response that the policy would hardly give any more teaches it nothing but noise.

    Example: two bad responses of one token, of which the policy has left the first:
        >>> import torch
        >>> new, mu = torch.tensor([[-3.0], [-1.2]]), torch.full((2, 1), -1.0)
        >>> bad = -torch.ones(2, 1)
        >>> sequence_mask(Tokens(new, mu, mu, bad, bad < 0), SequenceMaskSettings()).tolist()
        [[False], [True]]
    """
    excess = (tokens.engine_logprobs - tokens.logprobs).detach()
    far = sequence_means(excess, tokens.mask) > settings.delta
    return ~(far.unsqueeze(-1) & (tokens.advantages < 0))


if TYPE_CHECKING:
    CorrectionSettings = CorrectionBase
else:
    CorrectionSettings = CORRECTIONS.settings_union(default="tis")
