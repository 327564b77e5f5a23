"""The guards and the stop rule of a stage: what each step's metrics mean for whether it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from parallel.status_pipe import report_notice
from stages.guards.settings import GuardSettings, GuardsSettings
from stages.guards.trends import Trends, Window
from stages.rewards.settings import RewardSettings
from stages.settings import PolicySettings


@dataclass(frozen=True)
class StepVerdict:
    """What a step means: metrics of the windows, and in one line why the stage is to stop as
    failed, or may end as done."""

    metrics: dict[str, float] = field(default_factory=dict)
    stop: str | None = None
    end: str | None = None


@dataclass(frozen=True)
class _Guard:
    """A guard that watches `metric`; `mend` is what to try first."""

    name: str
    settings: GuardSettings
    metric: str
    side: Literal["above", "below"]
    mend: str

    def beyond(self, value: float) -> bool:
        """Whether a value is on the wrong side of the threshold."""
        threshold = self.settings.threshold
        return value > threshold if self.side == "above" else value < threshold


def guards(settings: GuardsSettings) -> list[_Guard]:
    """All of them; docs/guards.md says where each comes from."""
    return [
        _Guard(
            "entropy_collapse",
            settings.entropy_collapse,
            "entropy",
            "below",
            "raise objective.entropy_bonus or ratio.clip_high, or lower the learning rate",
        ),
        _Guard(
            "reward_collapse",
            settings.reward_collapse,
            "reward_drop",
            "above",
            "make the stage anew (--from) with a lower learning rate, a higher"
            " objective.kl.coefficient, or a stop rule that ends it at the peak",
        ),
        _Guard(
            "reward_spread",
            settings.reward_spread,
            "reward_spread",
            "below",
            "take prompts of another difficulty, or a larger sampling.group_size",
        ),
        _Guard(
            "flat_groups",
            settings.flat_groups,
            "zero_variance",
            "above",
            "take prompts of another difficulty, curriculum.name: frontier, or"
            " rollout.dynamic_sampling",
        ),
        _Guard(
            "length_inflation",
            settings.length_inflation,
            "length_inflation",
            "above",
            "use objective.aggregation: token_mean or constant, or a reward of kind overlong",
        ),
        _Guard(
            "similar_responses",
            settings.similar_responses,
            "similar_responses",
            "above",
            "raise sampling.temperature, or take harder prompts",
        ),
        _Guard(
            "format_gain",
            settings.format_gain,
            "format_gain",
            "above",
            "lower the weights of the rewards that do not judge the answer",
        ),
        _Guard(
            "truncation",
            settings.truncation,
            "unfinished",
            "above",
            "raise sampling.max_response_tokens",
        ),
        _Guard(
            "mismatch",
            settings.mismatch,
            "high_ratio",
            "above",
            "see docs/refit.md: engine and trainer give the same tokens other probabilities",
        ),
        _Guard(
            "drift",
            settings.drift,
            "drift_high_ratio",
            "above",
            "lower rollout.max_staleness or the learning rate",
        ),
        _Guard(
            "stale_drops",
            settings.stale_drops,
            "dropped_stale",
            "above",
            "raise rollout.max_staleness, or lower rollout.oversampling",
        ),
    ]


class GuardMonitor:
    """Reads every step's metrics; main rank only, which has all ranks do as it says."""

    def __init__(
        self, stage: str, settings: PolicySettings, rewards: Mapping[str, RewardSettings]
    ) -> None:
        """`stage` is the key of its settings too; `rewards` are those that all samples have."""
        self._stage = stage
        self._steps = settings.loop.steps
        self._rule = settings.stop
        self._reached = Window(settings.stop.window) if settings.stop else Window(1)
        self._trends = Trends(settings.guards, rewards)
        self._guards = guards(settings.guards)
        self._beyond = {guard.name: 0 for guard in self._guards}  # steps in a row

    def observe(self, step: int, metrics: Mapping[str, float]) -> StepVerdict:
        """Take in the metrics of a step, say what is to be warned of, and judge."""
        found = self._trends.add(metrics)
        stops = [
            line
            for guard in self._guards
            if (line := self._judge(guard, step, {**metrics, **found})) is not None
        ]
        self._reached.add(metrics.get(self._rule.metric) if self._rule else None)
        if stops:
            return StepVerdict(found, stop=stops[0])
        return StepVerdict(found, end=self._ending(step))

    def state(self) -> dict[str, Any]:
        """What is remembered of the steps before, as JSON."""
        return {
            "trends": self._trends.state(),
            "beyond": dict(self._beyond),
            "reached": list(self._reached.values),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue there."""
        self._trends.restore(state["trends"])
        self._beyond.update(state["beyond"])
        self._reached.values.clear()
        self._reached.values.extend(state["reached"])

    def _judge(self, guard: _Guard, step: int, metrics: Mapping[str, float]) -> str | None:
        """Why the guard stops the stage, or None. A step without the metric says nothing."""
        value = metrics.get(guard.metric)
        settings = guard.settings
        if value is None or settings.action == "off":
            return None
        if not guard.beyond(value):
            self._beyond[guard.name] = 0
            return None
        self._beyond[guard.name] += 1
        times = self._beyond[guard.name]
        key = f"{self._stage}.guards.{guard.name}"
        fault = (
            f"step {step} of {self._stage}: guard {guard.name}: {guard.metric} is {value:.4g},"
            f" {guard.side} {key}.threshold = {settings.threshold:g},"
            f" for {times} step{'s' if times > 1 else ''} in a row; {guard.mend}"
        )
        if settings.action == "stop" and times >= settings.patience:
            return (
                f"{fault}. The stage has saved the step and stopped; to go on from there"
                f" regardless, set {key}.action to warn, or another threshold, and run it again"
            )
        if settings.action == "warn" and times == settings.patience:
            report_notice(fault)
        return None

    def _ending(self, step: int) -> str | None:
        """Why the stage is done before its last step, or None; says it."""
        rule, mean = self._rule, self._reached.mean
        if rule is None or mean is None or mean < rule.at_least or step >= self._steps:
            return None
        end = (
            f"done at step {step} of {self._steps}: {rule.metric} is {mean:.4g} over"
            f" {rule.window} steps, and {self._stage}.stop asks for {rule.at_least:g}"
        )
        report_notice(end)
        return end
