"""The rendering of chat messages and tools by a chat template, and checks that it shows them.

Templates of published models read a tool call in different forms, and most leave out silently what
they do not know: DeepSeek-V3's shows calls only where the content is null and the arguments are
text, Qwen3's reads both, and Gemma's knows no tools at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# As in stages.data.problem; this module imports nothing, to keep imports shallow.
Message = dict[str, Any]
Tool = dict[str, Any]
SHOWN = 60  # characters of a content in an error
# That open and close a call of a tool in the templates of GLM, Qwen and Hermes.
TOOL_CALL = ("<tool_call>", "</tool_call>")

# Renders messages, with tools or without any: [{"role": "user", "content": "2+2?"}] may become
# "<|user|>2+2?<|assistant|>", whose last marker is the generation prompt.
Template = Callable[[list[Message], list[Tool] | None], str]


class TemplateError(Exception):
    """Messages or tools that a template does not show."""


def render_chat(template: Template, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
    """Return the text of a chat.

    Tools that the system's message already describes are not given to the template again.

    Raises:
        TemplateError: the template leaves out tool calls or tools.
        Exception: whatever the template raises.

    Example: a template without roles; with tools it would raise, since it does not show them.
        >>> template = lambda messages, tools: " ".join(turn["content"] for turn in messages)
        >>> render_chat(template, [{"role": "user", "content": "2+2?"}], ())
        '2+2?'
    """
    template_tools = None if not tools or describes(messages, tools) else list(tools)
    first_error: Exception | None = None
    for form in _forms(messages):
        try:
            text = template(form, template_tools)
            _check_calls(template, form, template_tools, text)
            _check_contents(form, text)
        except Exception as error:  # another form may do; else this is what the caller sees
            first_error = first_error or error
            continue
        if template_tools is not None and template(form, None) == text:
            names = ", ".join(map(tool_name, template_tools))
            raise TemplateError(
                f"it does not show tools ({names}); describe them in the system's message, or set"
                " the column's key tools: null"
            )
        return text
    assert first_error is not None
    raise first_error


def describes(messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    """Return whether a system's message has the name of every tool, as JSON."""
    roles = ("system", "developer")
    text = "".join(message["content"] for message in messages if message["role"] in roles)
    return all(json.dumps(tool_name(tool), ensure_ascii=False) in text for tool in tools)


def tool_name(tool: Tool) -> str:
    """Return the name of a tool's function, "" where it has none."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return name if isinstance(name, str) else ""


def _forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the messages with tool calls in each form that templates read, the usual one first.

    Arguments are objects, or JSON text; blank content is "", or null.
    """
    if not any(message.get("tool_calls") for message in messages):
        yield list(messages)
        return
    for null in (False, True):
        for text in (False, True):
            yield [with_calls(message, text, null) for message in messages]


def with_calls(message: Message, text: bool, null: bool = False) -> Message:
    """Return a message whose tool calls have arguments as JSON text, or as objects.

    With `null`, blank content beside them is null.

    Example:
        >>> call = {"function": {"name": "add", "arguments": {"a": 1}}}
        >>> message = {"role": "assistant", "content": "", "tool_calls": [call]}
        >>> with_calls(message, text=True, null=True)["tool_calls"]
        [{'function': {'name': 'add', 'arguments': '{"a": 1}'}}]
    """
    if not (calls := message.get("tool_calls")):
        return message
    converted_calls = []
    for call in calls:
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str) and not text:
            arguments = json.loads(arguments)
        elif text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {**function, "arguments": arguments}
        converted_calls.append({**call, "function": function} if "function" in call else function)
    content = message.get("content") or ""
    blank = null and not content.strip()
    return {**message, "content": None if blank else content, "tool_calls": converted_calls}


def _check_contents(messages: Sequence[Message], text: str) -> None:
    """Raise TemplateError where a message to the assistant is not in the text.

    Qwen3's template, for one, has no role `developer`. Templates trim contents, and write a tool's
    result as JSON.
    """
    squeezed = _squeezed(text)
    for place, message in enumerate(messages, start=1):
        content = message["content"]
        if message["role"] == "assistant" or not content or _squeezed(content) in squeezed:
            continue
        if not any(
            _squeezed(json.dumps(content, ensure_ascii=ascii_only)[1:-1]) in squeezed
            for ascii_only in (False, True)
        ):
            raise TemplateError(
                f"it leaves out message {place}, of the role {message['role']},"
                f" {content[:SHOWN]!r}; use a role that it knows"
            )


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _check_calls(
    template: Template, messages: list[Message], tools: list[Tool] | None, text: str
) -> None:
    """Raise TemplateError where a tool call is not in the text.

    A name may also be in the tools or the contents, so that it is counted with the calls and
    without them.
    """
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    if not calls:
        return
    names = [call.get("function", call)["name"] for call in calls]
    bare = [
        {key: value for key, value in message.items() if key != "tool_calls"}
        for message in messages
    ]
    try:
        without = template(bare, tools)
    except Exception:  # a template may need calls where there is no content
        without = ""
    for name in dict.fromkeys(names):
        if text.count(name) - without.count(name) < names.count(name):
            raise TemplateError(
                f"it does not show the call of {name}; use a template that renders tool_calls, or"
                " write the calls into the content"
            )
