"""A reward: a function of a problem and a response, its settings, and the table of its kinds.

A kind is one file of `stages.rewards.kinds`: its settings, and beside them the decorated function
that makes the reward from them. Never imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from parallel.errors import UserError
from parallel.settings import MOST, Mebibytes, Settings
from stages.data.problem import Problem

Seconds = Annotated[float, Field(gt=0, le=MOST)]
Unfinished = Literal["zero", "score"]


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise PydanticCustomError(
            "pattern", "should be a regular expression ({reason})", {"reason": str(error)}
        ) from None
    return text


Pattern = Annotated[str, AfterValidator(_regular_expression)]


class RewardError(UserError):
    """A reward that failed on a response: its sample has no reward, which differs from reward 0."""


@dataclass(frozen=True)
class Response:
    """A policy's response; `tokens` includes the end token, which a `finished` response has."""

    text: str
    tokens: int
    finished: bool = True


@dataclass(frozen=True)
class Steps:
    """A reward for each step of a response.

    Step i ends before character `ends[i]` of the response's text; the ends rise. An empty response
    has one step, which ends at 0.
    """

    ends: list[int]
    rewards: list[float]


Score = float | Steps
Reward = Callable[[Problem, Response], Score]


class RewardPoolSettings(Settings):
    """The processes that score responses, and how many failures a stage tolerates."""

    workers: Annotated[int, Field(gt=0, le=1024)] | None = Field(
        default=None,
        description="number of processes; null is one per core, at most 8, and 16 with a judge",
    )
    timeout_seconds: Seconds = Field(
        default=60.0,
        description="time limit of one reward on one response; then its worker is killed",
    )
    memory_mebibytes: Mebibytes = Field(default=4096, description="memory limit of one worker")
    max_failed_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.02,
        description="maximum share of a step's samples without a reward; above it the stage stops"
        " (one sample is always tolerated unless this is 0)",
    )


@dataclass(frozen=True)
class RewardContext:
    """The settings around a reward's, which stand at the dotted `key`."""

    key: str
    source: str  # prompts.source of the domain
    max_response_tokens: int
    pool: RewardPoolSettings | None


class RewardBase(Settings):
    """Settings that every kind of reward has."""

    judges_answer: ClassVar[bool] = True  # a score of 1 says that the problem is solved
    waits: ClassVar[bool] = False  # for something outside this machine, so it needs no core

    weight: float = Field(
        default=1.0, description="factor in the sample's reward; 0 only records the score"
    )
    unfinished: Unfinished = Field(
        default="zero", description="score of a truncated response: zero, or the reward's own score"
    )
    timeout_seconds: Seconds | None = Field(
        default=None, description="time limit for one response; null is rewards.timeout_seconds"
    )
    timed_out: float | None = Field(
        default=0.0,
        description="score of a response whose scoring times out, which its text may have caused;"
        " null drops the sample from training",
    )
    kind: str

    def rules(self, at: RewardContext) -> Iterator[tuple[str, str]]:
        """Yield each broken rule of these settings, as (dotted key, message)."""
        yield from ()

    def time_rule(self, at: RewardContext, longest: float, what: str) -> Iterator[tuple[str, str]]:
        """Yield a broken rule where the reward may take more seconds than its time limit."""
        limit, name = self.timeout_seconds, f"{at.key}.timeout_seconds"
        if limit is None and at.pool:
            limit, name = at.pool.timeout_seconds, "rewards.timeout_seconds"
        if limit is not None and longest >= limit:
            yield name, f"{limit:g} must be more than the {longest:g} seconds that {what}"

    def caution(self) -> str | None:
        """Return a warning that starts with the name of a field, or None."""
        return None

    def check_machine(self) -> None:
        """Raise RewardError where this machine can never run the reward."""


@dataclass(frozen=True)
class RewardKind:
    """A kind's settings class, its maker of rewards, and the heavy modules that this imports."""

    settings: type[RewardBase]
    make: Callable[[Any, Path], Reward]  # of the settings and a directory for the reward's files
    imports: tuple[str, ...]


REGISTERED: dict[str, RewardKind] = {}
Own = TypeVar("Own", bound=RewardBase)
Make = Callable[[Own, Path], Reward]


def register(
    settings: type[Own], imports: tuple[str, ...] = ()
) -> Callable[[Make[Own]], Make[Own]]:
    """Return a decorator that registers a function as the maker of rewards of these settings.

    Name in `imports` the heavy modules that the function imports: the rewards' forkserver loads
    them once, and `pipeline` never.
    """

    def decorate(make: Make[Own]) -> Make[Own]:
        kind = settings.model_fields["kind"].default
        if kind in REGISTERED:
            raise ValueError(f"{settings.__name__}: another reward has the kind {kind!r}")
        REGISTERED[kind] = RewardKind(settings, make, imports)
        return make

    return decorate
