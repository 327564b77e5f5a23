"""The registry of guards: a metric, a threshold, and the action once the metric stays beyond it.

A guard is a settings class under a decorator, whose class variables name the metric and the remedy.
Never imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field

from parallel.settings import Count, Settings
from stages.rewards.reward import RewardBase

AtLeastZero = Annotated[float, Field(ge=0)]
Action = Literal["warn", "stop", "off"]


class Window(deque[float]):
    """The last `size` values of a metric.

    Example:
        >>> window = Window(4)
        >>> for value in (9.0, 1.0, 1.0, 2.0, 4.0):
        ...     window.add(value)
        >>> window.mean, window.rise  # of 1, 1, 2, 4
        (2.0, 2.0)
    """

    def __init__(self, size: int) -> None:
        super().__init__(maxlen=size)

    @property
    def mean(self) -> float | None:
        """The mean of a full window."""
        return fmean(self) if len(self) == self.maxlen else None

    @property
    def rise(self) -> float | None:
        """The mean of a full window's later half less that of its earlier half."""
        values, half = list(self), len(self) // 2
        full = len(self) == self.maxlen
        return fmean(values[-half:]) - fmean(values[:half]) if full else None

    def add(self, value: float | None) -> None:
        """Append a step's value; a step without the metric adds nothing."""
        if value is not None:
            self.append(value)

    def restore(self, values: Iterable[float]) -> None:
        """Continue from saved values; a window that is shorter now keeps the newest."""
        self.clear()
        self.extend(values)


class Trend(ABC):
    """A metric of several steps, whose memory is saved with the stage.

    The memory is a window of each metric `watched`, and the attributes that `saved` names.
    """

    watched: ClassVar[tuple[str, ...]]
    saved: ClassVar[tuple[str, ...]] = ()

    def __init__(self, window: int, rewards: Mapping[str, RewardBase]) -> None:
        """`rewards` are those of the stage's samples."""
        self.windows = {name: Window(window) for name in self.watched}

    @abstractmethod
    def add(self, metrics: Mapping[str, float]) -> float | None:
        """Take a step's metrics; return the trend's, or None while the windows are not full."""

    def state(self) -> dict[str, Any]:
        """Return the memory as JSON."""
        windows = {name: list(window) for name, window in self.windows.items()}
        return windows | {name: getattr(self, name) for name in self.saved}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        for name, window in self.windows.items():
            window.restore(state[name])
        for name in self.saved:
            setattr(self, name, state[name])


class GuardSettings(Settings):
    """The bound of a metric, for how many steps it may be beyond, and the action then."""

    metric: ClassVar[str]
    side: ClassVar[Literal["above", "below"]]  # of the threshold, where the metric must not be
    remedy: ClassVar[str]  # the first thing to try

    threshold: float = Field(description="bound of the metric")
    action: Action = Field(
        default="warn",
        description="warn: one message until the metric is back within the threshold. stop: save a"
        " checkpoint and end the stage as failed. off: only log the metric",
    )
    patience: Count = Field(default=5, description="consecutive steps beyond the threshold")


class WindowGuardSettings(GuardSettings):
    """The bound of a metric that `trend` computes from means over windows of steps."""

    trend: ClassVar[type[Trend]]

    window: Count = Field(default=10, description="steps that one mean is taken over")


GUARDS: dict[str, type[GuardSettings]] = {}
Guard = TypeVar("Guard", bound=type[GuardSettings])


def guard(name: str) -> Callable[[Guard], Guard]:
    """Return a decorator that registers a guard's settings under its key in `guards:`."""

    def add(settings: Guard) -> Guard:
        if name in GUARDS:
            raise ValueError(f"guards: {name} is registered twice; rename one of them")
        GUARDS[name] = settings
        return settings

    return add
