"""Problems from JSONL and Parquet files, one a row."""

from __future__ import annotations

import json
import math
from functools import cache

from stages.data.chat import ASSISTANT, Message, as_messages, content_key
from stages.data.problem import Problem
from stages.data.sources.index import Order, RowIndex, build_index
from stages.data.sources.rows import Row, RowError, missing
from stages.data.sources.settings import FilePromptSettings
from stages.data.tokenizer import Tokenizer, TokenizerError


class FileSource:
    """An endless source of the rows of one split, each once an epoch in a seeded order.

    Raises DomainError where the files or their rows cannot be used, or the split is empty.
    """

    key = "prompts.path"

    def __init__(
        self,
        settings: FilePromptSettings,
        tokenizer: Tokenizer,
        domain: str,
        seed: int,
        held_out: bool,
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._domain = domain
        self._index = prompt_index(settings, domain)
        rows = self._index.split(held_out, settings.held_out_fraction)
        self._order = Order(rows, seed)
        self.patience = 2 * len(rows)  # consecutive rows that include a whole epoch

    def problem(self, index: int) -> Problem | None:
        """Return the problem at `index`, or None where its prompt is too long.

        Raises TokenizerError, naming the row, where it cannot be rendered or encoded.
        """
        row = self._order.row(index)
        try:
            problem = problem_at(self._index, self._settings, self._tokenizer, row, index)
            tokens = len(self._tokenizer.encode(problem.prompt))
        except TokenizerError as error:
            raise TokenizerError(f"{error}; in {self._index.place(row)}") from error
        limit = self._settings.max_prompt_tokens
        return None if limit is not None and tokens > limit else problem


@cache
def prompt_index(settings: FilePromptSettings, domain: str) -> RowIndex:
    """Return the index of a domain's prompts; the files are read once a process."""
    columns = [settings.prompt, *([] if settings.answer is None else [settings.answer])]

    def identify(row: Row) -> tuple[str, str]:
        key = content_key(prompt_of(row, settings.prompt))
        answer_of(row, settings)
        return key, key

    return build_index(settings, domain, "prompts", columns, identify)


def problem_at(
    index: RowIndex, settings: FilePromptSettings, tokenizer: Tokenizer, row: int, place: int
) -> Problem:
    """Return the problem of a row of the index, as number `place` of its stream."""
    fields = index.read(row)
    try:
        prompt = prompt_of(fields, settings.prompt)
        answer = answer_of(fields, settings)
    except RowError as error:
        raise index.changed(row, str(error)) from error
    index.check(row, content_key(prompt))
    if isinstance(prompt, str):
        return Problem(index.domain, place, prompt, answer, fields)
    text = tokenizer.render(prompt, generation_prompt=True)
    return Problem(index.domain, place, text, answer, fields, tuple(prompt))


def prompt_of(row: Row, column: str) -> str | list[Message]:
    """Return a prompt's text or chat messages. Raises RowError where it is neither."""
    if column not in row:
        raise missing(column, list(row))
    value = row[column]
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


def messages_of(row: Row, column: str) -> list[Message]:
    """Return a column's chat messages. Raises RowError where there are none."""
    if column not in row:
        raise missing(column, list(row))
    try:
        return as_messages(row[column])
    except ValueError as error:
        raise RowError(f"{column!r} {error}") from error


def answer_of(row: Row, settings: FilePromptSettings) -> str:
    """Return the reference answer: text, a finite number as JSON writes it, or "" without a column.

    Raises RowError for a value that is neither.
    """
    if settings.answer is None:
        return ""
    if settings.answer not in row:
        raise missing(settings.answer, list(row))
    value = row[settings.answer]
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf:
        return json.dumps(value)
    raise RowError(f"{settings.answer!r} is neither text nor a finite number")
