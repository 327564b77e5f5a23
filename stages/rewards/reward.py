"""A reward: a function of a problem and a response, and the table that its kind registers in.

A kind is one file of `stages.rewards.kinds`: its settings, and beside them the decorated function
that makes the reward from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from parallel.errors import UserError
from stages.data.problem import Problem
from stages.rewards.settings import RewardBase


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
Own = TypeVar("Own", bound=RewardBase)


@dataclass(frozen=True)
class RewardKind:
    """A kind's settings class, its maker of rewards, and the heavy modules that the maker imports.

    `make` takes the settings and a directory for the reward's files.
    """

    settings: type[RewardBase]
    make: Callable[[Any, Path], Reward]
    imports: tuple[str, ...]


REGISTERED: dict[str, RewardKind] = {}


def register(
    settings: type[Own], imports: tuple[str, ...] = ()
) -> Callable[[Callable[[Own, Path], Reward]], Callable[[Own, Path], Reward]]:
    """Return a decorator that registers a function as the maker of rewards of these settings.

    Name in `imports` the heavy modules that the function imports: the rewards' forkserver loads
    them once, and `pipeline` never.
    """

    def decorate(make: Callable[[Own, Path], Reward]) -> Callable[[Own, Path], Reward]:
        kind = settings.model_fields["kind"].default
        if kind in REGISTERED:
            raise ValueError(f"{settings.__name__}: another reward has the kind {kind!r}")
        REGISTERED[kind] = RewardKind(settings, make, imports)
        return make

    return decorate
