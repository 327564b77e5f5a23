"""Mathematical equality by math-verify: sympy's, of what can be read as LaTeX or an expression.

math-verify's own time limits are signals, which need a process's main thread and miss whatever does
not return to Python. They are off: the pool kills a worker that takes too long.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from stages.data.problem import Problem
from stages.rewards.reward import Response, Reward, RewardError
from stages.rewards.settings import MathReward

ANY = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
MARKED = re.compile(r"\$|\\boxed|\\\(|\\\[")  # LaTeX that says where its mathematics stands


def make(settings: MathReward, _directory: Path) -> Reward:
    """1 where the response's last answer equals the problem's."""
    for module in ("grader", "parser"):  # each warns that its time limit is off
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)

    def reward(problem: Problem, response: Response) -> float:
        if settings.boxed and "\\boxed" not in response.text:
            return 0.0
        return float(verify(_reference(problem), _read(response.text), timeout_seconds=None))

    return reward


def _reference(problem: Problem) -> list[Any]:
    answer = problem.answer
    found = _read(answer if MARKED.search(answer) else f"\\boxed{{{answer}}}")
    if not answer.strip() or not found:
        raise RewardError(f"cannot read the problem's answer {answer!r} as mathematics")
    return found


def _read(text: str) -> list[Any]:
    found: list[Any] = parse(text, extraction_config=ANY, parsing_timeout=None)
    return found
