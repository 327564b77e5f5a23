"""Mathematical equality of LaTeX or plain expressions, by math-verify and sympy.

math-verify's time limits are signals, which need a process's main thread and miss code that does
not return to Python. They are off: the pool kills a worker at its time limit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from stages.data.problem import Problem
from stages.rewards.mathematics import MARKED, boxes, equal, is_false_equation, numbers, read
from stages.rewards.reward import (
    AnswerReward,
    Explained,
    Response,
    Reward,
    RewardError,
    Seconds,
    register,
)


class MathReward(AnswerReward):
    """1 where math-verify finds the response's answer equal to the problem's, else 0."""

    kind: Literal["math"] = "math"
    boxed: bool = Field(default=False, description="count only answers in \\boxed{}")
    timeout_seconds: Seconds | None = 10.0

    def row_violation(self, row: Mapping[str, Any], answer: str) -> str | None:
        empty = "the row's answer is empty (prompts.answer names its column)"
        return None if answer.strip() else f"no answer to compare with: {empty}"

    def problem_violation(self, problem: Problem) -> str | None:
        """Return why math-verify cannot read the problem's answer, or None.

        Takes long where the answer is too large to evaluate, as each comparison would.
        """
        try:
            expected = _reference(problem)
        except RewardError as error:
            return str(error)
        for reading in expected:
            if is_false_equation(reading[0]):
                return f"the answer {problem.answer!r} equates unequal numbers"
            for _ in numbers(reading[0]):
                pass
        # Of text that is no mathematics it returns the text, which it finds equal to nothing.
        is_equal = any(equal(reading, reading) for reading in expected)
        return None if is_equal else f"math-verify cannot compare the answer {problem.answer!r}"


@register(MathReward, imports=("math_verify",))
def make(settings: MathReward, _directory: Path) -> Reward:
    """Return the reward, which compares the last answer of the response."""
    import math_verify  # noqa: F401 - its loggers exist from here on

    for module in ("grader", "parser"):  # each warns that its time limit is off
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)

    def reward(problem: Problem, response: Response) -> Explained:
        text = boxes(response.text) if settings.boxed else response.text
        if settings.boxed and not text:
            return 0.0, "no answer in \\boxed{}"
        expected, answers = _reference(problem), read(text)
        if any(equal(*pair) for pair in product(expected, answers)):
            return 1.0, ""
        reading = f"read {answers[0][-1]}" if answers else "no answer found"
        return 0.0, f"{reading}; expected {problem.answer}"

    return reward


def _reference(problem: Problem) -> list[list[Any]]:
    """Return the readings of the problem's answer. Raises RewardError where there are none."""
    answer = problem.answer
    # In a box it is read whole, and not searched for a number.
    readings = read(answer if MARKED.search(answer) else f"\\boxed{{{answer}}}")
    if not answer.strip() or not readings:
        raise RewardError(f"cannot read the problem's answer {answer!r} as mathematics")
    return readings
