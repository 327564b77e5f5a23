"""The grade of a response: the weighted sum of its domain's rewards, or why there is none."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from numbers import Real
from pathlib import Path
from types import MappingProxyType

from stages.data.problem import Problem
from stages.rewards.registry import RewardSettings, make
from stages.rewards.reward import Response, RewardError, Score, Steps

SOLVED = 1.0
LONGEST = 1000  # characters of what went wrong


@dataclass(frozen=True)
class Grade:
    """The rewards of a response.

    `parts` holds every reward before its weight. `steps`, where one of them gave any, are (number
    of characters that the step ends with, weighted reward). Where a reward failed, `reward` is None
    and `failure` one line that says why. A reward of weight 0 is only recorded: where it fails it
    has no part but a line in `watch_failures`, and the grade stands.
    """

    reward: float | None
    parts: dict[str, float]
    steps: tuple[tuple[int, float], ...] = ()
    failure: str | None = None
    watch_failures: tuple[str, ...] = ()


class Grader:
    """The rewards of one domain. Raises DomainError where a reward cannot be made."""

    def __init__(
        self, domain: str, settings: Mapping[str, RewardSettings], directory: Path
    ) -> None:
        self._settings = settings
        self._rewards = {
            name: make(domain, name, each, directory) for name, each in settings.items()
        }

    def grade(
        self,
        problem: Problem,
        response: Response,
        begin: Callable[[int, float | None], None] = lambda index, seconds: None,
        known: Mapping[str, float | None] = MappingProxyType({}),
    ) -> Grade:
        """Return the grade of a response.

        `known` rewards are not run: they have that score, or are skipped where it is None. `begin`
        is called before every other reward, with its index and its time limit in seconds.
        """
        parts: dict[str, float] = {}
        total = 0.0
        steps: tuple[tuple[int, float], ...] = ()
        watch_failures: list[str] = []
        for index, (name, settings) in enumerate(self._settings.items()):
            if (given := known.get(name)) is None and name in known:
                continue
            try:
                score: float | Steps = 0.0 if given is None else given
                if given is None:
                    begin(index, settings.timeout_seconds)
                    if settings.unfinished == "score" or response.finished:
                        returned = self._rewards[name](problem, response)
                        score = _checked(returned, len(response.text))
                if isinstance(score, Steps):
                    if settings.weight:
                        if steps:
                            raise RewardError("only one reward of a domain may return steps")
                        weighted = [settings.weight * each for each in score.rewards]
                        steps = tuple(zip(score.ends, weighted, strict=True))
                    score = sum(score.rewards) / len(score.rewards)
                parts[name] = score
                total += settings.weight * score
                if not isfinite(total):
                    raise RewardError(f"returned {score!r}, which makes the sum of rewards {total}")
            except BaseException as error:  # also SystemExit: a reward must not end its worker
                line = failure(problem, response, name, _said(error))
                if settings.weight:
                    return Grade(None, parts, (), line, tuple(watch_failures))
                watch_failures.append(line)
        return Grade(total, parts, steps, None, tuple(watch_failures))


def failure(problem: Problem, response: Response, reward: str, what: str) -> str:
    """Return one line about a reward that failed on a response."""
    what = what if len(what) <= LONGEST else f"{what[:LONGEST]}..."
    return (
        f"domains.{problem.domain}.rewards.{reward}: {what} for problem {problem.prompt!r}"
        f" ({problem.key[:12]}) and response {response.text!r}"
    )


def solved(settings: Mapping[str, RewardSettings], parts: Mapping[str, float]) -> bool:
    """Return whether every reward that judges the answer is 1; where none does, every reward.

    Rewards of weight 0 do not count.
    """
    judging = [name for name, each in settings.items() if each.judges_answer and each.weight > 0]
    counting = [name for name, each in settings.items() if each.weight]
    return all(parts.get(name, 0.0) >= SOLVED for name in judging or counting or settings)


def _checked(score: Score, characters: int) -> float | Steps:
    if not isinstance(score, Steps):
        return _finite(score)
    if len(score.ends) != len(score.rewards) or not score.ends:
        raise RewardError(f"returned {score!r}, which must have a reward for each of its ends")
    ends = [0 if characters else -1, *score.ends]  # no text is one step, which ends at 0
    if any(before >= after for before, after in pairwise(ends)) or ends[-1] > characters:
        raise RewardError(
            f"returned {score!r}, whose ends must rise from above 0 to {characters} at most"
        )
    return Steps([int(end) for end in score.ends], [_finite(each) for each in score.rewards])


def _finite(score: float) -> float:
    if not isinstance(score, Real) or not isfinite(score):
        raise RewardError(f"returned {score!r}, not a finite number")
    return float(score)


def _said(error: BaseException) -> str:
    if isinstance(error, RewardError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    try:
        said = repr(error)
    except Exception:  # a user's exception class may fail in __repr__
        said = type(error).__name__
    return f"raised {said}{where}"
