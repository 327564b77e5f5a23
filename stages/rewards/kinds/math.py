"""Mathematical equality of LaTeX or plain expressions, by math-verify and sympy.

math-verify's time limits are signals, which need a process's main thread and miss code that does
not return to Python. They are off: the pool kills a worker at its time limit.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from stages.data.problem import Problem
from stages.rewards.reward import (
    AnswerReward,
    Explained,
    Response,
    Reward,
    RewardError,
    Seconds,
    register,
)

MARKED = re.compile(r"\$|\\boxed|\\\(|\\\[")  # LaTeX that marks its mathematics


class MathReward(AnswerReward):
    """1 where math-verify finds the response's answer equal to the problem's, else 0."""

    kind: Literal["math"] = "math"
    boxed: bool = Field(default=False, description="count only answers in \\boxed{}")
    timeout_seconds: Seconds | None = 10.0

    def row_violation(self, row: Mapping[str, Any], answer: str) -> str | None:
        empty = "the row's answer is empty (prompts.answer names its column)"
        return None if answer.strip() else f"no answer to compare with: {empty}"

    def problem_violation(self, problem: Problem) -> str | None:
        """Return why math-verify cannot read the problem's answer, or None."""
        from math_verify import verify

        try:
            found = _reference(problem)
        except RewardError as error:
            return str(error)
        # Of text that is no mathematics it returns the text, which it finds equal to nothing.
        equal = verify(found, found, timeout_seconds=None)
        return None if equal else f"math-verify cannot compare the answer {problem.answer!r}"


@register(MathReward, imports=("math_verify",))
def make(settings: MathReward, _directory: Path) -> Reward:
    """Return the reward, which compares the last answer of the response."""
    from math_verify import verify

    for module in ("grader", "parser"):  # each warns that its time limit is off
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)

    def reward(problem: Problem, response: Response) -> Explained:
        if settings.boxed and "\\boxed" not in response.text:
            return 0.0, "no answer in \\boxed{}"
        expected, found = _reference(problem), _read(response.text)
        if verify(expected, found, timeout_seconds=None):
            return 1.0, ""
        said = f"read {found[-1]}" if found else "no answer found"
        return 0.0, f"{said}; expected {problem.answer}"

    return reward


def _reference(problem: Problem) -> list[Any]:
    answer = problem.answer
    found = _read(answer if MARKED.search(answer) else f"\\boxed{{{answer}}}")
    if not answer.strip() or not found:
        raise RewardError(f"cannot read the problem's answer {answer!r} as mathematics")
    return found


def _read(text: str) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    any_form = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    found: list[Any] = parse(text, extraction_config=any_form, parsing_timeout=None)
    return found
