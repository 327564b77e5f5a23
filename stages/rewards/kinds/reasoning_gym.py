"""reasoning-gym's scorers on responses of the compact form `<working>answer`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from stages.data.problem import Problem
from stages.data.reasoning_gym import score
from stages.rewards.reward import (
    Explained,
    Response,
    Reward,
    RewardBase,
    RewardContext,
    register,
)

CORRECT = 0.999  # the scorers give partial credit, even for merely containing the answer
RESPONSE = re.compile(r"<(?P<working>[^>]*)>(?P<answer>.*)", re.DOTALL)


class ReasoningGymReward(RewardBase):
    """reasoning-gym's own scorer on `<working>answer`: the whole answer, or partial credit."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    credit: Literal["whole", "partial"] = Field(
        default="whole",
        description="whole: 1 for a right answer, else 0; partial: the scorer's number",
    )
    working: Literal["optional", "required", "forbidden"] = Field(
        default="optional",
        description="required: a response without working, `<>answer`, scores 0; forbidden: one"
        " with any does",
    )

    def rules(self, at: RewardContext) -> Iterator[tuple[str, str]]:
        if at.source != "reasoning_gym":
            what = "only prompts.source: reasoning_gym has this scorer; use other rewards"
            yield f"{at.key}.kind", what


@register(ReasoningGymReward)
def make(settings: ReasoningGymReward, _directory: Path) -> Reward:
    """Return the reward."""
    scored = exact if settings.credit == "whole" else partial
    worked = settings.working == "required"

    def reward(problem: Problem, response: Response) -> Explained:
        if settings.working != "optional" and shows_work(response.text) != worked:
            return 0.0, "no working before the answer" if worked else "working, which is forbidden"
        value = scored(problem, response.text)
        if value >= CORRECT:
            return value, ""
        is_form = RESPONSE.fullmatch(response.text) is not None
        return value, f"expected {problem.answer}" if is_form else "not <working>answer"

    return reward


def shows_work(response: str) -> bool:
    """Return whether the working of `<working>answer` has more than white space."""
    match = RESPONSE.fullmatch(response)
    return match is not None and bool(match["working"].strip())


def exact(problem: Problem, response: str) -> float:
    """Return 1 where `response` is `<working>answer` and the dataset scores it as right, else 0."""
    return float(partial(problem, response) >= CORRECT)


def partial(problem: Problem, response: str) -> float:
    """Return the dataset's score of the answer, within [0, 1]; 0 for a response of another form."""
    match = RESPONSE.fullmatch(response)
    return score(problem, match["answer"]) if match else 0.0
