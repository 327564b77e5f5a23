"""The ranges of metrics: which values are healthy, and from which on somebody must look.

The one place of these numbers. Guards take their thresholds from here, and so do the documented
ranges of `stages.metric_definitions`, which docs/reference/metrics.md, `braid look` (screen `c`)
and the report show, and the verdicts of `pipeline.report.view.health`. Never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from parallel.mismatch import WARNED_SHARE

LAST_STEPS = 10  # that the mean is taken over which is compared with a range
# Accuracy on a domain that a model was not trained on, lost for certain, as a fraction.
FORGOTTEN = 0.02


@dataclass(frozen=True)
class MetricRange:
    """The bound of a metric's healthy values, and the one beyond which they are an alarm.

    Example: MetricRange("above", 0.05, 0.25) of `unfinished`
        0.04 is healthy, 0.1 is worth a look where a stage does not learn, 0.3 is an alarm
    """

    side: Literal["above", "below"]  # of the bounds, where values are not healthy
    healthy: float
    alarm: float

    def is_healthy(self, value: float) -> bool:
        """Return whether a value is in the healthy range."""
        return not _is_beyond(self.side, value, self.healthy)

    def is_alarm(self, value: float) -> bool:
        """Return whether a value is beyond the alarm's bound."""
        return _is_beyond(self.side, value, self.alarm)

    def __str__(self) -> str:
        if self.healthy == 0:
            return "0"
        return f"{'below' if self.side == 'above' else 'above'} {self.healthy:g}"


RANGES = {
    # Nothing to learn from.
    "zero_variance": MetricRange("above", 0.5, 0.9),
    "all_wrong": MetricRange("above", 0.5, 0.9),
    "all_right": MetricRange("above", 0.5, 0.5),  # beyond, most prompts are solved
    "unfinished": MetricRange("above", 0.05, 0.25),
    "reward_spread": MetricRange("below", 0.1, 0.02),
    "similar_responses": MetricRange("above", 0.9, 0.9),
    # What a policy must not become.
    "entropy": MetricRange("below", 0.02, 0.02),
    # On average the policy gives its own token e times the reference's probability.
    "kl": MetricRange("above", 1.0, 1.0),
    "reward_drop": MetricRange("above", 0.0, 0.2),
    "length_inflation": MetricRange("above", 1.0, 1.5),
    "format_gain": MetricRange("above", 0.0, 0.05),
    # Engine and trainer.
    "high_ratio": MetricRange("above", 0.0, WARNED_SHARE),
    "drift_high_ratio": MetricRange("above", 1e-3, 0.1),
    "dropped_stale": MetricRange("above", 0.0, 0.0),
    "router_agreement": MetricRange("below", 0.95, 0.9),
    "engine_restarts": MetricRange("above", 0.0, 0.0),
    # Experts, rewards and prompts.
    "load_balance": MetricRange("above", 1.5, 2.0),
    "idle_experts": MetricRange("above", 0.1, 0.4),
    "reward_failures": MetricRange("above", 0.0, 0.0),
    "too_long": MetricRange("above", 0.0, 0.0),
}


def _is_beyond(side: Literal["above", "below"], value: float, bound: float) -> bool:
    return value > bound if side == "above" else value < bound
