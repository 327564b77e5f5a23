"""The reward for a program: the share of its problem's tests that it passes, run contained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from stages.domains.code_settings import CodeRewardSettings
from stages.domains.sandbox import Limits, score

# The last one, since the first ones are often drafts; one that is cut off reaches to the end.
FENCE = re.compile(r"^```python[ \t]*\n(?P<program>.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)


class HasFields(Protocol):
    """A problem whose `fields` hold `tests`, as `stages.domains.sandbox.score` takes them."""

    @property
    def fields(self) -> Mapping[str, Any]: ...


def code_reward(
    problem: HasFields, response: str, settings: CodeRewardSettings | None = None
) -> float:
    """The fraction of `problem.fields["tests"]` that the response's program passes, from 0 to 1.

    With `credit: all` it is 1 where that is 1, else 0. Whatever the program does counts as its own
    failure; SandboxError is raised where it could not be run, KeyError or ValueError where the
    problem has no tests: such a sample has no reward.
    """
    settings = settings or CodeRewardSettings()
    limits = Limits(**settings.model_dump(exclude={"credit"}))
    everything = settings.credit == "all"
    program = extract_program(response)
    passed = score(program, problem.fields["tests"], limits, stop_early=everything).passed
    return float(passed == 1) if everything else passed


def extract_program(response: str) -> str:
    """What stands in the response's last ```python fence; all of it where there is none."""
    fences = FENCE.findall(response)
    return fences[-1] if fences else response
