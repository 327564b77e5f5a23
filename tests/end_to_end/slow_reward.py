"""A reward in which the samples of a model differ that knows nothing yet."""

from __future__ import annotations

import time

from stages.data.problem import Problem

SECONDS = 0.03  # so that a worker which is killed is often at a response


def even(problem: Problem, response: str) -> float:
    """Return the share of the response's characters whose number is even."""
    time.sleep(SECONDS)
    return sum(ord(character) % 2 == 0 for character in response) / (len(response) + 1)
