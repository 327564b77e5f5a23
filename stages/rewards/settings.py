"""Settings that every reward has, and those of the processes that run rewards; no torch.

A kind of reward declares its own settings beside its function, in `stages.rewards.kinds`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from parallel.settings import MOST, Mebibytes, Settings

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
        default=None,
        description="time limit for one response; null is rewards.timeout_seconds",
    )
    timed_out: float | None = Field(
        default=0.0,
        description="score of a response whose scoring times out, which its text may have caused;"
        " null drops the sample from training",
    )
    kind: str

    def rules(
        self, key: str, source: str, max_response_tokens: int, pool: RewardPoolSettings | None
    ) -> Iterator[tuple[str, str]]:
        """Yield each broken rule of these settings, as (dotted key, message).

        They stand at `key` of a domain with this `prompts.source` and this
        `sampling.max_response_tokens`.
        """
        yield from ()

    def caution(self) -> str | None:
        """Return a warning that starts with the name of a field, or None."""
        return None

    def check_machine(self) -> None:
        """Raise RewardError where this machine can never run the reward."""


def time_rule(
    key: str, reward: RewardBase, pool: RewardPoolSettings | None, longest: float, what: str
) -> Iterator[tuple[str, str]]:
    """Yield a broken rule where a reward may take more seconds than its time limit."""
    limit, name = reward.timeout_seconds, f"{key}.timeout_seconds"
    if limit is None and pool:
        limit, name = pool.timeout_seconds, "rewards.timeout_seconds"
    if limit is not None and longest >= limit:
        yield name, f"{limit:g} must be more than the {longest:g} seconds that {what}"
