"""Chat messages and tools as rows have them: lists, or JSON text, with or without null keys.

Imports no library of arrays, so that `braid validate` can read the first rows of a file.
"""

from __future__ import annotations

import json
import re
from typing import Any

from stages.data.chat_template import tool_name
from stages.data.columns import Row, RowError, column_of, column_or_none
from stages.data.problem import ASSISTANT, Message, Tool

# A text that was a list of messages before something wrote it as JSON, or as Python shows it.
SERIALIZED = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content|from|value|name|tool_calls)["']\s*:""")


class SparseRow(Row):
    """A row of a format whose structs have the keys of all rows: absent ones are null."""


def messages_of(row: Row, column: str) -> list[Message]:
    """Return a column's chat messages, without null keys, which Parquet cannot omit.

    The column may be JSON text, and so may the arguments of tool calls, as in OpenAI's API. A
    message with tool calls needs no content. Raises RowError where there are no messages.
    """
    value = parsed_text(column_of(row, column), column)
    if not isinstance(value, list) or not value:
        raise RowError(f"{column!r} is not a list of messages")
    messages = []
    for place, entry in enumerate(value, start=1):
        items = entry.items() if isinstance(entry, dict) else ()
        message = {name: content for name, content in items if content is not None}
        where = f"{column!r} has a message, number {place},"
        if message.get("tool_calls"):
            message["tool_calls"] = _calls(message["tool_calls"], where, isinstance(row, SparseRow))
            message.setdefault("content", "")
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                keys = f"; its keys: {', '.join(message)}" if "role" not in message else ""
                raise RowError(f"{where} whose {name} is not text{keys}")
        if message.get("weight", 1) not in (0, 1):
            raise RowError(f"{where} whose weight is neither 0 nor 1")
        messages.append(message)
    return messages


def is_learned(message: Message) -> bool:
    """Return whether a message is an assistant turn, without OpenAI's `weight: 0`."""
    return message["role"] == ASSISTANT and message.get("weight", 1) != 0


def tools_of(row: Row, column: str | None, prompt: str | list[Message]) -> tuple[Tool, ...]:
    """Return the tools in a column, if the row has it, in the form that chat templates read.

    That is OpenAI's: `{"type": "function", "function": {"name": ..., "parameters": {...}}}`; a
    function alone is put into it. Raises RowError for another value, and where the prompt is a
    text that does not name them: no template shows them to the model.
    """
    tools = _tools(row, column)
    if isinstance(prompt, str) and not all(tool_name(tool) in prompt for tool in tools):
        raise RowError(
            f"{column!r} has tools that a prompt of text does not show; write the prompt as chat"
            " messages, name the tools in it, or leave the column out with tools: null"
        )
    return tools


def _tools(row: Row, column: str | None) -> tuple[Tool, ...]:
    value = None if column is None else column_or_none(row, column)
    if value is None or (isinstance(value, str) and not value.strip()):
        return ()
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        tools = value
    if isinstance(row, SparseRow):
        tools = without_nulls(tools)
    tools = [] if tools is None else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        why = "is not a list of tools, or JSON text of one; tools: null leaves the column out"
        raise RowError(f"{column!r} {why}")
    if why := _json_violation(tools):
        raise RowError(f"{column!r} has tools that are not JSON: {why}; write values of JSON")
    nested = [tool if "function" in tool else _nested(tool) for tool in tools]
    if not all(tool_name(tool) for tool in nested):
        raise RowError(f"{column!r} has a tool without a name; tools: null leaves the column out")
    return tuple(nested)


def parsed_text(value: Any, column: str) -> Any:
    """Return the value, or the list of messages that it is the JSON text of.

    Raises RowError for text that only looks like one, such as Python's form of a list.
    """
    if not isinstance(value, str) or not SERIALIZED.match(value):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError(
            f"{column!r} looks like chat messages as text, but is not JSON: {error}; write a list,"
            " or JSON"
        ) from error


def without_nulls(value: Any) -> Any:
    """Return a value without the null keys of its mappings, at any depth.

    Example:
        >>> without_nulls({"name": "add", "arguments": [{"a": 1, "b": None}], "id": None})
        {'name': 'add', 'arguments': [{'a': 1}]}
    """
    if isinstance(value, dict):
        return {name: without_nulls(of) for name, of in value.items() if of is not None}
    return [without_nulls(of) for of in value] if isinstance(value, list) else value


def _calls(calls: Any, where: str, sparse: bool) -> list[dict[str, Any]]:
    """Return tool calls with objects as arguments. Raises RowError where they are no calls."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowError(f"{where} whose tool_calls is not a list of calls")
    read = []
    for call in without_nulls(calls) if sparse else calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f"{where} with a tool call without a name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                raise RowError(
                    f"{where} whose call of {function['name']!r} has arguments that are neither an"
                    f" object nor JSON text of one: {error}"
                ) from error
        if not isinstance(arguments, dict):
            why = "has arguments that are not an object"
            raise RowError(f"{where} whose call of {function['name']!r} {why}")
        if why := _json_violation(arguments):
            call_name = f"{where} whose call of {function['name']!r}"
            raise RowError(f"{call_name} has arguments that are not JSON: {why}")
        function = {**function, "arguments": arguments}
        read.append({**call, "function": function} if "function" in call else function)
    return read


def _json_violation(value: Any) -> str:
    """Return why a template could not write a value as JSON; "" where it can.

    Python reads NaN, 1e999 and half of a surrogate pair from JSON, and pyarrow a date.
    """
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        return str(error)
    return ""


def _nested(tool: Tool) -> Tool:
    return {"type": "function", "function": tool} if "name" in tool else tool
