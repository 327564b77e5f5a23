"""What a person may set about the guards and the stop rule of a stage. Never imports torch.

A guard is a metric, a threshold, and what happens where the metric stays beyond it. Which metric
each one watches stands in `stages.guards.watch`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from parallel.settings import Count, Fraction, Settings

AtLeastZero = Annotated[float, Field(ge=0)]
Action = Literal["warn", "stop", "off"]


class GuardSettings(Settings):
    """How far a metric may go, for how long, and what happens then."""

    threshold: float
    action: Action = Field(
        default="warn",
        description="warn: say so, once until it is over. stop: save, and end the stage as failed."
        " off: only log the metric",
    )
    patience: Count = Field(default=5, description="steps in a row beyond the threshold")


class WindowGuardSettings(GuardSettings):
    """The same of a metric that compares means over windows of steps."""

    window: Count = Field(default=10, description="steps that one mean is taken over")


class EntropyCollapseSettings(GuardSettings):
    """Below it, nothing is explored any more; nats."""

    threshold: AtLeastZero = 0.02


class RewardCollapseSettings(WindowGuardSettings):
    """Above it, what was learned is being lost; in units of the reward."""

    threshold: AtLeastZero = 0.2


class RewardSpreadSettings(GuardSettings):
    """Below it, samples of a prompt hardly differ in what they earn; in units of the reward."""

    threshold: AtLeastZero = 0.02


class FlatGroupsSettings(GuardSettings):
    """Above it, hardly a prompt has samples to compare."""

    threshold: Fraction = 0.9


class LengthInflationSettings(WindowGuardSettings):
    """Above it, wrong answers have grown against right ones by so much since the stage began."""

    threshold: AtLeastZero = 1.5


class SimilarResponsesSettings(GuardSettings):
    """Above it, the samples of a prompt say nearly all the same."""

    threshold: Fraction = 0.9


class FormatGainSettings(WindowGuardSettings):
    """Above it, the reward rises by what does not judge the answer; in units of the reward."""

    threshold: AtLeastZero = 0.05
    window: Count = Field(default=20, description="steps that one mean is taken over")


class TruncationSettings(GuardSettings):
    """Above it, too many responses are cut off before their end."""

    threshold: Fraction = 0.25


class MismatchSettings(GuardSettings):
    """Above it, engine and trainer are two policies: section 4 of the algorithms."""

    threshold: Fraction = 0.1
    action: Action = "stop"
    patience: Count = 3


class DriftSettings(GuardSettings):
    """Above it, the samples are too old for the policy that learns from them."""

    threshold: Fraction = 0.1


class StaleDropsSettings(GuardSettings):
    """Above it, samples grow too old to be trained on, and the slow ones are the ones that go."""

    threshold: AtLeastZero = 0.0
    patience: Count = Field(default=1, description="steps in a row beyond the threshold")


class GuardsSettings(Settings):
    """The known ways in which reinforcement learning fails, and who is to hear of them."""

    entropy_collapse: EntropyCollapseSettings = EntropyCollapseSettings()
    reward_collapse: RewardCollapseSettings = RewardCollapseSettings()
    reward_spread: RewardSpreadSettings = RewardSpreadSettings()
    flat_groups: FlatGroupsSettings = FlatGroupsSettings()
    length_inflation: LengthInflationSettings = LengthInflationSettings()
    similar_responses: SimilarResponsesSettings = SimilarResponsesSettings()
    format_gain: FormatGainSettings = FormatGainSettings()
    truncation: TruncationSettings = TruncationSettings()
    mismatch: MismatchSettings = MismatchSettings()
    drift: DriftSettings = DriftSettings()
    stale_drops: StaleDropsSettings = StaleDropsSettings()


class StopSettings(Settings):
    """Where a stage has learned what it was to learn, and is done before its last step."""

    metric: Annotated[str, Field(pattern=r"^(reward|reward/.+|all_right)$")] = Field(
        default="reward", description="reward, reward/NAME of one of its rewards, or all_right"
    )
    at_least: float
    window: Count = Field(default=10, description="steps over which its mean reaches that")
