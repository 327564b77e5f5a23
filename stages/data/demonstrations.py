"""Demonstrations for the cold start, generated or from files, as SFT samples.

Generated ones are a mixture of careful and careless work, so that reinforcement learning has
something to select: a model shown only careful work gained nothing from it at this size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random

from parallel.sample import Sample
from stages.data.columns import Row, RowError
from stages.data.compact_forms import FORMATS
from stages.data.conversations import conversation_samples, response_sample
from stages.data.index import Order, RowIndex, build_index, optional_columns, probed, usable
from stages.data.messages import tools_of
from stages.data.problem import ASSISTANT, DataError, DomainError, Problem, Tool, content_key
from stages.data.prompt_template import templated_conversation
from stages.data.prompts import PromptStream
from stages.data.row_forms import Conversation, conversation_of
from stages.data.settings import (
    CollectedFileSettings,
    ConversationFileSettings,
    GeneratedDemonstrationSettings,
    PromptTemplateSettings,
)
from stages.data.tokenizer import Tokenizer, TokenizerError


@dataclass(frozen=True)
class Demonstration:
    """A problem and a response to imitate, which shows work where it is `worked`."""

    problem: Problem
    response: str
    worked: bool


def demonstrations(
    settings: GeneratedDemonstrationSettings, prompts: PromptStream, seed: int
) -> list[Demonstration]:
    """Return demonstrations of the next `settings.count` problems of `prompts`.

    Each is worked with probability `settings.worked_fraction`, a pure function of `seed` and the
    domain.
    """
    random = Random(f"{seed}/{prompts.domain}/demonstrations")
    return [
        demonstrate(
            problem,
            random.random() < settings.worked_fraction,
            random,
            right=settings.unworked == "right",
        )
        for problem in prompts.take(settings.count)
    ]


def demonstrate(
    problem: Problem, worked: bool, random: Random, *, right: bool = False
) -> Demonstration:
    """Return `<working>answer` where `worked`, else `<>` and an answer, careless if not `right`.

    Raises DomainError for a problem with chat messages, whose working nobody has written.
    """
    if problem.messages is not None:
        why = "generated demonstrations require prompts.form: compact; use source jsonl or parquet"
        raise DomainError(problem.domain, "demonstrations.source", why)
    form = FORMATS[problem.fields["dataset"]]
    working = form.working(problem.fields["entry"]) if worked else ""
    answer = problem.answer if worked or right else form.careless(problem.answer, random)
    return Demonstration(problem, f"<{working}>{answer}", worked)


class ConversationStream:
    """An endless stream of a domain's conversations, each once an epoch in a seeded order.

    The next conversation is a pure function of the settings, the seed and `cursor`. Conversations
    with held-out prompts never come; `too_long` counts those skipped for more than `limit` tokens;
    `rows` is the number of conversations, including those. `key` is that of the settings, where
    they are not the domain's own demonstrations. Raises DomainError for unusable rows, and
    TokenizerError for an unusable chat template.
    """

    def __init__(
        self,
        settings: ConversationFileSettings,
        tokenizer: Tokenizer,
        domain: str,
        seed: int,
        held_out_fraction: float,
        limit: int,
        cursor: int = 0,
        key: str | None = None,
        template: PromptTemplateSettings | None = None,
    ) -> None:
        self.cursor = cursor
        self.too_long = 0
        self._tokenizer = tokenizer
        self._limit = limit
        self._index = conversation_index(settings, domain, key, template)
        self._rows = self._index.split(False, held_out_fraction)
        self.rows = len(self._rows)
        self._order = Order(self._rows, seed)
        # An unusable chat template is an error here, before the first step.
        for _ in probed(self._samples, self._rows.tolist(), self._index.key):
            pass

    def draw(self, step: int, count: int) -> list[Sample]:
        """Return the samples of the next `count` conversations, independent of `step`.

        Raises DomainError where all are too long.
        """
        return [sample for _ in range(count) for sample in self._next()]

    def all(self) -> Iterator[Sample]:
        """Return the samples of every conversation once, in the order of the files."""
        for row in self._rows.tolist():
            yield from usable(self._samples, row, self._index.key) or ()

    def _next(self) -> list[Sample]:
        """Return the samples of the next conversation that fits."""
        before = self.too_long
        for _ in range(2 * self.rows):  # consecutive rows that include a whole epoch
            samples = usable(self._samples, self._order.row(self.cursor), self._index.key)
            self.cursor += 1
            if samples is None:
                continue
            if max(sample.length for sample in samples) <= self._limit:
                return samples
            self.too_long += 1
        if self.too_long == before:
            raise DataError(f"{self._index.key}.path", "every conversation is unusable")
        why = f"every conversation is longer than {self._limit} tokens"
        raise DataError(f"{self._index.key}.max_tokens", why)

    def _samples(self, row: int) -> list[Sample]:
        domain = self._index.domain
        conversation: Conversation
        conversation, tools = self._index.read(row)
        try:
            if isinstance(conversation, tuple):
                return [response_sample(self._tokenizer, *conversation, domain)]
            return conversation_samples(self._tokenizer, conversation, domain, tools=tools)
        except TokenizerError as error:
            raise self._index.rejected(row, error) from error


@cache
def conversation_index(
    settings: ConversationFileSettings,
    domain: str,
    key: str | None = None,
    template: PromptTemplateSettings | None = None,
) -> RowIndex:
    """Return the index of conversations; the files are read once a process.

    `key` is that of the settings, where they are not the domain's own demonstrations, which have
    the `template` of the domain's prompts.
    """
    columns = [settings.messages]
    if settings.response is not None:
        columns = [settings.prompt, settings.response]
    if isinstance(settings, CollectedFileSettings):
        columns += [settings.messages, "domain"]

    def parse(row: Row) -> tuple[tuple[Conversation, tuple[Tool, ...]], str, str]:
        """Return a row's demonstration with its tools, and the hashes of both and of its prompt.

        The prompt is the turns before the first response.
        """
        only = settings.domain if isinstance(settings, CollectedFileSettings) else None
        if only not in (None, row.get("domain")):
            raise RowError(f"it is of the domain {row.get('domain')}")
        # Of what a stage collected, `prompt` is the rendering of the chat messages.
        conversation = conversation_of(
            row,
            settings.messages,
            settings.prompt,
            settings.response,
            rendered=isinstance(settings, CollectedFileSettings),
        )
        conversation = templated_conversation(conversation, template)
        tools = tools_of(
            row,
            settings.tools,
            conversation[0] if isinstance(conversation, tuple) else conversation,
        )
        if isinstance(conversation, tuple):
            return (
                (conversation, tools),
                content_key("\0".join(conversation), tools),
                content_key(conversation[0]),
            )
        prompt_turns = conversation[
            : [message["role"] for message in conversation].index(ASSISTANT)
        ]
        return (conversation, tools), content_key(conversation, tools), content_key(prompt_turns)

    at = key or f"domains.{domain}.demonstrations"
    return build_index(settings, domain, at, columns, parse, optional=optional_columns(settings))
