"""The tests of a row, in the forms of public data sets, as the sandbox runs them.

A test is a statement, a pair of input and output, or a call of a function by its arguments. Rows of
LiveCodeBench, PRIME, APPS and open-r1 are read; a key that could change what a test means and is
not known is an error, since a test that is run in another way fails every program.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stages.data.columns import column_or_none
from stages.rewards.json_values import field_value
from stages.rewards.reward import RewardError

Test = str | Mapping[str, Any]
TYPES = ("testtype", "type")  # LiveCodeBench's and open-r1's key
NAMES = ("fn_name", "func_name")
READ = ("input", "output", *TYPES, *NAMES)
IGNORED = ("description", "explanation", "id", "is_public", "name", "public")  # change no verdict
STDIN, CALL = ("stdin", "stdin_stdout"), ("functional", "function_call")


def read_tests(row: Mapping[str, Any], field: str) -> list[Test]:
    r"""Return the tests in a row's field: a list of tests, or columns of inputs and outputs.

    Each is a statement, `{"input": text, "output": text}`, or `{"function": name, "arguments":
    [...], "expected": value}`. Raises RewardError where there are none, and for a form or a key
    that is not known.

    Example: APPS has columns of inputs and outputs, and LiveCodeBench calls with JSON arguments.
        >>> read_tests({"tests": {"inputs": ["1 2"], "outputs": ["3"]}}, "tests")
        [{'input': '1 2', 'output': '3'}]
        >>> test = {"input": "1\n2", "output": "3", "testtype": "functional"}
        >>> read_tests({"tests": [test], "fn_name": "add"}, "tests")
        [{'function': 'add', 'arguments': [1, 2], 'expected': 3}]
    """
    if (value := column_or_none(row, field)) is None:
        raise RewardError(f"the problem has no field {field!r} with its tests")
    tests = field_value(value)
    if isinstance(tests, Mapping):
        tests = list(_rows_of(tests))
    if isinstance(tests, str) or not isinstance(tests, Sequence):
        raise RewardError(
            f"tests must be a list of pairs or of statements, not a {type(tests).__name__}"
        )
    if not tests:
        raise RewardError("there are no tests")
    read: list[Test] = [test if isinstance(test, str) else _read(test, row) for test in tests]
    if len({isinstance(test, str) or frozenset(test) for test in read}) > 1:
        raise RewardError("the tests must be of one kind: statements, pairs or calls")
    return read


def _rows_of(columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the tests of `{"inputs": [...], "outputs": [...]}`, as APPS, TACO and PRIME have them.

    CodeContests calls the columns `input` and `output`.
    """
    names = ("inputs", "outputs") if "inputs" in columns else ("input", "output")
    inputs, outputs = (columns.get(name) for name in names)
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise RewardError("tests must be a list, or a mapping of the lists inputs and outputs")
    if len(inputs) != len(outputs):
        raise RewardError(f"the tests have {len(inputs)} inputs and {len(outputs)} outputs")
    if any(columns.get(name) is not None for name in NAMES):
        # APPS wraps an expected value in a list, or not: [3] may be 3 or [3].
        what = "inputs and outputs of calls (fn_name) are ambiguous; write a list of tests"
        raise RewardError(f'{what}: {{"fn_name": ..., "input": [arguments], "output": value}}')
    if unknown := sorted(columns.keys() - {*names, *NAMES}):
        raise RewardError(f"unknown key {unknown[0]!r} beside {names[0]} and {names[1]}")
    for lines, expected in zip(inputs, outputs, strict=True):
        yield {"input": _joined(lines), "output": _joined(expected)}


def _joined(text: Any) -> Any:
    """Return lines as the text that they make; anything else as it is."""
    lines = isinstance(text, list) and all(isinstance(line, str) for line in text)
    return "\n".join(text) if lines else text


def _read(test: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(test, Mapping) or not {"input", "output"} <= test.keys():
        raise RewardError(
            f"a test must be a mapping of input and output or a statement, not {test!r}"
        )
    if unknown := sorted(map(str, test.keys() - {*READ, *IGNORED})):
        raise RewardError(
            f"a test has the unknown key {unknown[0]!r}; known are {', '.join(READ)}, and"
            f" {', '.join(IGNORED)}, which are ignored"
        )
    kind = next((test[name] for name in TYPES if test.get(name) is not None), None)
    if kind is not None and kind not in STDIN + CALL:
        raise RewardError(f"a test has the unknown type {kind!r}; known: {', '.join(STDIN + CALL)}")
    if kind in CALL or any(test.get(name) is not None for name in NAMES):
        return _call(test, row)
    for name in ("input", "output"):
        if not isinstance(test[name], str):
            raise RewardError(f"the {name} of a test must be text, not {test[name]!r}")
    return {"input": test["input"], "output": test["output"]}


def _call(test: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's function, arguments and expected value.

    LiveCodeBench writes an argument a line, each as JSON, and the function's name into the row's
    `metadata`.
    """
    metadata = field_value(row["metadata"]) if row.get("metadata") else {}
    places = [test, row, metadata if isinstance(metadata, Mapping) else {}]
    functions = (place[name] for place in places for name in NAMES if place.get(name) is not None)
    if not isinstance(name := next(functions, None), str) or not name.isidentifier():
        raise RewardError(
            "a functional test has no function's name: fn_name or func_name of the test, of the"
            f" row or of its metadata, not {name!r}"
        )
    try:
        arguments, expected = test["input"], test["output"]
        if isinstance(arguments, str):
            arguments = [json.loads(line) for line in arguments.split("\n") if line.strip()]
        if isinstance(expected, str):
            expected = json.loads(expected)
    except (ValueError, RecursionError) as error:
        what = "the input of a functional test must be an argument a line, and the output one value"
        raise RewardError(f"{what}, as JSON: {error}") from error
    if not isinstance(arguments, list):
        raise RewardError(f"the input of a functional test must be a list, not {arguments!r}")
    return {"function": name, "arguments": arguments, "expected": expected}
