"""Does a stage learn? The trend of its metric, and its model's gain on the problems held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.run.metrics import Line, series
from stages.statistics import Rise, fitted_rise

# What says how a stage learns, and whether it rises then; the first that a stage logs. The loss of
# a policy gradient is about 0 by construction, and says nothing.
PROGRESS = {"teacher_kl": False, "reward": True, "reward_margin": True, "loss": False}


@dataclass(frozen=True)
class LearningTrend:
    """The trend of the metric that says how a stage learns; no `rise` of too few steps."""

    metric: str
    rises: bool  # where the stage learns
    steps: int
    rise: Rise | None

    @property
    def is_better(self) -> bool:
        """True where the whole 95 % interval is on the side of learning."""
        return self.rise is not None and (self.rise.low > 0 if self.rises else self.rise.high < 0)

    @property
    def is_worse(self) -> bool:
        """True where the whole 95 % interval is on the other side."""
        return self.rise is not None and (self.rise.high < 0 if self.rises else self.rise.low > 0)

    def __str__(self) -> str:
        if (rise := self.rise) is None:
            return f"{self.steps} steps"
        change = rise.last - rise.first
        return (
            f"{self.metric} {rise.first:.3g} → {rise.last:.3g} over {self.steps} steps,"
            f" {change:+.2g} (95 %: {rise.low:+.2g} to {rise.high:+.2g})"
        )


def learning_trend(lines: Sequence[Line]) -> LearningTrend | None:
    """Return the trend of the first metric of PROGRESS that a stage logs; None without one."""
    for metric, rises in PROGRESS.items():
        values = series(lines, metric)
        if values:
            return LearningTrend(metric, rises, len(values), fitted_rise(values))
    return None


@dataclass(frozen=True)
class HeldOutGain:
    """The changes of a stage's model against the start, on the problems held out.

    `gained` says the significant gains on the stage's own domains, `not_gained` the other changes
    there, `lost` what was lost for certain: of any domain that it was trained on, and more than
    FORGOTTEN of another. `lost_domains` are the domains of the latter two.
    """

    gained: tuple[str, ...]
    not_gained: tuple[str, ...]
    lost: tuple[str, ...]
    lost_domains: tuple[str, ...]
    start: str
