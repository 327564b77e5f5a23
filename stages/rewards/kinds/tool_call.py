"""The reward of a response that must call tools: well formed, valid, and the expected calls.

No tool is executed: a call is compared, as JSON, with the row's.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from stages.data.chat_template import TOOL_CALL
from stages.data.columns import column_or_none
from stages.data.problem import Problem
from stages.data.thoughts import THINK
from stages.rewards.fences import unfenced
from stages.rewards.json_values import (
    DEEPEST,
    canonical,
    check_schema,
    draft_of,
    field_value,
    is_deep,
    parsed,
    schema_violation,
)
from stages.rewards.reward import AnswerReward, Explained, Response, Reward, RewardError, register

BEGIN, END = TOOL_CALL
# A response with more characters or calls earns 0 before they are checked, which takes seconds.
LONGEST, MOST_CALLS = 1 << 18, 1000
SCHEMAS = ("parameters", "input_schema", "inputSchema")  # OpenAI's, Anthropic's, MCP's key
Call = dict[str, Any]  # `{"name": ..., "arguments": {...}}`


class ToolCallReward(AnswerReward):
    """1 where the response's tool calls are valid and equal the row's, in any order; else 0.

    Each is `{"name": ..., "arguments": {...}}`. Nothing but thoughts may stand beside them. Where a
    row expects no call, a response without any is right. Arguments nested more than 50 deep earn 0,
    as do more calls than 16 and 4 for each expected one.
    """

    kind: Literal["tool_call"] = "tool_call"
    tools_field: str = Field(
        default="tools",
        description="field of the problem with its tools: a name and the JSON schema of its"
        " parameters each, also as OpenAI's API nests them, or as its `input_schema`; a list, or"
        " JSON text",
    )
    calls_field: str | None = Field(
        default="calls",
        description="field with the expected calls, also as OpenAI's API nests them; a list, or"
        " JSON text; null: any valid call",
    )
    form: Literal["tagged", "json"] = Field(
        default="tagged",
        description="tagged: each call in <tool_call> and </tool_call>. json: one call, or a list"
        " of calls",
    )
    thoughts: Literal["optional", "required", "forbidden"] = Field(
        default="optional", description="thoughts before the calls, opened by response or prompt"
    )

    def row_violation(self, row: Mapping[str, Any], answer: str) -> str | None:
        try:
            tools = tools_of(row, self.tools_field)
            for name, schema in tools.items():
                _check(name, draft_of, schema)
            for call in self.expected(row) or []:
                if call["name"] not in tools:
                    raise RewardError(f"the expected call of {call['name']!r} has no such tool")
        except RewardError as error:
            return str(error)
        return None

    def problem_violation(self, problem: Problem) -> str | None:
        """Return why the problem's tools, or the calls that it expects, are invalid, or None."""
        if (why := self.row_violation(problem.fields, problem.answer)) is not None:
            return why
        tools = tools_of(problem.fields, self.tools_field)
        try:
            for name, schema in tools.items():
                _check(name, check_schema, schema)
            wrong = calls_violation(self.expected(problem.fields) or [], tools)
        except RewardError as error:
            return str(error)
        return f"the expected call is invalid: {wrong}" if wrong else None

    def reference_response(self, problem: Problem) -> str | None:
        """Return the response that makes the expected calls, or None without any."""
        if not (calls := self.expected(problem.fields)):
            return None
        thoughts = ""
        if self.thoughts == "required":
            opening, closing = (self.thought_markers or (THINK,))[0]
            thoughts = f"{opening}\nI call a tool.\n{closing}\n"
        if self.form == "json":
            return thoughts + json.dumps(calls[0] if len(calls) == 1 else calls)
        return thoughts + "\n".join(f"{BEGIN}\n{json.dumps(call)}\n{END}" for call in calls)

    def expected(self, row: Mapping[str, Any]) -> list[Call] | None:
        """Return the calls that a row expects; None where any valid call is right.

        Raises RewardError where the row has none, or text that is not JSON.
        """
        if (field := self.calls_field) is None:
            return None
        if (value := column_or_none(row, field)) is None:
            raise RewardError(f"the problem has no field {field!r}; calls_field: null wants none")
        calls = field_value(value)
        if isinstance(calls, list):
            calls = [_unnested(call, field) for call in calls]
        if not isinstance(calls, list) or not all(map(_is_call, calls)):
            raise RewardError(f"field {field!r} must be a list of calls: name and arguments")
        if any(is_deep(call["arguments"]) for call in calls):
            raise RewardError(f"field {field!r} has arguments nested more than {DEEPEST} deep")
        return calls


@register(ToolCallReward, imports=("jsonschema",))
def make(settings: ToolCallReward, _directory: Path) -> Reward:
    """Return the reward; it raises RewardError where the problem has no tools or no calls."""

    def reward(problem: Problem, response: Response) -> Explained:
        tools = tools_of(problem.fields, settings.tools_field)
        expected = settings.expected(problem.fields)
        answer, thinks = response.text, bool(response.thoughts.strip())
        if settings.thoughts != "optional" and thinks != (settings.thoughts == "required"):
            return 0.0, f"thoughts are {settings.thoughts}"
        if expected != [] and len(answer) > LONGEST:
            return 0.0, f"more than {LONGEST} characters"
        calls = read_calls(answer, settings.form)
        if isinstance(calls, str):
            if expected != [] or BEGIN in answer:
                return 0.0, calls
            return (1.0, "") if answer.strip() else (0.0, "an empty response")
        most = MOST_CALLS if expected is None else 16 + 4 * len(expected)
        if wrong := _excess(calls, most) or calls_violation(calls, tools):
            return 0.0, wrong
        if expected is None or _counted(calls) == _counted(expected):
            return 1.0, ""
        return 0.0, f"expected {json.dumps(expected, ensure_ascii=False)}"

    return reward


def tools_of(row: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return the JSON schema of the parameters of a row's tools, by name.

    Raises RewardError where the row has none, or text that is not JSON.
    """
    if (value := column_or_none(row, field)) is None:
        raise RewardError(f"the problem has no field {field!r} with its tools")
    tools = field_value(value)
    if not isinstance(tools, list):
        raise RewardError(f"field {field!r} must be a list of tools")
    schemas = {}
    for listed in tools:
        tool = listed.get("function", listed) if isinstance(listed, dict) else {}
        name = tool.get("name") if isinstance(tool, dict) else None
        schema = next((tool[key] for key in SCHEMAS if name and tool.get(key) is not None), None)
        if not isinstance(name, str) or not isinstance(schema, dict | str | None):
            what = f"a tool without a name or a schema: {reprlib.repr(listed)}"
            raise RewardError(f"field {field!r} has {what}")
        if name in schemas:
            raise RewardError(f"field {field!r} has two tools of the name {name!r}")
        try:
            schemas[name] = field_value(schema or {})
        except RewardError as error:
            raise RewardError(f"field {field!r}: parameters of {name!r}: {error}") from error
    return schemas


def _check(name: str, check: Callable[[Any], object], schema: Any) -> None:
    """Raise a RewardError of `check` with the name of the tool whose schema it is."""
    try:
        check(schema)
    except RewardError as error:
        raise RewardError(f"tool {name}: {error}") from error


def read_calls(text: str, form: str) -> list[Call] | str:
    """Return the calls of an answer, or why it has none.

    Example:
        >>> read_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "tagged")
        [{'name': 'add', 'arguments': {'a': 1}}]
        >>> read_calls("2", "json")
        'a call must be {"name": ..., "arguments": {...}}'
    """
    pieces = [unfenced(text)]
    if form == "tagged":
        before, *call_texts = text.split(BEGIN)
        pairs = [call_text.partition(END) for call_text in call_texts]
        if not pairs or before.strip() or any(not end or after.strip() for _, end, after in pairs):
            return f"not calls in {BEGIN} and {END} alone"
        pieces = [call for call, _, _ in pairs]
    try:
        read = [parsed(piece) for piece in pieces]
    except (ValueError, RecursionError) as error:
        return f"no JSON: {error}"
    calls = read[0] if form == "json" and isinstance(read[0], list) else read
    if not calls or not all(map(_is_call, calls)):
        return 'a call must be {"name": ..., "arguments": {...}}'
    return calls


def _excess(calls: list[Call], most: int) -> str:
    """Return why calls are too many or too deep to compare; "" where they are not."""
    if len(calls) > most:
        return f"more than {most} calls"
    if any(is_deep(call["arguments"]) for call in calls):
        return f"arguments nested more than {DEEPEST} deep"
    return ""


def calls_violation(calls: list[Call], tools: Mapping[str, Any]) -> str:
    """Return why the first invalid call is no call of one of the tools; "" where all are.

    Raises RewardError where a tool's schema cannot be used.
    """
    checked = set()
    for call in calls:
        if (name := call["name"]) not in tools:
            return f"no tool {name!r}; known: {', '.join(tools)}"
        # Once for each tool: a thousand calls may name the same one.
        if name not in checked:
            check_schema(tools[name])
            checked.add(name)
        if wrong := schema_violation(call["arguments"], tools[name]):
            return f"{name}: {wrong}"
    return ""


def _unnested(call: Any, field: str) -> Any:
    """Return an expected call without OpenAI's nesting, in which arguments are JSON text."""
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    try:
        return {**function, "arguments": field_value(function.get("arguments"))}
    except RewardError as error:
        raise RewardError(
            f"field {field!r}: arguments of {function.get('name')!r}: {error}"
        ) from error


def _is_call(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"name", "arguments"}
        and isinstance(value["name"], str)
        and isinstance(value["arguments"], dict)
    )


def _counted(calls: list[Call]) -> Counter[str]:
    """Return calls without their order; 1 equals 1.0, as in JSON, and true does not equal 1."""
    return Counter(map(canonical, calls))
