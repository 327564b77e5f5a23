"""The cold start's demonstrations: a mixture of careful and careless work.

Reinforcement learning then has something to select: a model shown only careful work gained nothing
from it at this size.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from stages.data.formats import FORMATS
from stages.data.problem import Problem
from stages.data.prompts import PromptStream
from stages.data.sources.settings import GeneratedDemonstrationSettings


@dataclass(frozen=True)
class Demonstration:
    """A problem and a response to imitate: right where it is `worked`, else wrong."""

    problem: Problem
    response: str
    worked: bool


def demonstrations(
    settings: GeneratedDemonstrationSettings, prompts: PromptStream, seed: int
) -> list[Demonstration]:
    """Return demonstrations of the next `settings.count` problems of `prompts`.

    Each is worked with probability `settings.worked_fraction`, a pure function of `seed` and the
    domain.
    """
    random = Random(f"{seed}/{prompts.domain}/demonstrations")
    return [
        demonstrate(problem, random.random() < settings.worked_fraction, random)
        for problem in prompts.take(settings.count)
    ]


def demonstrate(problem: Problem, worked: bool, random: Random) -> Demonstration:
    """Return `<working>answer` where `worked`, else `<>` and a careless, wrong answer."""
    form = FORMATS[problem.fields["dataset"]]
    if worked:
        working = form.working(problem.fields["entry"])
        return Demonstration(problem, f"<{working}>{problem.answer}", worked=True)
    return Demonstration(problem, f"<>{form.careless(problem.answer, random)}", worked=False)
