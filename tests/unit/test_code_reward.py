"""The reward for a program, from the text of a response to a number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import ValidationError

from stages.domains import code
from stages.domains.code import code_reward, extract_program
from stages.domains.code_settings import CodeRewardSettings
from stages.domains.sandbox import Limits, SandboxError, Score

PAIRS = [{"input": "1 2", "output": "3"}, {"input": "2 2", "output": "4\n"}]
ASSERTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
ADDS = "print(sum(map(int, input().split())))"
ANSWERS_FOUR = "print(4)"


@dataclass
class Task:
    tests: Any
    fields: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.fields = {"tests": self.tests}


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("print(1)", "print(1)"),
        ("So:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```python\ndraft\n```\nbetter:\n```python \nprint(2)\n```", "print(2)\n"),
        ("```python\nprint('```')\n```", "print('```')\n"),
        ("```python\nprint(1)\nprint(", "print(1)\nprint("),
        ("```\nprint(1)\n```", "```\nprint(1)\n```"),
        ("```python\n```", ""),
        ("", ""),
    ],
)
def test_the_program_is_the_last_fence_or_everything(response: str, program: str) -> None:
    assert extract_program(response) == program


@pytest.mark.parametrize(
    ("tests", "response", "fraction"),
    [
        (PAIRS, ADDS, 1.0),
        (PAIRS, f"I add.\n```python\n{ADDS}\n```", 1.0),
        (PAIRS, ANSWERS_FOUR, 0.5),
        (PAIRS, "no program at all", 0.0),
        (PAIRS, "", 0.0),
        (ASSERTS, "def add(a, b): return a + b", 1.0),
        (ASSERTS, "def add(a, b): return 4", 0.5),
        (ASSERTS, "def subtract(a, b): return 4", 0.0),
    ],
)
def test_the_reward_is_the_fraction_passed_or_all(
    tests: Any, response: str, fraction: float
) -> None:
    assert code_reward(Task(tests), response) == fraction
    everything = CodeRewardSettings(credit="all")
    assert code_reward(Task(tests), response, everything) == float(fraction == 1)


def test_every_setting_reaches_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Limits, bool]] = []

    def score(program: str, tests: Any, limits: Limits, stop_early: bool) -> Score:
        seen.append((limits, stop_early))
        return Score(("passed",), "")

    monkeypatch.setattr(code, "score", score)
    settings = CodeRewardSettings(
        wall_seconds=1,
        cpu_seconds=2,
        memory_mebibytes=65,
        processes=4,
        output_bytes=5,
        credit="all",
    )
    code_reward(Task(PAIRS), "", settings)
    code_reward(Task(PAIRS), "")
    limits = Limits(1, 2, 65, 4, output_bytes=5)
    assert seen == [(limits, True), (Limits(), False)]


def test_settings_refuse_what_cannot_be() -> None:
    for wrong in ({"wall_seconds": 0}, {"memory_mebibytes": 1}, {"credit": "some"}, {"network": 1}):
        with pytest.raises(ValidationError):
            CodeRewardSettings.model_validate(wrong)


def test_a_fault_that_is_not_the_programs_is_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no tests"):
        code_reward(Task([]), ADDS)

    def fault(*_: Any, **__: Any) -> Score:
        raise SandboxError("sandbox: no room")

    monkeypatch.setattr(code, "score", fault)
    with pytest.raises(SandboxError):
        code_reward(Task(PAIRS), ADDS)
