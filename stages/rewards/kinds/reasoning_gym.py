"""reasoning-gym's scorers on `<working>answer`, or on the answer in tags to a chat prompt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from stages.data.problem import Problem
from stages.data.reasoning_gym import is_compact, score, tagged_answer
from stages.rewards.reward import Explained, Response, Reward, RewardBase, RewardContext, register

CORRECT = 0.999  # the scorers give partial credit, even for merely containing the answer
RESPONSE = re.compile(r"<(?P<working>[^>]*)>(?P<answer>.*)", re.DOTALL)


class ReasoningGymReward(RewardBase):
    """reasoning-gym's own scorer: 1 for the whole answer, or partial credit.

    It scores `<working>answer`; of prompts.form chat what stands between the last `<answer>` and
    `</answer>`, with all before it as the working.
    """

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


@register(ReasoningGymReward, imports=("reasoning_gym",))
def make(settings: ReasoningGymReward, _directory: Path) -> Reward:
    """Return the reward."""
    scored = exact if settings.credit == "whole" else partial
    worked = settings.working == "required"

    def reward(problem: Problem, response: Response) -> Explained:
        if settings.working != "optional" and shows_work(problem, response.text) != worked:
            return 0.0, "no working before the answer" if worked else "working, which is forbidden"
        value = scored(problem, response.text)
        if value >= CORRECT:
            return value, ""
        if _split_response(problem, response.text) is not None:
            return value, f"expected {problem.answer}" if problem.answer else "not a solution"
        form = "<working>answer" if is_compact(problem) else "an answer in <answer> and </answer>"
        return value, f"not {form}"

    return reward


def shows_work(problem: Problem, response: str) -> bool:
    """Return whether the working before the answer has more than white space."""
    working_and_answer = _split_response(problem, response)
    return working_and_answer is not None and bool(working_and_answer[0].strip())


def exact(problem: Problem, response: str) -> float:
    """Return 1 where the dataset scores the answer in `response` as right, else 0."""
    return float(partial(problem, response) >= CORRECT)


def partial(problem: Problem, response: str) -> float:
    """Return the dataset's score of the answer, within [0, 1]; 0 for a response of another form."""
    working_and_answer = _split_response(problem, response)
    return 0.0 if working_and_answer is None else score(problem, working_and_answer[1])


def _split_response(problem: Problem, response: str) -> tuple[str, str] | None:
    """Return the working and the answer, or None for a response of another form."""
    if not is_compact(problem):
        return tagged_answer(response)
    match = RESPONSE.fullmatch(response)
    return (match["working"], match["answer"]) if match else None
