"""Rewards for a response's length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from parallel.settings import Tokens
from stages.data.thoughts import Markers
from stages.rewards.reward import (
    AnswerReward,
    Response,
    Reward,
    RewardBase,
    RewardContext,
    Unfinished,
    register,
)

Length = Annotated[int, Field(ge=0, le=1_000_000_000)]

COUNTS: dict[str, Callable[[Response], int]] = {
    "tokens": lambda response: response.tokens,
    "words": lambda response: len(response.text.split()),
    "characters": lambda response: len(response.text),
}


class OverlongReward(RewardBase):
    """Soft overlong punishment (DAPO): 0, falling to -1 over the last tokens before the limit."""

    judges_answer: ClassVar[bool] = False
    kind: Literal["overlong"] = "overlong"
    max_tokens: Tokens = Field(description="L, the limit, end token included")
    buffer_tokens: Tokens = Field(description="c, the last tokens, over which the reward falls")
    unfinished: Unfinished = "score"

    def rules(self, at: RewardContext) -> Iterator[tuple[str, str]]:
        limit, buffer, longest = self.max_tokens, self.buffer_tokens, at.max_response_tokens
        if buffer > limit:
            yield f"{at.key}.buffer_tokens", f"{buffer} is more than max_tokens = {limit}"
        if limit > longest:
            what = f"{limit} is more than the domain's sampling.max_response_tokens = {longest}"
            yield f"{at.key}.max_tokens", f"{what}, where responses are truncated"


class LengthReward(AnswerReward):
    """1 where the response is as long as asked, else less: it falls to 0 over `slack`."""

    judges_answer: ClassVar[bool] = False
    kind: Literal["length"] = "length"
    unit: Literal["tokens", "words", "characters"] = Field(
        default="tokens", description="unit of the lengths"
    )
    at_least: Length = Field(default=0, description="shortest length that earns 1")
    at_most: Annotated[Length, Field(gt=0)] | None = Field(
        default=None, description="longest length that earns 1; null: no bound"
    )
    slack: Length = Field(
        default=0, description="distance from the bounds at which the reward reaches 0"
    )
    thought_markers: tuple[Markers, ...] = ()
    unfinished: Unfinished = "score"

    def rules(self, at: RewardContext) -> Iterator[tuple[str, str]]:
        if self.thought_markers and self.unit == "tokens":
            what = "tokens are counted with the thoughts; set unit: words or characters"
            yield f"{at.key}.thought_markers", what
        low, high = self.at_least, self.at_most
        if high is not None and low > high:
            yield f"{at.key}.at_least", f"{low} is more than at_most = {high}"


@register(OverlongReward)
def make_overlong(settings: OverlongReward, _directory: Path) -> Reward:
    """Return the reward."""
    longest, buffer = settings.max_tokens, settings.buffer_tokens
    return lambda _, response: soft_overlong(response.tokens, longest, buffer)


@register(LengthReward)
def make_length(settings: LengthReward, _directory: Path) -> Reward:
    """Return the reward.

    Example: one word too many is half of the way over a slack of 1.
        >>> reward = make_length(LengthReward(unit="words", at_most=3, slack=1), Path())
        >>> [reward(None, Response(text, 9)) for text in ("a b c", "a b c d", "a b c d e")]
        [1.0, 0.5, 0.0]
    """
    count = COUNTS[settings.unit]

    def reward(_: object, response: Response) -> float:
        length = count(response)
        above = length - settings.at_most if settings.at_most is not None else 0
        off = max(settings.at_least - length, above, 0)
        return max(0.0, 1.0 - off / (settings.slack + 1))

    return reward


def soft_overlong(length: int, longest: int, buffer: int) -> float:
    """Return the soft overlong punishment (DAPO, arXiv 2503.14476), within [-1, 0].

    Example: a limit of 10 tokens, and a punishment that grows over the last 4.
        >>> [soft_overlong(length, longest=10, buffer=4) for length in (6, 7, 10, 11)]
        [0.0, -0.25, -1.0, -1.0]
    """
    return -1.0 if length > longest else min(0.0, ((longest - buffer) - length) / buffer)
