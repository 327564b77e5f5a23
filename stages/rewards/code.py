"""The reward for a program: the share of its problem's tests that it passes, run contained."""

from __future__ import annotations

import json
import re
from pathlib import Path

from stages.data.problem import Problem
from stages.rewards.reward import Response, Reward, RewardError
from stages.rewards.sandbox import Limits, Tests, score
from stages.rewards.settings import CodeReward

# The last one, since the first ones are often drafts; one that is cut off reaches to the end.
FENCE = re.compile(r"^```python[ \t]*\n(?P<program>.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)


def make(settings: CodeReward, _directory: Path) -> Reward:
    """The fraction of the problem's tests that the response's program passes, from 0 to 1.

    With `credit: all` it is 1 where that is 1, else 0. Whatever the program does counts as its own
    failure. The reward raises SandboxError where the program could not be run, RewardError or
    ValueError where the problem has no tests: such a sample has no reward.
    """
    limits = Limits(
        wall_seconds=settings.wall_seconds,
        cpu_seconds=settings.cpu_seconds,
        memory_mebibytes=settings.memory_mebibytes,
        processes=settings.processes,
        output_bytes=settings.output_bytes,
    )
    everything = settings.credit == "all"

    def reward(problem: Problem, response: Response) -> float:
        passed = score(
            extract_program(response.text),
            _tests(problem, settings.tests_field),
            limits,
            seconds=settings.tests_seconds,
            stop_early=everything,
        ).passed
        return float(passed == 1) if everything else passed

    return reward


def extract_program(response: str) -> str:
    """What stands in the response's last ```python fence; all of it where there is none."""
    fences = FENCE.findall(response)
    return fences[-1] if fences else response


def _tests(problem: Problem, field: str) -> Tests:
    """As `stages.rewards.sandbox.score` takes them; a file may hold them as JSON text."""
    if field not in problem.fields:
        raise RewardError(f"the problem has no field {field!r}, which should hold its tests")
    tests: Tests | str = problem.fields[field]
    found: Tests = json.loads(tests) if isinstance(tests, str) else tests
    return found
