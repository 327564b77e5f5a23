"""reasoning-gym's scorers on responses of the compact form `<working>answer`."""

from __future__ import annotations

import re
from pathlib import Path

from stages.data.problem import Problem
from stages.data.reasoning_gym_source import score
from stages.rewards.reward import Reward
from stages.rewards.settings import ReasoningGymReward

CORRECT = 0.999  # the scorers give partial credit, even for merely containing the answer
RESPONSE = re.compile(r"<[^>]*>(?P<answer>.*)", re.DOTALL)


def make(settings: ReasoningGymReward, _directory: Path) -> Reward:
    """The whole answer or nothing, or partial credit."""
    scored = exact if settings.credit == "whole" else partial
    return lambda problem, response: scored(problem, response.text)


def exact(problem: Problem, response: str) -> float:
    """1 where `response` reads `<working>answer` and the dataset scores it as right, else 0."""
    return float(partial(problem, response) >= CORRECT)


def partial(problem: Problem, response: str) -> float:
    """The dataset's score of the answer, within [0, 1]; 0 where `response` reads otherwise."""
    match = RESPONSE.fullmatch(response)
    return score(problem, match["answer"]) if match else 0.0
