"""The guards of known failures, in the order of their blocks in YAML. Never imports torch.

docs/explanation/guards.md says where each comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from parallel.settings import Count, Fraction
from stages.guards.registry import (
    Action,
    GuardSettings,
    Side,
    Trend,
    Window,
    WindowGuardSettings,
    guard,
)
from stages.rewards.registry import RewardSettings

AtLeastZero = Annotated[float, Field(ge=0)]


@guard("entropy_collapse")
class EntropyCollapseSettings(GuardSettings):
    """Below the threshold, in nats, nothing is explored any more."""

    metric: ClassVar[str] = "entropy"
    side: ClassVar[Side] = "below"
    remedy: ClassVar[str] = (
        "raise objective.entropy_bonus or ratio.clip_high, or lower the learning rate"
    )

    threshold: AtLeastZero = 0.02


@guard("reward_collapse")
class RewardCollapseSettings(WindowGuardSettings):
    """Above the threshold, in units of the reward, learned behaviour is being lost."""

    metric: ClassVar[str] = "reward_drop"
    side: ClassVar[Side] = "above"
    remedy: ClassVar[str] = (
        "rerun the stage (--from) with a lower learning rate, a higher objective.kl.coefficient, or"
        " a stop rule that ends it at the peak"
    )

    threshold: AtLeastZero = 0.2

    def trend(self, rewards: Mapping[str, RewardSettings]) -> Trend:
        return RewardDrop(self.window)


class RewardDrop(Trend):
    """The best mean reward of a window less that of the last window."""

    def __init__(self, window: int) -> None:
        self.windows = {"reward": Window(window)}
        self.best: float | None = None

    def add(self, metrics: Mapping[str, float]) -> float | None:
        self.windows["reward"].add(metrics.get("reward"))
        mean = self.windows["reward"].mean
        if mean is None:
            return None
        self.best = mean if self.best is None else max(self.best, mean)
        return self.best - mean

    def state(self) -> dict[str, Any]:
        return {**super().state(), "best": self.best}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.best = state["best"]


@guard("reward_spread")
class RewardSpreadSettings(GuardSettings):
    """Below the threshold, in units of the reward, samples of a prompt hardly differ in reward."""

    metric: ClassVar[str] = "reward_spread"
    side: ClassVar[Side] = "below"
    remedy: ClassVar[str] = "use prompts of another difficulty, or a larger sampling.group_size"

    threshold: AtLeastZero = 0.02


@guard("flat_groups")
class FlatGroupsSettings(GuardSettings):
    """Above the threshold, hardly a prompt has samples to compare."""

    metric: ClassVar[str] = "zero_variance"
    side: ClassVar[Side] = "above"
    remedy: ClassVar[str] = (
        "use prompts of another difficulty, curriculum.name: frontier, or rollout.dynamic_sampling"
    )

    threshold: Fraction = 0.9


@guard("length_inflation")
class LengthInflationSettings(WindowGuardSettings):
    """Above the threshold, wrong answers have grown that much against right ones."""

    metric: ClassVar[str] = "length_inflation"
    side: ClassVar[Side] = "above"
    remedy: ClassVar[str] = (
        "use objective.aggregation: token_mean or constant, or a reward of kind overlong"
    )

    threshold: AtLeastZero = 1.5

    def trend(self, rewards: Mapping[str, RewardSettings]) -> Trend:
        return LengthInflation(self.window)


class LengthInflation(Trend):
    """The mean `wrong_over_right` of the last window over that of the first full one."""

    def __init__(self, window: int) -> None:
        self.windows = {"wrong_over_right": Window(window)}
        self.first: float | None = None

    def add(self, metrics: Mapping[str, float]) -> float | None:
        self.windows["wrong_over_right"].add(metrics.get("wrong_over_right"))
        mean = self.windows["wrong_over_right"].mean
        if mean is None:
            return None
        if self.first is None:
            self.first = mean
        return mean / self.first

    def state(self) -> dict[str, Any]:
        return {**super().state(), "first": self.first}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.first = state["first"]


@guard("similar_responses")
class SimilarResponsesSettings(GuardSettings):
    """Above the threshold, the samples of a prompt are nearly identical."""

    metric: ClassVar[str] = "similar_responses"
    side: ClassVar[Side] = "above"
    remedy: ClassVar[str] = "raise sampling.temperature, or use harder prompts"

    threshold: Fraction = 0.9


@guard("format_gain")
class FormatGainSettings(WindowGuardSettings):
    """Above the threshold, in units of the reward, rewards that do not judge the answer rise."""

    metric: ClassVar[str] = "format_gain"
    side: ClassVar[Side] = "above"
    remedy: ClassVar[str] = "lower the weights of the rewards that do not judge the answer"

    threshold: AtLeastZero = 0.05
    window: Count = Field(default=20, description="steps that one mean is taken over")

    def trend(self, rewards: Mapping[str, RewardSettings]) -> Trend:
        return FormatGain(self.window, rewards)


class FormatGain(Trend):
    """The rise of rewards that judge no answer, less that of the others, over two windows."""

    def __init__(self, window: int, rewards: Mapping[str, RewardSettings]) -> None:
        self.windows = {"judged": Window(2 * window), "unjudged": Window(2 * window)}
        self._weights: dict[bool, dict[str, float]] = {True: {}, False: {}}  # judges the answer?
        for name, each in rewards.items():
            if each.weight:
                self._weights[each.judges_answer][name] = each.weight

    def add(self, metrics: Mapping[str, float]) -> float | None:
        if not all(self._weights.values()):
            return None
        self.windows["judged"].add(self._earned(metrics, judges=True))
        self.windows["unjudged"].add(self._earned(metrics, judges=False))
        judged, unjudged = self.windows["judged"].rise, self.windows["unjudged"].rise
        if judged is None or unjudged is None:
            return None
        # A better format is no failure as far as the answers get better too.
        return max(0.0, unjudged - max(0.0, judged))

    def _earned(self, metrics: Mapping[str, float], judges: bool) -> float | None:
        """Return the weighted sum of the mean rewards that do, or do not, judge the answer."""
        weights = self._weights[judges]
        if any(f"reward/{name}" not in metrics for name in weights):
            return None
        return sum(weight * metrics[f"reward/{name}"] for name, weight in weights.items())


@guard("truncation")
class TruncationSettings(GuardSettings):
    """Above the threshold, too many responses are truncated."""

    metric: ClassVar[str] = "unfinished"
    side: ClassVar[Side] = "above"
    remedy: ClassVar[str] = "raise sampling.max_response_tokens"

    threshold: Fraction = 0.25


@guard("mismatch")
class MismatchSettings(GuardSettings):
    """Above the threshold, engine and trainer are two policies: section 4 of the algorithms."""

    metric: ClassVar[str] = "high_ratio"
    side: ClassVar[Side] = "above"
    remedy: ClassVar[str] = (
        "see docs/how-to/mismatch.md: engine and trainer disagree on probabilities"
    )

    threshold: Fraction = 0.1
    action: Action = "stop"
    patience: Count = 3


@guard("drift")
class DriftSettings(GuardSettings):
    """Above the threshold, the samples are too old for the policy that learns from them."""

    metric: ClassVar[str] = "drift_high_ratio"
    side: ClassVar[Side] = "above"
    remedy: ClassVar[str] = "lower rollout.max_staleness or the learning rate"

    threshold: Fraction = 0.1


@guard("stale_drops")
class StaleDropsSettings(GuardSettings):
    """Above the threshold, samples are dropped as too stale, slow ones before others."""

    metric: ClassVar[str] = "dropped_stale"
    side: ClassVar[Side] = "above"
    remedy: ClassVar[str] = "raise rollout.max_staleness, or lower rollout.oversampling"

    threshold: AtLeastZero = 0.0
    patience: Count = Field(default=1, description="consecutive steps beyond the threshold")
