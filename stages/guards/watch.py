"""The guards and the stop rule of a stage, which read every step's metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel.errors import report_notice
from stages.domains import PolicySettings
from stages.guards.registry import GUARDS, GuardSettings, Window, WindowGuardSettings
from stages.rewards.reward import RewardBase


@dataclass(frozen=True)
class StepVerdict:
    """The windows' metrics, and in one line why the stage stops as failed, or ends as done."""

    metrics: dict[str, float] = field(default_factory=dict)
    stop: str | None = None
    end: str | None = None


class GuardMonitor:
    """The reader of every step's metrics; only on the main rank, which all others follow.

    Example: guards.entropy_collapse with threshold 0.02, patience 3 and action stop:
        step      7     8     9     10    11
        entropy   .05   .01   .01   .03   .01
        beyond    0     1     2     0     1     it stops at 3 in a row, after a checkpoint
    """

    def __init__(
        self,
        stage: str,
        at: Callable[[str], str],
        settings: PolicySettings,
        rewards: Mapping[str, RewardBase],
    ) -> None:
        """`at` names where a key is stated; `rewards` are those that all samples have."""
        self._stage, self._at = stage, at
        self._steps = settings.loop.steps
        self._rule = settings.stop
        self._reached = Window(settings.stop.window if settings.stop else 1)
        self._guards: dict[str, GuardSettings] = dict(settings.guards)
        self._trends = {  # by the metric that each computes
            guard.metric: guard.trend(guard.window, rewards)
            for guard in self._guards.values()
            if isinstance(guard, WindowGuardSettings)
        }
        self._beyond = dict.fromkeys(GUARDS, 0)  # consecutive steps

    def observe(self, step: int, metrics: Mapping[str, float]) -> StepVerdict:
        """Take the metrics of a step, print warnings, and return the verdict."""
        computed = {metric: trend.add(metrics) for metric, trend in self._trends.items()}
        trend_metrics = {metric: value for metric, value in computed.items() if value is not None}
        every = {**metrics, **trend_metrics}
        # All guards look, also once one stops the stage: each counts its steps beyond.
        stops = [line for name in self._guards if (line := self._check(name, step, every))]
        self._reached.add(metrics.get(self._rule.metric) if self._rule else None)
        # A stage that a guard stops has failed, even where it has reached its goal.
        if stops:
            return StepVerdict(trend_metrics, stop=stops[0])
        return StepVerdict(trend_metrics, end=self._ending(step))

    def state(self) -> dict[str, Any]:
        """Return the memory of the steps before, as JSON."""
        return {
            "trends": {metric: trend.state() for metric, trend in self._trends.items()},
            "beyond": dict(self._beyond),
            "reached": list(self._reached),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state; a guard that is newer than the checkpoint starts empty."""
        for metric in self._trends.keys() & state["trends"]:
            self._trends[metric].restore(state["trends"][metric])
        self._beyond.update(state["beyond"])
        self._reached.restore(state["reached"])

    def _check(self, name: str, step: int, metrics: Mapping[str, float]) -> str | None:
        """Return why a guard stops the stage; a step without its metric counts neither way."""
        guard = self._guards[name]
        value = metrics.get(guard.metric)
        if value is None or guard.action == "off":
            return None
        above = guard.side == "above"
        if not (value > guard.threshold if above else value < guard.threshold):
            self._beyond[name] = 0
            return None
        self._beyond[name] += 1
        times = self._beyond[name]
        key = self._at(f"guards.{name}")
        violation = (
            f"step {step} of {self._stage}: guard {name}: {guard.metric} is {value:.4g},"
            f" {guard.side} {key}.threshold = {guard.threshold:g},"
            f" for {times} step{'s' if times > 1 else ''} in a row; {guard.remedy}"
        )
        if guard.action == "stop" and times >= guard.patience:
            return (
                f"{violation}. The stage saved a checkpoint and stopped; to continue from there"
                f" regardless, set {key}.action=warn, or another threshold, and run it again"
            )
        if guard.action == "warn" and times == guard.patience:
            report_notice(violation)
        return None

    def _ending(self, step: int) -> str | None:
        """Return why the stage is done before its last step, or None; print it."""
        rule, mean = self._rule, self._reached.mean
        if rule is None or mean is None or mean < rule.at_least or step >= self._steps:
            return None
        end = (
            f"done at step {step} of {self._steps}: {rule.metric} is {mean:.4g} over"
            f" {rule.window} steps, at least {self._at('stop.at_least')} = {rule.at_least:g}"
        )
        report_notice(end)
        return end
