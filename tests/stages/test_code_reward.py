"""The reward for a program, from the text of a response to a number."""

from __future__ import annotations

import json
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from pydantic import ValidationError

from stages.data.problem import DomainError, Problem
from stages.rewards import sandbox
from stages.rewards.fences import extract_program, unfenced
from stages.rewards.kinds.code import CodeReward
from stages.rewards.kinds.math import MathReward
from stages.rewards.reward import Response, RewardError, check_machine, make
from stages.rewards.reward import Score as RewardScore
from stages.rewards.sandbox import Limits, Outcome, SandboxError, Score

PAIRS = [{"input": "1 2", "output": "3"}, {"input": "2 2", "output": "4\n"}]
ASSERTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
ADDS = "print(sum(map(int, input().split())))"
ANSWERS_FOUR = "print(4)"


def earned(tests: Any, response: str, **settings: Any) -> RewardScore:
    """Return the score of a response to a problem with these tests."""
    return explained(tests, response, **settings)[0]


def explained(tests: Any, response: str, **settings: Any) -> tuple[RewardScore, str]:
    """Return the score, and what the reward says of it."""
    reward = make("code", "passes", CodeReward(**settings), Path("/nowhere"))
    problem = Problem("code", 0, "add", "", {"tests": tests})
    found = reward(problem, Response(response, len(response) + 1))
    assert isinstance(found, tuple)
    return found


NAMES = (
    "",
    "py",
    "Python",
    "python3",
    "PYTHON",
    "ipython",
    " python",
    "python title=a",
    "{.python}",
)
FENCED_DOCSTRING = '```python\ndef f():\n    """\n    ```\n    f()\n    ```\n    """\n```'


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("print(1)", "print(1)"),
        ("So:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```python\ndraft\n```\nbetter:\n```python \nprint(2)\n```", "print(2)\n"),
        ("```python\nprint('```')\n```", "print('```')\n"),
        ("```python\nprint(1)\nprint(", "print(1)\nprint("),
        *((f"So:\n```{name}\nprint(1)\n```\n", "print(1)\n") for name in NAMES),
        ("So:\r\n```python\r\nif 1:\r\n  print(1)\r\n```\r\n", "if 1:\n  print(1)\n"),
        ("~~~~python\nprint(1)\n~~~~", "print(1)\n"),
        # CommonMark: a closing fence is at least as long as its opening one.
        ("```python\nprint(1)\n````\nprints\n```\n1\n```", "print(1)\n"),
        ("````python\nprint(1)\n```\n````", "print(1)\n```\n"),
        # In a list, with the code at the fence's indentation or below it.
        ("1. So:\n   ```python\n   if 1:\n     print(1)\n   ```", "if 1:\n  print(1)\n"),
        ("- So:\n  ```python\nif 1:\n  print(1)\n  ```", "if 1:\n  print(1)\n"),
        ("```python\n  if 1:\n    print(1)\n```", "if 1:\n  print(1)\n"),
        # The fence of Python's name comes before output and shell, and before what is unnamed.
        ("```py\nprint(1)\n```\nprints\n```\n1\n```\n```sh\npython x.py\n```", "print(1)\n"),
        ("```text\n1 2\n```\n```\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(1)```", "print(1)\n"),
        ("```python\nprint(1)```\nDone.", "print(1)\n"),
        ("def add(a):\n    return a\n```", "def add(a):\n    return a"),  # the prompt has opened it
        (FENCED_DOCSTRING, FENCED_DOCSTRING[10:-3]),
        ("```python\n```", ""),
        ("", ""),
    ],
)
def test_the_program_is_the_last_fence_or_everything(response: str, program: str) -> None:
    assert extract_program(response) == program


@pytest.mark.parametrize("blank", [" ", "\t"])
@pytest.mark.parametrize("mark", ["```", "~~~"])
def test_blanks_after_a_fence_take_linear_time(mark: str, blank: str) -> None:
    response = f"{mark}{blank * 20_000}`"
    begun = process_time()
    assert extract_program(response) == response
    assert process_time() - begun < 2.0  # quadratic where two parts may match a blank


def test_the_prompt_may_open_the_fence() -> None:
    prompt, response = "Add.\n```python\n", "print(1)\n```\nIt prints:\n```\n1\n```"
    assert extract_program(response, prompt) == "print(1)\n"
    assert extract_program("```python\nprint(2)\n```", "Not so:\n```\nx\n```\n") == "print(2)\n"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("```json\n[1]\n```", "[1]\n"),
        ("\n```JSON\r\n[1]\r\n```\r\n", "[1]\n"),
        ("  ```\n  [1]\n  ```", "[1]\n"),
        ("```json\n[1]```", "[1]\n"),
        ("```json5\n[1]\n```", "[1]\n"),
        ('```json\n["a\u2028b\x85c"]\n```', '["a\u2028b\x85c"]\n'),
        ("So: ```json\n[1]\n```", "So: ```json\n[1]\n```"),
        ("```json\n[1]\n```\nSo.", "```json\n[1]\n```\nSo."),
        ("```json\n[1]\n```\n```json\n[2]\n```", "```json\n[1]\n```\n```json\n[2]\n```"),
        ("```json\n[1]", "```json\n[1]"),
        ("[1]", "[1]"),
    ],
)
def test_a_text_that_is_one_fence_is_its_content(text: str, content: str) -> None:
    assert unfenced(text) == content


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
    assert earned(tests, response) == fraction
    assert earned(json.dumps(tests), response, credit="all") == float(fraction == 1)


def test_the_first_failed_test_is_named() -> None:
    assert explained(PAIRS, ADDS) == (1.0, "")
    assert explained(PAIRS, ANSWERS_FOUR) == (0.5, "1 of 2 tests passed; test 1: wrong")
    said = explained(PAIRS, "print(1 / 0)")[1]
    assert said == "0 of 2 tests passed; test 1: error; ZeroDivisionError: division by zero"


def test_every_setting_reaches_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def score(
        program: str, tests: Any, limits: Limits, seconds: float, stop_early: bool, tolerance: float
    ) -> Score:
        seen.append((limits, seconds, stop_early, tolerance))
        return Score(("passed",), "")

    monkeypatch.setattr(sandbox, "score", score)
    settings = {
        "wall_seconds": 1,
        "cpu_seconds": 2,
        "memory_mebibytes": 65,
        "processes": 4,
        "output_bytes": 5,
        "tests_seconds": 6,
        "float_tolerance": 0.1,
        "credit": "all",
    }
    assert earned(PAIRS, "", **settings) == 1.0
    assert earned(PAIRS, "") == 1.0
    limits = Limits(1, 2, 65, 4, output_bytes=5)
    assert seen == [(limits, 6.0, True, 0.1), (Limits(), 60.0, False, 1e-6)]


def test_all_runs_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run takes all of its wall time; what is left over decides how long the next may."""
    allowed: list[float] = []

    def run(program: str, stdin: str, limits: Limits) -> Outcome:
        allowed.append(limits.wall_seconds)
        return Outcome("exited", b"3", "", (), limits.wall_seconds)

    monkeypatch.setattr(sandbox, "run", run)
    pairs = [{"input": "", "output": "3"}] * 5
    result = sandbox.score("", pairs, Limits(wall_seconds=2.0), seconds=5.0)
    assert allowed == [2.0, 2.0, 1.0]
    assert result.verdicts == ("passed", "passed", "passed", "timeout", "timeout")


def test_impossible_settings_are_errors() -> None:
    for wrong in ({"wall_seconds": 0}, {"memory_mebibytes": 1}, {"credit": "some"}, {"network": 1}):
        with pytest.raises(ValidationError):
            CodeReward.model_validate(wrong)


def test_an_error_of_the_sandbox_is_not_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RewardError, match="there are no tests"):
        earned([], ADDS)
    with pytest.raises(RewardError, match="the problem has no field 'checks'"):
        earned(PAIRS, ADDS, tests_field="checks")

    def fault(*_: Any, **__: Any) -> Score:
        raise SandboxError("sandbox: no room")

    monkeypatch.setattr(sandbox, "score", fault)
    with pytest.raises(SandboxError):
        earned(PAIRS, ADDS)


def test_a_stage_checks_the_sandbox_only_where_a_reward_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise SandboxError("sandbox: needs user namespaces")

    monkeypatch.setattr(sandbox, "check", refuse)
    check_machine({"sums": {"right": MathReward()}})
    with pytest.raises(DomainError, match=r"domains\.code\.rewards\.passes: sandbox: needs user n"):
        check_machine({"sums": {"right": MathReward()}, "code": {"passes": CodeReward()}})
