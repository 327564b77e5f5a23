"""Rewards of how long a response is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stages.rewards.reward import Response, Reward
from stages.rewards.settings import LengthReward, OverlongReward

COUNTS: dict[str, Callable[[Response], int]] = {
    "tokens": lambda response: response.tokens,
    "words": lambda response: len(response.text.split()),
    "characters": lambda response: len(response.text),
}


def make_overlong(settings: OverlongReward, _directory: Path) -> Reward:
    """Soft overlong punishment of the response's tokens."""
    return lambda _, response: soft_overlong(
        response.tokens, settings.max_tokens, settings.buffer_tokens
    )


def make_length(settings: LengthReward, _directory: Path) -> Reward:
    """1 within the bounds, falling to 0 over the slack around them."""
    count = COUNTS[settings.unit]

    def reward(_: object, response: Response) -> float:
        length = count(response)
        above = length - settings.at_most if settings.at_most is not None else 0
        off = max(settings.at_least - length, above, 0)
        return max(0.0, 1.0 - off / (settings.slack + 1))

    return reward


def soft_overlong(length: int, longest: int, buffer: int) -> float:
    """Section 1 of the algorithms (DAPO, arXiv 2503.14476), within [-1, 0]."""
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return ((longest - buffer) - length) / buffer
    return -1.0
