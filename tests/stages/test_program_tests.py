"""The tests of rows as public data sets write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.data.problem import Problem
from stages.rewards.kinds.code import CodeReward
from stages.rewards.program_tests import read_tests
from stages.rewards.reward import Response, RewardError, make

PAIR = {"input": "1 2\n", "output": "3\n"}
TWO = {"function": "twice", "arguments": [[1, 2], 3], "expected": [3, 6]}
# Rows by their data set's form, each with its tests as the sandbox runs them.
ROWS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "LiveCodeBench, stdin": (
        {"tests": json.dumps([{**PAIR, "testtype": "stdin"}]), "metadata": "{}"},
        [PAIR],
    ),
    "LiveCodeBench, functional": (
        {
            "tests": [{"input": "[1, 2]\n3", "output": "[3, 6]", "testtype": "functional"}],
            "metadata": '{"func_name": "twice"}',
        },
        [TWO],
    ),
    "open-r1, verification_info.test_cases": (
        {"tests": [{"fn_name": None, **PAIR, "type": "stdin_stdout"}]},
        [PAIR],
    ),
    "open-r1, function_call": (
        {
            "tests": [
                {
                    "fn_name": "twice",
                    "input": [[1, 2], 3],
                    "output": [3, 6],
                    "type": "function_call",
                }
            ]
        },
        [TWO],
    ),
    "APPS and PRIME": ({"tests": {"inputs": ["1 2\n"], "outputs": ["3\n"]}}, [PAIR]),
    "APPS, lines": (
        {"tests": json.dumps({"inputs": [["1", "2"]], "outputs": [["3"]], "fn_name": None})},
        [{"input": "1\n2", "output": "3"}],
    ),
    "CodeContests": ({"tests": {"input": ["1 2\n"], "output": ["3\n"]}}, [PAIR]),
    "Codeforces, with notes": ({"tests": [{**PAIR, "id": 3, "explanation": "add"}]}, [PAIR]),
    "MBPP": ({"tests": ["assert f(1) == 2"]}, ["assert f(1) == 2"]),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_public_data_sets_are_read(name: str) -> None:
    row, tests = ROWS[name]
    assert read_tests(row, "tests") == tests
    assert CodeReward().row_violation(row, "") is None


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ([], "there are no tests"),
        ("assert False", "Expecting value"),
        ('"assert False"', "tests must be a list of pairs or of statements, not a str"),
        ([3], "a test must be a mapping of input and output or a statement, not 3"),
        ([{"input": "1"}], "a test must be a mapping of input and output"),
        ([{"input": "", "output": 3}], "the output of a test must be text, not 3"),
        ([PAIR, "assert True"], "the tests must be of one kind"),
        ([PAIR, {**PAIR, "type": "functional", "fn_name": "f"}], "the output of a functional"),
        (PAIR, "tests must be a list, or a mapping of the lists inputs and outputs"),
        ({"inputs": ["1"], "outputs": []}, "the tests have 1 inputs and 0 outputs"),
        ({"inputs": ["1"], "outputs": ["1"], "checker": "x"}, "unknown key 'checker' beside"),
        ({"inputs": [[1]], "outputs": [[1]], "fn_name": "f"}, "inputs and outputs of calls (fn_n"),
        ([{**PAIR, "checker": "any"}], "a test has the unknown key 'checker'; known are input"),
        ([{**PAIR, "testtype": "file"}], "a test has the unknown type 'file'; known: stdin"),
        ([{**PAIR, "testtype": "functional"}], "a functional test has no function's name: fn_"),
        ([{**PAIR, "fn_name": "a.b"}], "a functional test has no function's name"),
        ([{**PAIR, "fn_name": "f"}], "the input of a functional test must be an argument a line"),
        ([{"input": 3, "output": 3, "fn_name": "f"}], "the input of a functional test must be a l"),
    ],
)
def test_tests_that_would_be_run_in_another_way_are_errors_of_the_row(tests: Any, why: str) -> None:
    violation = CodeReward().row_violation({"tests": tests}, "")
    assert violation is not None
    assert violation.startswith(why) or "functional" in violation, violation
    with pytest.raises(RewardError):
        read_tests({"tests": tests}, "tests")


def test_calls_are_scored_from_row_to_number() -> None:
    row = ROWS["LiveCodeBench, functional"][0]
    reward = make("code", "passes", CodeReward(), Path())
    for body, score in (("[by * x for x in numbers]", 1.0), ("[3]", 0.0)):
        method = f"  def twice(self, numbers: List[int], by): return {body}\n"
        text = f"```py\nclass Solution:\n{method}```"
        scored = reward(Problem("code", 0, "?", "", row), Response(text, 9))
        assert isinstance(scored, tuple) and scored[0] == score
