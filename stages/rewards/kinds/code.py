"""The reward of a program: the share of its problem's tests that it passes in the sandbox."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from parallel.settings import Count
from stages.data.problem import Problem
from stages.rewards import sandbox
from stages.rewards.fences import extract_program
from stages.rewards.program_tests import Test, read_tests
from stages.rewards.reward import (
    AnswerReward,
    Explained,
    Response,
    Reward,
    RewardContext,
    RewardError,
    Seconds,
    register,
)

LIMITS = {"wall_seconds", "cpu_seconds", "memory_mebibytes", "processes", "output_bytes"}
RunSeconds = Annotated[float, Field(gt=0, le=600)]


class CodeReward(AnswerReward):
    """The share of a problem's tests that the response's program passes, run in the sandbox.

    Each pair of input and output is one run; asserts share one, as do calls
    (docs/explanation/sandbox.md).
    """

    kind: Literal["code"] = "code"
    tests_field: str = Field(
        default="tests",
        description="field of the problem with its tests: pairs of input and output, calls of a"
        " function, or asserts",
    )
    float_tolerance: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=1e-6,
        description="largest absolute or relative error of a number that a test expects with a"
        " decimal point or an exponent; 0 compares text",
    )
    credit: Literal["fraction", "all"] = Field(
        default="fraction", description="fraction: of the tests passed; all: 1 for all, else 0"
    )
    wall_seconds: RunSeconds = Field(default=10.0, description="time limit of one run")
    cpu_seconds: RunSeconds = Field(
        default=10.0, description="CPU time limit of all processes of one run together"
    )
    tests_seconds: Seconds = Field(
        default=60.0, description="time limit of all runs of one response; tests left then fail"
    )
    memory_mebibytes: Annotated[int, Field(ge=64, le=1 << 20)] = Field(
        default=512, description="limit of a process's address space and of a run's memory in use"
    )
    processes: Count = Field(default=16, description="limit of processes and threads of one run")
    output_bytes: Annotated[int, Field(gt=0, le=1 << 30)] = Field(
        default=1 << 20, description="limit of one run's output, and of its error output"
    )
    timeout_seconds: Seconds | None = 120.0

    def rules(self, at: RewardContext) -> Iterator[tuple[str, str]]:
        if at.source == "reasoning_gym":
            what = "problems of reasoning_gym have no tests; use jsonl or parquet"
            yield f"{at.key}.kind", what
        total, memory = self.tests_seconds, self.memory_mebibytes
        for name in ("wall_seconds", "cpu_seconds"):
            if (seconds := getattr(self, name)) > total:
                what = f"{seconds:g} for one run is more than tests_seconds = {total:g} for all"
                yield f"{at.key}.{name}", f"{what} of them"
        if at.pool and memory > at.pool.memory_mebibytes:
            what = f"{memory} is more than rewards.memory_mebibytes = {at.pool.memory_mebibytes}"
            what += ", the limit of a worker and of all that it starts"
            yield f"{at.key}.memory_mebibytes", what
        what = f"tests_seconds = {total:g} and the sandbox's own work may take"
        yield from self.time_rule(at, total + sandbox.MARGIN_SECONDS, what)

    def row_violation(self, row: Mapping[str, Any], answer: str) -> str | None:
        try:
            self.tests_of(row)
        except RewardError as error:
            return str(error)
        return None

    def tests_of(self, row: Mapping[str, Any]) -> list[Test]:
        """Return a row's tests. Raises RewardError where it has none that can be run."""
        return read_tests(row, self.tests_field)

    def check_machine(self) -> None:
        """Raise RewardError where programs cannot be contained on this machine."""
        try:
            sandbox.check()
        except sandbox.SandboxError as error:
            raise RewardError(
                f"{error}; docs/explanation/sandbox.md says what the host must allow"
            ) from error


@register(CodeReward)
def make(settings: CodeReward, _directory: Path) -> Reward:
    """Return the reward. Whatever the program does counts as its own failure.

    The reward raises SandboxError where the program cannot be run, RewardError where the problem
    has no tests: such a sample has no reward.
    """
    limits = sandbox.Limits(**settings.model_dump(include=LIMITS))
    everything = settings.credit == "all"

    def reward(problem: Problem, response: Response) -> Explained:
        result = sandbox.score(
            extract_program(response.text, "" if response.thoughts else problem.prompt),
            settings.tests_of(problem.fields),
            limits,
            seconds=settings.tests_seconds,
            tolerance=settings.float_tolerance,
            stop_early=everything,
        )
        score = float(result.passed == 1) if everything else result.passed
        return score, failed_test(result)

    return reward


def failed_test(result: sandbox.Score) -> str:
    """Return which test failed first, with the last line of its error output; "" for none."""
    number = next((n for n, verdict in enumerate(result.verdicts, 1) if verdict != "passed"), None)
    if number is None:
        return ""
    passed = f"{result.verdicts.count('passed')} of {len(result.verdicts)} tests passed"
    lines = result.errors.strip().splitlines()
    return "; ".join([f"{passed}; test {number}: {result.verdicts[number - 1]}", *lines[-1:]])
