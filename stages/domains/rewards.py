"""Rewards: a number for a response to a problem.

A reward of one's own is any importable function(problem, response text) -> float, named in a
domain's `reward` as package.module:function.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from math import isfinite
from numbers import Real

from stages.domains.problem import DomainError, Problem
from stages.domains.reasoning_gym_source import score

Reward = Callable[[Problem, str], float]

CORRECT = 0.999  # the scorers give partial credit, even for merely containing the answer
RESPONSE = re.compile(r"<[^>]*>(?P<answer>.*)", re.DOTALL)


class RewardError(Exception):
    """A reward that failed on a response: its sample has no reward, which is not a reward of 0."""


def exact(problem: Problem, response: str) -> float:
    """1 where `response` reads `<working>answer` and the dataset scores it as right, else 0."""
    match = RESPONSE.fullmatch(response)
    return float(match is not None and score(problem, match["answer"]) >= CORRECT)


def grade(reward: Reward, problem: Problem, response: str, finished: bool) -> float:
    """The reward of a response; 0 where it was cut off before its end token (`finished` false).

    Raises RewardError, naming the domain and the problem, where the reward raises or returns
    anything but a finite number.
    """
    if not finished:
        return 0.0
    try:
        value = reward(problem, response)
    except (Exception, SystemExit) as error:  # a reward may not end the stage quietly either
        raise _failure(problem, response, f"raised {error!r}") from error
    if not isinstance(value, Real) or not isfinite(value):
        raise _failure(problem, response, f"returned {value!r}, not a finite number")
    return float(value)


def load_reward(domain: str, name: str) -> Reward:
    """The function that a domain's `reward` setting names as package.module:function.

    Raises DomainError where it cannot be imported or called.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # whatever a module of one's own raises while it is imported
        raise DomainError(domain, "reward", f"cannot import {module_name}: {error!r}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise DomainError(domain, "reward", f"{module_name} has no function {function_name!r}")
    return function


def _failure(problem: Problem, response: str, what: str) -> RewardError:
    return RewardError(
        f"experts.{problem.domain}.reward: {what} for problem {problem.prompt!r}"
        f" ({problem.key[:12]}) and response {response!r}"
    )
