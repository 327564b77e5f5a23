"""Demonstrations from JSONL and Parquet files: conversations, or prompts with their responses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from parallel.sample import Sample
from stages.data.chat import ASSISTANT, Message, content_key
from stages.data.conversations import conversation_sample, response_sample
from stages.data.problem import DomainError
from stages.data.sources.index import Order, RowIndex, build_index
from stages.data.sources.prompt_rows import messages_of, prompt_of
from stages.data.sources.rows import Row, RowError, missing
from stages.data.sources.settings import FileDemonstrationSettings
from stages.data.tokenizer import Tokenizer, TokenizerError

PROBED = 32  # conversations that are rendered before training begins
Shown = tuple[str, str] | list[Message]  # a prompt's text and a response's, or chat messages


class ConversationStream:
    """An endless stream of a domain's conversations, each once an epoch in a seeded order.

    The next conversation is a pure function of the settings, the seed and `cursor`. Conversations
    with held-out prompts never come; `too_long` counts those skipped for more than `limit` tokens.
    Raises DomainError for unusable rows, and TokenizerError for an unusable chat template.
    """

    def __init__(
        self,
        settings: FileDemonstrationSettings,
        tokenizer: Tokenizer,
        domain: str,
        seed: int,
        held_out_fraction: float,
        limit: int,
        cursor: int = 0,
    ) -> None:
        self.cursor = cursor
        self.too_long = 0
        self._settings = settings
        self._tokenizer = tokenizer
        self._limit = limit
        self._index = conversation_index(settings, domain)
        rows = self._index.split(False, held_out_fraction)
        self._rows = rows
        self._order = Order(rows, seed)
        self._patience = 2 * len(rows)  # consecutive rows that include a whole epoch
        for row in rows[:PROBED].tolist():
            self._sample(row)

    def draw(self, step: int, count: int) -> list[Sample]:
        """Return the next `count` conversations, independent of `step`.

        Raises DomainError where all are too long.
        """
        return [self._next() for _ in range(count)]

    @property
    def rows(self) -> int:
        """The number of conversations, including too long ones."""
        return len(self._rows)

    def all(self) -> Iterator[Sample]:
        """Return every conversation once, in the order of the files."""
        return map(self._sample, self._rows.tolist())

    def _next(self) -> Sample:
        for _ in range(self._patience):
            sample = self._sample(self._order.row(self.cursor))
            self.cursor += 1
            if sample.length <= self._limit:
                return sample
            self.too_long += 1
        raise DomainError(
            self._index.domain,
            "demonstrations.max_tokens",
            f"every conversation is longer than {self._limit} tokens",
        )

    def _sample(self, row: int) -> Sample:
        domain = self._index.domain
        try:
            shown = shown_in(self._index.read(row), self._settings)
        except RowError as error:
            raise self._index.changed(row, str(error)) from error
        self._index.check(row, _prompt_key(shown))
        try:
            if isinstance(shown, tuple):
                return response_sample(self._tokenizer, *shown, domain)
            return conversation_sample(self._tokenizer, shown, domain)
        except TokenizerError as error:
            raise TokenizerError(f"{error}; in {self._index.place(row)}") from error


@cache
def conversation_index(settings: FileDemonstrationSettings, domain: str) -> RowIndex:
    """Return the index of a domain's demonstrations; the files are read once a process."""
    response = settings.response
    columns = [settings.messages] if response is None else [settings.prompt, response]

    def identify(row: Row) -> tuple[str, str]:
        shown = shown_in(row, settings)
        whole = "\0".join(shown) if isinstance(shown, tuple) else shown
        return content_key(whole), _prompt_key(shown)

    return build_index(settings, domain, "demonstrations", columns, identify)


def shown_in(row: Row, settings: FileDemonstrationSettings) -> Shown:
    """Return a row's demonstration. Raises RowError where it has nothing to train on."""
    if settings.response is not None:
        return _pair(row, settings.prompt, settings.response)
    messages = messages_of(row, settings.messages)
    roles = [each["role"] for each in messages]
    if roles[0] == ASSISTANT:
        raise RowError(f"{settings.messages!r} must not start with an assistant turn")
    if ASSISTANT not in roles:
        raise RowError(f"{settings.messages!r} has no assistant turn to train on")
    return messages


def _pair(row: Row, prompt_column: str, response_column: str) -> Shown:
    prompt = prompt_of(row, prompt_column)
    if response_column not in row:
        raise missing(response_column, list(row))
    response = row[response_column]
    if not isinstance(response, str) or not response:
        raise RowError(f"{response_column!r} is empty or not text")
    if isinstance(prompt, str):
        return prompt, response
    return [*prompt, {"role": ASSISTANT, "content": response}]


def _prompt_key(shown: Shown) -> str:
    """Return the content hash of the turns before the first assistant turn, for the split."""
    if isinstance(shown, tuple):
        return content_key(shown[0])
    roles = [each["role"] for each in shown]
    return content_key(shown[: roles.index(ASSISTANT)])
