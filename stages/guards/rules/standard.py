"""The guards of known failures, in the order of their blocks in YAML. Never imports torch.

docs/explanation/guards.md says where each comes from.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from parallel.settings import Count, Fraction
from stages.guards.registry import (
    AtLeastZero,
    GuardSettings,
    Trend,
    WindowGuardSettings,
    guard,
)
from stages.metric_ranges import RANGES
from stages.rewards.reward import RewardBase


@guard("entropy_collapse")
class EntropyCollapseSettings(GuardSettings):
    """Below the threshold, in nats, nothing is explored any more."""

    metric = "entropy"
    side = "below"
    remedy = "raise objective.entropy_bonus or ratio.clip_high, or lower the learning rate"
    threshold: AtLeastZero = RANGES["entropy"].alarm


class RewardDrop(Trend):
    """The best mean reward of a window less that of the last window."""

    watched, saved = ("reward",), ("best",)
    best: float | None = None

    def add(self, metrics: Mapping[str, float]) -> float | None:
        self.windows["reward"].add(metrics.get("reward"))
        if (mean := self.windows["reward"].mean) is None:
            return None
        self.best = mean if self.best is None else max(self.best, mean)
        return self.best - mean


@guard("reward_collapse")
class RewardCollapseSettings(WindowGuardSettings):
    """Above the threshold, in units of the reward, learned behaviour is being lost."""

    metric = "reward_drop"
    side = "above"
    remedy = (
        "rerun the stage (--from) with a lower learning rate, a higher objective.kl.coefficient, or"
        " a stop rule that ends it at the peak"
    )
    trend = RewardDrop
    threshold: AtLeastZero = RANGES["reward_drop"].alarm


@guard("reward_spread")
class RewardSpreadSettings(GuardSettings):
    """Below the threshold, in units of the reward, samples of a prompt hardly differ in reward."""

    metric = "reward_spread"
    side = "below"
    remedy = "use prompts of another difficulty, or a larger sampling.group_size"
    threshold: AtLeastZero = RANGES["reward_spread"].alarm


@guard("zero_variance")
class ZeroVarianceSettings(GuardSettings):
    """Above the threshold, hardly a prompt has samples to compare."""

    metric = "zero_variance"
    side = "above"
    remedy = (
        "use prompts of another difficulty, curriculum.name: frontier, or rollout.dynamic_sampling"
    )
    threshold: Fraction = RANGES["zero_variance"].alarm


class LengthInflation(Trend):
    """The mean `wrong_over_right` of the last window over that of the first full one."""

    watched, saved = ("wrong_over_right",), ("first",)
    first: float | None = None

    def add(self, metrics: Mapping[str, float]) -> float | None:
        self.windows["wrong_over_right"].add(metrics.get("wrong_over_right"))
        if (mean := self.windows["wrong_over_right"].mean) is None:
            return None
        self.first = mean if self.first is None else self.first
        return mean / self.first


@guard("length_inflation")
class LengthInflationSettings(WindowGuardSettings):
    """Above the threshold, wrong answers have grown that much against right ones."""

    metric = "length_inflation"
    side = "above"
    remedy = "use objective.aggregation: token_mean or constant, or a reward of kind overlong"
    trend = LengthInflation
    threshold: AtLeastZero = RANGES["length_inflation"].alarm


@guard("similar_responses")
class SimilarResponsesSettings(GuardSettings):
    """Above the threshold, the samples of a prompt are nearly identical."""

    metric = "similar_responses"
    side = "above"
    remedy = "raise sampling.temperature, or use harder prompts"
    threshold: Fraction = RANGES["similar_responses"].alarm


class FormatGain(Trend):
    """The rise of rewards that judge no answer, less that of the others, over two windows."""

    watched = ("judged", "unjudged")

    def __init__(self, window: int, rewards: Mapping[str, RewardBase]) -> None:
        super().__init__(2 * window, rewards)
        self._weights: dict[str, dict[str, float]] = {"judged": {}, "unjudged": {}}
        for name, reward in rewards.items():
            if reward.weight:
                self._weights["judged" if reward.judges_answer else "unjudged"][name] = (
                    reward.weight
                )

    def add(self, metrics: Mapping[str, float]) -> float | None:
        if not all(self._weights.values()):
            return None
        for kind, weights in self._weights.items():
            if all(f"reward/{name}" in metrics for name in weights):
                weighted = [weight * metrics[f"reward/{name}"] for name, weight in weights.items()]
                self.windows[kind].add(sum(weighted))
        judged, unjudged = self.windows["judged"].rise, self.windows["unjudged"].rise
        if judged is None or unjudged is None:
            return None
        # A better format is no failure as far as the answers get better too.
        return max(0.0, unjudged - max(0.0, judged))


@guard("format_gain")
class FormatGainSettings(WindowGuardSettings):
    """Above the threshold, in units of the reward, rewards that do not judge the answer rise."""

    metric = "format_gain"
    side = "above"
    remedy = "lower the weights of the rewards that do not judge the answer"
    trend = FormatGain
    threshold: AtLeastZero = RANGES["format_gain"].alarm
    window: Count = Field(default=20, description="steps that one mean is taken over")


@guard("truncation")
class TruncationSettings(GuardSettings):
    """Above the threshold, too many responses are truncated."""

    metric = "unfinished"
    side = "above"
    remedy = "raise sampling.max_response_tokens"
    threshold: Fraction = RANGES["unfinished"].alarm


@guard("mismatch")
class MismatchSettings(GuardSettings):
    """Above the threshold, engine and trainer are two policies (docs/how-to/mismatch.md)."""

    metric = "high_ratio"
    side = "above"
    remedy = "see docs/how-to/mismatch.md: engine and trainer disagree on probabilities"
    threshold: Fraction = RANGES["high_ratio"].alarm  # engine.max_high_ratio stops the stage
    patience: Count = 3


@guard("drift")
class DriftSettings(GuardSettings):
    """Above the threshold, the samples are too old for the policy that learns from them."""

    metric = "drift_high_ratio"
    side = "above"
    remedy = "lower rollout.max_steps_ahead or the learning rate"
    threshold: Fraction = RANGES["drift_high_ratio"].alarm


@guard("stale_drops")
class StaleDropsSettings(GuardSettings):
    """Above the threshold, samples are dropped as too stale, slow ones before others."""

    metric = "dropped_stale"
    side = "above"
    remedy = "raise rollout.max_steps_ahead, or lower rollout.oversampling"
    threshold: AtLeastZero = RANGES["dropped_stale"].alarm
    patience: Count = Field(default=1, description="consecutive steps beyond the threshold")
