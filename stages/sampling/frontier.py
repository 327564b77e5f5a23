"""Prompts near the frontier of what the policy can do come more often.

A group whose samples are all right or all wrong teaches nothing, and p (1 - p) of a prompt that is
solved with probability p is how much its samples differ. So p is estimated for every difficulty (a
length, or the value of a field), from what the stage's own samples of it earned, and of the next
few prompts of the stream the one with the largest p (1 - p) is taken. p is drawn from its posterior
and not the mean of it (Thompson 1933), so that a difficulty that was seldom seen is tried.

The same holds for endless streams and for files: a row that was passed over has its next turn when
all rows have had theirs. With c candidates a difficulty comes at most c times as often as in the
stream, and none is shut out: one whose share of the stream is s is taken at least s^c of the time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from stages.data.problem import DomainError, Problem
from stages.data.prompts import PromptStream
from stages.guards.settings import FrontierSettings
from stages.objectives.groups import seed_of

DIFFICULTIES = 4096  # remembered at once; beyond it, those that were not seen for longest are not


class Frontier:
    """Takes one domain's prompts from its stream; main rank only.

    `length` counts a prompt's tokens. What is taken is a pure function of the seed, the stream's
    cursor and what was learned.
    """

    def __init__(
        self, settings: FrontierSettings, domain: str, length: Callable[[str], int], seed: int
    ) -> None:
        self._settings = settings
        self._domain = domain
        self._length = length
        self._seed = seed
        self._tallies: dict[str, tuple[float, float]] = {}  # right and wrong, oldest first
        self._passed_over = 0

    def take(self, stream: PromptStream) -> Problem:
        """The best of the stream's next candidates; the stream goes on after the last of them.

        Raises DomainError where a prompt has not the field that says how difficult it is.
        """
        draw = Random(seed_of(self._seed, stream.cursor))
        candidates = stream.take(self._settings.candidates)
        self._passed_over += len(candidates) - 1
        return max(candidates, key=lambda problem: self._promise(problem, draw))

    def learn(self, problem: Problem, right: int, wrong: int) -> None:
        """Take in how many samples of a prompt solved it, and how many did not."""
        difficulty = self.difficulty(problem)
        before = self._tallies.pop(difficulty, (0.0, 0.0))
        tally = before[0] + right, before[1] + wrong
        shrink = min(1.0, self._settings.memory / max(sum(tally), 1))
        self._tallies[difficulty] = tally[0] * shrink, tally[1] * shrink
        if len(self._tallies) > DIFFICULTIES:
            del self._tallies[next(iter(self._tallies))]

    def difficulty(self, problem: Problem) -> str:
        """The name of a prompt's difficulty."""
        if self._settings.field is None:
            step = self._settings.length_step
            return str(self._length(problem.prompt) // step * step)
        return json.dumps(self._value(problem, self._settings.field), sort_keys=True, default=str)

    def passed_over(self) -> int:
        """How many prompts were passed over since the last call."""
        count, self._passed_over = self._passed_over, 0
        return count

    def state(self) -> dict[str, Any]:
        """What was learned, and what is not reported yet, as JSON."""
        tallies = [[name, *tally] for name, tally in self._tallies.items()]
        return {"tallies": tallies, "passed_over": self._passed_over}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue there."""
        self._tallies = {name: (right, wrong) for name, right, wrong in state["tallies"]}
        self._passed_over = state["passed_over"]

    def _promise(self, problem: Problem, draw: Random) -> float:
        """p (1 - p), for p drawn from Beta(1 + right, 1 + wrong)."""
        right, wrong = self._tallies.get(self.difficulty(problem), (0.0, 0.0))
        chance = draw.betavariate(1 + right, 1 + wrong)
        return chance * (1 - chance)

    def _value(self, problem: Problem, field: str) -> Any:
        value: Any = problem.fields
        for part in field.split("."):
            if not isinstance(value, Mapping) or part not in value:
                known = ", ".join(sorted(map(str, value))) if isinstance(value, Mapping) else "none"
                raise DomainError(
                    self._domain,
                    "curriculum.field",
                    f"the row of {problem.prompt!r} has no field {field}; at {part} it has {known}",
                )
            value = value[part]
        return value
