"""The registry of guards: a metric, a threshold, and the action once the metric stays beyond it.

A guard is a settings class under a decorator, whose class variables name the metric and the remedy.
Its trend, if it has one, computes the metric from those of several steps. Never imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field, create_model

from parallel.settings import Count, Settings
from stages.rewards.registry import RewardSettings

Action = Literal["warn", "stop", "off"]
Side = Literal["above", "below"]


class Window:
    """The last `size` values of a metric."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: deque[float] = deque(maxlen=size)

    @property
    def full(self) -> bool:
        """True once there are `size` values."""
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
        """Append a step's value; a step without the metric adds nothing."""
        if value is not None:
            self.values.append(value)


class Trend(ABC):
    """A metric of several steps, whose memory is saved with the stage."""

    windows: dict[str, Window]

    @abstractmethod
    def add(self, metrics: Mapping[str, float]) -> float | None:
        """Take a step's metrics; return the trend's, or None while the windows are not full."""

    def state(self) -> dict[str, Any]:
        """Return the memory as JSON."""
        return {name: list(window.values) for name, window in self.windows.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state; a window that is shorter now keeps its newest values."""
        for name, window in self.windows.items():
            window.values.clear()
            window.values.extend(state[name])


class GuardSettings(Settings):
    """The bound of a metric, for how many steps it may be beyond, and the action then.

    `metric` is the one that it watches, `side` where it must not be, `remedy` the first thing to
    try. `trend` returns the trend that computes the metric, where no step logs it by itself.
    """

    metric: ClassVar[str]
    side: ClassVar[Side]
    remedy: ClassVar[str]

    threshold: float = Field(description="bound of the metric")
    action: Action = Field(
        default="warn",
        description="warn: one message until the metric is back within the threshold. stop: save a"
        " checkpoint and end the stage as failed. off: only log the metric",
    )
    patience: Count = Field(default=5, description="consecutive steps beyond the threshold")

    def beyond(self, value: float) -> bool:
        """Return true where a value is on the wrong side of the threshold."""
        return value > self.threshold if self.side == "above" else value < self.threshold

    def trend(self, rewards: Mapping[str, RewardSettings]) -> Trend | None:
        """Return the trend of a stage whose samples have these rewards."""
        return None


class WindowGuardSettings(GuardSettings):
    """The bound of a metric that compares means over windows of steps."""

    window: Count = Field(default=10, description="steps that one mean is taken over")


GUARDS: dict[str, type[GuardSettings]] = {}
Guard = TypeVar("Guard", bound=type[GuardSettings])


def guard(name: str) -> Callable[[Guard], Guard]:
    """Return a decorator that registers a guard's settings under its key in `guards:`.

    Raises:
        ValueError: another guard has the name.
    """

    def add(settings: Guard) -> Guard:
        if name in GUARDS:
            raise ValueError(f"guards: {name} is registered twice; rename one of them")
        GUARDS[name] = settings
        return settings

    return add


def guards_model() -> Any:
    """Return a settings class with a block for every guard."""
    fields: dict[str, Any] = {
        name: (settings, settings.model_validate({})) for name, settings in GUARDS.items()
    }
    return create_model(
        "GuardsSettings",
        __base__=Settings,
        __doc__="The known ways in which reinforcement learning fails, a guard for each.",
        __module__="stages.guards.settings",
        **fields,
    )
