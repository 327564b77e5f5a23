"""Weights of tokens that pi_old did not sample: the engine or older weights did (section 4).

Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from parallel.settings import Settings
from stages.objectives.aggregation import sequence_means
from stages.objectives.registry import CORRECTIONS, AboveZero, correction
from stages.objectives.surrogate import bounded_exp

if TYPE_CHECKING:
    from torch import Tensor


class CorrectionBase(Settings):
    """The base of a correction's settings."""

    if TYPE_CHECKING:
        name: str

    def applies_to_all(self, replay: str, precision: str) -> bool:
        """Return true where it weighs every sample, and not only stale ones.

        `replay` is `routing.replay` and `precision` is `model.precision`.
        """
        return False

    def violations(self, group_size: int) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each contradiction between these settings."""
        yield from ()


class NoCorrectionSettings(CorrectionBase):
    """Every token weighs the same."""

    name: Literal["none"] = "none"


class ImportanceSettings(CorrectionBase):
    """The ratios pi_old / mu that a correction takes, and the samples it takes them of."""

    level: Literal["token", "sequence"] = Field(
        default="token", description="sequence: the geometric mean over the response's tokens"
    )
    samples: Literal["auto", "stale", "all"] = Field(
        default="auto",
        description="stale: only samples that older weights generated, in part or whole. auto: all"
        " where routing.replay is none or model.precision is bf16, since engine and trainer differ"
        " then; else stale",
    )

    def applies_to_all(self, replay: str, precision: str) -> bool:
        if self.samples == "auto":
            return replay == "none" or precision == "bf16"
        return self.samples == "all"


class TisSettings(ImportanceSettings):
    """Weights of pi_old / mu, no larger than `cap`."""

    name: Literal["tis"] = "tis"
    cap: AboveZero = Field(default=2.0, description="largest weight")


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


class SequenceMaskSettings(Settings):
    """Mask of bad responses that the policy has moved away from (DeepSeek-V3.2)."""

    enabled: bool = Field(default=False, description="drop such responses from the policy gradient")
    delta: AboveZero = Field(
        default=0.5, description="nats a token by which mu may exceed the policy"
    )


@correction(NoCorrectionSettings)
def uncorrected(ratio: Tensor, settings: NoCorrectionSettings) -> Tensor:
    """Return 1 for every token."""
    return ratio.new_ones(ratio.shape)


@correction(TisSettings, source="DeepSeek-V3.2, arXiv 2512.02556")
def truncated(ratio: Tensor, settings: TisSettings) -> Tensor:
    """Return min(pi_old / mu, cap): truncated importance sampling."""
    return ratio.clamp(max=settings.cap)


@correction(IcePopSettings)
def icepop(ratio: Tensor, settings: IcePopSettings) -> Tensor:
    """Return pi_old / mu within [low, high], else 0."""
    return ratio.masked_fill((ratio < settings.low) | (ratio > settings.high), 0.0)


def correction_weights(
    old_log_probs: Tensor, engine_log_probs: Tensor, mask: Tensor, settings: CorrectionBase
) -> Tensor:
    """Return the weight of every token's surrogate, [B, T], without gradient.

    Both log-probabilities [B, T] in nats, pi_old's and mu's, `mask` [B, T] bool. The ratio of a
    sequence is the geometric mean over its tokens: a product would vanish with their number.
    """
    log_ratio = (old_log_probs - engine_log_probs).detach().masked_fill(~mask, 0.0)
    if isinstance(settings, ImportanceSettings) and settings.level == "sequence":
        log_ratio = sequence_means(log_ratio, mask).unsqueeze(-1).expand_as(log_ratio)
    weights: Tensor = CORRECTIONS[settings.name](bounded_exp(log_ratio), settings)
    return weights


def sequence_mask(
    log_probs: Tensor,
    engine_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: SequenceMaskSettings,
) -> Tensor:
    """Return M of DeepSeek-V3.2 (arXiv 2512.02556), [B, T] bool: the tokens that are kept.

    False where the advantage is negative and mean_t(log mu - log pi_theta) of the response is above
    delta: a bad response that the policy would hardly give any more teaches it nothing but noise.
    Log-probabilities [B, T] in nats, `advantages` [B, T], `mask` [B, T] bool.
    """
    behind = sequence_means((engine_log_probs - log_probs).detach(), mask) > settings.delta
    return ~(behind.unsqueeze(-1) & (advantages < 0))


if TYPE_CHECKING:
    CorrectionSettings = CorrectionBase
else:
    CorrectionSettings = CORRECTIONS.settings_union(default="tis")
