"""What a reward is: a function of a problem and a response that knows nothing of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stages.data.problem import Problem


class RewardError(Exception):
    """A reward that failed on a response: its sample has no reward, which is not a reward of 0."""


@dataclass(frozen=True)
class Response:
    """What a policy wrote. `tokens` counts the end token; `finished` is false where it has none."""

    text: str
    tokens: int
    finished: bool = True


@dataclass(frozen=True)
class Steps:
    """A reward for each step of a response.

    Step i ends before character `ends[i]` of the response's text; the ends rise. A response of no
    text has one step, which ends at 0.
    """

    ends: list[int]
    rewards: list[float]


Score = float | Steps
Reward = Callable[[Problem, Response], Score]
