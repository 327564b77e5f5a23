"""The forms of rows: lines of JSONL, and the contents of their columns.

Imports no library of arrays, so that `braid validate` can read the first rows of a file.
"""

from __future__ import annotations

import json
import re
import sys
from decimal import Decimal, InvalidOperation
from typing import Any

from stages.data.columns import Row, RowError, column_of, column_or_none
from stages.data.messages import is_learned, messages_of, parsed_text
from stages.data.problem import ASSISTANT, Message, content_key

ARRAY = "a JSON array; write one object a line"
Turns = str | list[Message]  # a text, or chat messages
Conversation = tuple[str, str] | list[Message]  # a prompt's text and a response's, or chat messages

GZIP = b"\x1f\x8b"  # what a compressed file begins with
# Of a number: CPython reads whole ones from text up to here, and 1e99999 would fill the memory.
MOST_DIGITS = sys.int_info.default_max_str_digits
TOO_MANY_DIGITS = f"a number of more than {MOST_DIGITS:,} digits; write it as text"
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # as escaped in JSON


class SpelledNumber(float):
    """A number of JSON whose 64-bit value is another, with the text of the file.

    Example: 3.14159265358979323846, of which a float keeps 16 digits.
    """

    def __init__(self, text: str) -> None:
        self.text = text


def prompt_of(row: Row, column: str) -> str | list[Message]:
    """Return a prompt's text or chat messages. Raises RowError where it is neither."""
    value = parsed_text(column_of(row, column), column)
    if isinstance(value, str):
        if not value.strip():
            raise RowError(f"{column!r} is blank")
        return value
    if not isinstance(value, list):
        raise RowError(f"{column!r} is neither text nor a list of messages")
    messages = messages_of(row, column)
    if not any(message["content"].strip() for message in messages):
        raise RowError(f"{column!r} has only blank messages")
    if messages[-1]["role"] == ASSISTANT:
        raise RowError(f"{column!r} must not end with an assistant turn")
    return messages


def conversation_of(
    row: Row, messages: str, prompt: str, response: str | None, *, rendered: bool = False
) -> Conversation:
    """Return the conversation in columns of these names: `messages`, or `response` to `prompt`.

    A prompt that is `rendered` has its chat messages, if any, in `messages`. Raises RowError where
    there is none to train on.
    """
    if response is None:
        turns = messages_of(row, messages)
        if turns[0]["role"] == ASSISTANT:
            raise RowError(f"{messages!r} must not start with an assistant turn")
    else:
        prompt_turns = prompt_of(
            row, messages if rendered and column_or_none(row, messages) else prompt
        )
        answer = column_of(row, response)
        if not isinstance(answer, str) or not answer:
            raise RowError(f"{response!r} is empty or not text")
        if isinstance(prompt_turns, str):
            return prompt_turns, answer
        turns = [*prompt_turns, {"role": ASSISTANT, "content": answer}]
    if not any(map(is_learned, turns)):
        raise RowError(f"{messages!r} has no assistant turn to train on")
    return turns


def pair_of(row: Row, prompt: str, chosen: str, rejected: str) -> tuple[Turns, Turns, Turns]:
    """Return a row's prompt, chosen and rejected response. Raises RowError where it has no pair."""
    prompt_turns = prompt_of(row, prompt)
    pair = (
        prompt_turns,
        _response(row, chosen, prompt_turns),
        _response(row, rejected, prompt_turns),
    )
    if content_key(pair[1]) == content_key(pair[2]):
        raise RowError(f"{chosen!r} and {rejected!r} are equal")
    return pair


def _response(row: Row, column: str, prompt: Turns) -> Turns:
    """Return a response to the prompt: a text to a text, else chat messages."""
    value: Any = parsed_text(column_of(row, column), column)
    if isinstance(value, str):
        if not value:
            raise RowError(f"{column!r} is empty")
        return value if isinstance(prompt, str) else [{"role": ASSISTANT, "content": value}]
    if isinstance(prompt, str):
        raise RowError(
            f"{column!r} must be text, as the prompt is; for chat messages, write the prompt as"
            " messages too, and the response without it"
        )
    messages = messages_of(row, column)
    if {messages[0]["role"], messages[-1]["role"]} != {ASSISTANT}:
        raise RowError(f"{column!r} must start and end with an assistant turn, without the prompt")
    if not any(map(is_learned, messages)):
        raise RowError(f"{column!r} has no assistant turn to train on")
    return messages


def answer_of(row: Row, column: str | None) -> str:
    """Return the reference answer: text, a finite number as a decimal, or "" without a column.

    A number of JSON has the file's digits, and one of Parquet those of its type: a 64-bit float's
    shortest ones. Raises RowError for a value that is neither, or a number of too many digits.
    """
    value = "" if column is None else column_of(row, column)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        number = Decimal(value.text if isinstance(value, SpelledNumber) else str(value))
        if number.is_finite():
            if abs(number.adjusted()) > MOST_DIGITS:
                raise RowError(f"{column!r} is {TOO_MANY_DIGITS}")
            return format(number, "f")  # 1e-05 would be read as e - 5
    raise RowError(f"{column!r} is neither text nor a finite number")


def parsed_line(line: bytes) -> Row | RowError:
    """Return the row of a line of JSONL, or the error for one that has none."""
    try:
        # json.loads(bytes) would accept UTF-16 too. Without its end, at which an error's column
        # would be the first of a next line.
        row = _JSON.decode(line.decode("utf-8-sig").rstrip("\r\n"))
        if SURROGATE.search(line):  # JSON allows half a pair, tokenizers do not
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return RowError("half of a surrogate pair, which is not text")
    except UnicodeDecodeError as error:
        if line.startswith(GZIP):
            return RowError("is compressed (gzip); unpack the file")
        return RowError(f"not UTF-8: {error}")
    except json.JSONDecodeError as error:
        if error.doc.lstrip().startswith("[") and not error.doc[error.pos :].strip():
            return RowError(ARRAY)  # that continues in the next lines
        return RowError(f"not valid JSON: {error.msg} at column {error.colno}")
    except ValueError:
        return RowError(f"has {TOO_MANY_DIGITS}")
    except RecursionError:
        return RowError("nested too deeply")
    if isinstance(row, list):
        return RowError(ARRAY)
    return row if isinstance(row, dict) else RowError("not a JSON object")


def _number(text: str) -> float:
    """Return the number of a JSON text, with the text where the float is another number."""
    value = float(text)
    try:
        return value if Decimal(text) == Decimal(str(value)) else SpelledNumber(text)
    except InvalidOperation:  # an exponent of twenty digits
        return value


_JSON = json.JSONDecoder(parse_float=_number)
