"""A curriculum that prefers prompts at the frontier of what the policy can solve.

A group whose samples are all right or all wrong teaches nothing; the samples of a prompt that is
solved with probability p differ with variance p (1 - p). So p is estimated for every difficulty (a
length, or the value of a field) from the stage's own samples, and of the stream's next candidates
the one with the largest p (1 - p) is taken. p is sampled from its posterior instead of set to its
mean (Thompson 1933), so that rare difficulties are tried.

Endless streams and files behave alike: a row that is passed over returns after all other rows.
With c candidates a difficulty comes at most c times as often as in the stream, and none is shut
out: one whose share of the stream is s is taken at least s^c of the time.
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

DIFFICULTIES = 4096  # remembered at once; the least recently seen are forgotten first


class Frontier:
    """One domain's solve rates by difficulty, and the choice of prompts by them; main rank only.

    `length` counts a prompt's tokens. The choice is a pure function of the seed, the stream's
    cursor and the solve rates.
    """

    def __init__(
        self, settings: FrontierSettings, domain: str, length: Callable[[str], int], seed: int
    ) -> None:
        self._settings, self._domain = settings, domain
        self._length, self._seed = length, seed
        self._tallies: dict[str, tuple[float, float]] = {}  # right and wrong, oldest first
        self._passed_over = 0

    def take(self, stream: PromptStream) -> Problem:
        """Return the best of the stream's next candidates; the stream continues after the last.

        Raises DomainError when a prompt lacks the field that states its difficulty.
        """
        draw = Random(seed_of(self._seed, stream.cursor))
        candidates = stream.take(self._settings.candidates)
        self._passed_over += len(candidates) - 1

        def promise(problem: Problem) -> float:  # p (1 - p), p from Beta(1 + right, 1 + wrong)
            right, wrong = self._tallies.get(self.difficulty(problem), (0.0, 0.0))
            chance = draw.betavariate(1 + right, 1 + wrong)
            return chance * (1 - chance)

        return max(candidates, key=promise)

    def update(self, problem: Problem, right: int, wrong: int) -> None:
        """Count the samples of a prompt that solved it, and those that did not."""
        difficulty = self.difficulty(problem)
        before = self._tallies.pop(difficulty, (0.0, 0.0))
        tally = before[0] + right, before[1] + wrong
        shrink = min(1.0, self._settings.memory / max(sum(tally), 1))
        self._tallies[difficulty] = tally[0] * shrink, tally[1] * shrink
        if len(self._tallies) > DIFFICULTIES:
            del self._tallies[next(iter(self._tallies))]

    def difficulty(self, problem: Problem) -> str:
        """Return the name of a prompt's difficulty."""
        if self._settings.field is None:
            step = self._settings.length_step
            return str(self._length(problem.prompt) // step * step)
        return json.dumps(self._value(problem, self._settings.field), sort_keys=True, default=str)

    def passed_over(self) -> int:
        """Return the number of prompts passed over since the last call."""
        count, self._passed_over = self._passed_over, 0
        return count

    def state(self) -> dict[str, Any]:
        """Return the solve rates and the unreported count as JSON."""
        tallies = [[name, *tally] for name, tally in self._tallies.items()]
        return {"tallies": tallies, "passed_over": self._passed_over}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._tallies = {name: (right, wrong) for name, right, wrong in state["tallies"]}
        self._passed_over = state["passed_over"]

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
