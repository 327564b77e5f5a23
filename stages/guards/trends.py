"""What only several steps together show: a reward that falls from its best, a ratio that grows."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from stages.guards.settings import GuardsSettings
from stages.rewards.settings import RewardSettings


class Window:
    """The last values of a metric, as many as `size`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: deque[float] = deque(maxlen=size)

    @property
    def full(self) -> bool:
        """Whether there are so many."""
        return len(self.values) == self.size

    @property
    def mean(self) -> float | None:
        """The mean of a full window."""
        return fmean(self.values) if self.full else None

    @property
    def rise(self) -> float | None:
        """The mean of a full window's later half less that of its earlier half."""
        if not self.full:
            return None
        values, half = list(self.values), self.size // 2
        return fmean(values[-half:]) - fmean(values[:half])

    def add(self, value: float | None) -> None:
        """Take in a step's value; a step that has none is left out."""
        if value is not None:
            self.values.append(value)


class Trends:
    """Metrics over the windows of a stage's guards; their past is saved with the stage."""

    def __init__(self, settings: GuardsSettings, rewards: Mapping[str, RewardSettings]) -> None:
        self._weights: dict[bool, dict[str, float]] = {True: {}, False: {}}  # judges the answer?
        for name, each in rewards.items():
            if each.weight:
                self._weights[each.judges_answer][name] = each.weight
        halves = 2 * settings.format_gain.window
        self._windows = {
            "reward": Window(settings.reward_collapse.window),
            "wrong_over_right": Window(settings.length_inflation.window),
            "judged": Window(halves),
            "unjudged": Window(halves),
        }
        self._best_reward: float | None = None  # mean of a window
        self._first_ratio: float | None = None  # of the first full window

    def add(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take in a step's metrics; returns what the windows say that are full."""
        self._windows["reward"].add(metrics.get("reward"))
        self._windows["wrong_over_right"].add(metrics.get("wrong_over_right"))
        if all(self._weights.values()):
            self._windows["judged"].add(self._earned(metrics, judges=True))
            self._windows["unjudged"].add(self._earned(metrics, judges=False))
        return {**self._reward_drop(), **self._length_inflation(), **self._format_gain()}

    def state(self) -> dict[str, Any]:
        """All of it, as JSON."""
        return {
            "windows": {name: list(window.values) for name, window in self._windows.items()},
            "best_reward": self._best_reward,
            "first_ratio": self._first_ratio,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue there; of a window that is shorter now, the newest values."""
        for name, window in self._windows.items():
            window.values.clear()
            window.values.extend(state["windows"][name])
        self._best_reward = state["best_reward"]
        self._first_ratio = state["first_ratio"]

    def _reward_drop(self) -> dict[str, float]:
        mean = self._windows["reward"].mean
        if mean is None:
            return {}
        self._best_reward = mean if self._best_reward is None else max(self._best_reward, mean)
        return {"reward_drop": self._best_reward - mean}

    def _length_inflation(self) -> dict[str, float]:
        mean = self._windows["wrong_over_right"].mean
        if mean is None:
            return {}
        if self._first_ratio is None:
            self._first_ratio = mean
        return {"length_inflation": mean / self._first_ratio}

    def _format_gain(self) -> dict[str, float]:
        """A rise of what judges no answer is no fault as far as the answers get better too."""
        judged, unjudged = self._windows["judged"].rise, self._windows["unjudged"].rise
        if judged is None or unjudged is None:
            return {}
        return {"format_gain": max(0.0, unjudged - max(0.0, judged))}

    def _earned(self, metrics: Mapping[str, float], judges: bool) -> float | None:
        """The weighted sum of the mean rewards that do or do not judge the answer."""
        weights = self._weights[judges]
        if any(f"reward/{name}" not in metrics for name in weights):
            return None
        return sum(weight * metrics[f"reward/{name}"] for name, weight in weights.items())
