"""Demonstrations for the cold start, generated or from files, as SFT samples.

Generated ones are a mixture of careful and careless work, so that reinforcement learning has
something to select: a model shown only careful work gained nothing from it at this size. Of a
conversation, assistant turns are trained on and all other tokens are masked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

import numpy as np

from parallel.sample import Sample
from stages.data.compact_forms import FORMATS
from stages.data.index import Order, RowIndex, build_index
from stages.data.problem import ASSISTANT, DataError, DomainError, Message, Problem, content_key
from stages.data.prompts import PromptStream
from stages.data.row_forms import Conversation, Row, RowError, conversation_of
from stages.data.settings import (
    CollectedFileSettings,
    ConversationFileSettings,
    GeneratedDemonstrationSettings,
)
from stages.data.tokenizer import Tokenizer, TokenizerError

PROBED = 32  # conversations that are rendered before training begins
SHOWN = 60  # characters of a rendering in an error


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


def response_sample(tokenizer: Tokenizer, prompt: str, response: str, domain: str) -> Sample:
    """Return a text prompt and a text response, with the main end token, as a sample."""
    return Sample(
        domain=domain,
        prompt=np.array(tokenizer.encode(prompt), np.int32),
        response=np.array([*tokenizer.encode(response), tokenizer.end_token], np.int32),
    )


def conversation_sample(
    tokenizer: Tokenizer, messages: Sequence[Message], domain: str, given: int = 0
) -> Sample:
    """Return a conversation as a sample whose prompt ends before the first assistant turn.

    With `given`, the prompt includes that number of assistant turns.

    The loss mask covers each assistant turn up to its end token, at which a rollout stops. Where
    the template writes none in a turn it is the first token of the next one, if that is an end
    token, and after the last turn `closing_token`. Segments are encoded one by one, as a rollout's
    prompt and response are. Raises TokenizerError as `segments`.
    """
    parts = segments(tokenizer, messages)
    first, rest = "".join(parts[: 2 * given + 1]), parts[2 * given + 1 :]
    ids: list[int] = []
    learned: list[bool] = []
    ended = True
    for number, text in enumerate(rest):
        own = tokenizer.encode(text)
        ends = [place for place, token in enumerate(own) if token in tokenizer.end_tokens]
        if number % 2 == 0:  # an assistant turn
            ended = bool(ends)
            upto = ends[-1] + 1 if ended else len(own)
        else:  # which begins with what ends the turn before, where that has no end token
            upto = int(not ended and own[0] in tokenizer.end_tokens)
        ids += own
        learned += [place < upto for place in range(len(own))]
    if not ended:
        ids.append(closing_token(tokenizer, last_answer(messages)))
        learned.append(True)
    while not learned[-1]:  # the template's suffix after the last end token
        ids.pop()
        learned.pop()
    return Sample(
        domain=domain,
        prompt=np.array(tokenizer.encode(first), np.int32),
        response=np.array(ids, np.int32),
        loss_mask=None if all(learned) else np.array(learned),
    )


def segments(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[str]:
    """Return the conversation up to the last assistant turn: masked and learned texts in turn.

    A learned text is an assistant turn with the template's suffix; it begins after the template's
    generation prompt, where a rollout's prompt ends.
    Raises TokenizerError where the template does not render the first turns as a prefix of the
    whole: training would then see other tokens than sampling.
    """
    found: list[str] = []
    text = ""
    for place, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        asked = tokenizer.render(messages[:place], generation_prompt=True)
        answered = tokenizer.render(messages[: place + 1], generation_prompt=False)
        found += [_continued(text, asked, place), _continued(asked, answered, place)]
        text = answered
    return found


def closing_token(tokenizer: Tokenizer, messages: Sequence[Message]) -> int:
    """Return the end token after the last turn, which a template without one in it leaves out.

    It is the end token with which the template begins the next turn, the tool's after a turn that
    calls tools, else the user's: GLM's `<|observation|>` or `<|user|>`. A template that begins no
    turn with an end token, or rejects the turn, leaves the first of `tokenizer.end_tokens`.
    """
    role = "tool" if messages[-1].get("tool_calls") else "user"
    try:
        before, after = (
            [token for token in tokenizer.encode(text) if token in tokenizer.end_tokens]
            for text in (
                tokenizer.render(messages, generation_prompt=False),
                tokenizer.render([*messages, {"role": role, "content": "?"}], False),
            )
        )
    except TokenizerError:
        return tokenizer.end_token
    return after[len(before)] if len(after) > len(before) else tokenizer.end_token


def last_answer(messages: Sequence[Message]) -> Sequence[Message]:
    """Return a conversation up to its last assistant turn."""
    last = max(place for place, each in enumerate(messages) if each["role"] == ASSISTANT)
    return messages[: last + 1]


def _continued(before: str, after: str, place: int) -> str:
    """Return `after` without its prefix `before`. Raises TokenizerError where it has another."""
    if after.startswith(before):
        return after[len(before) :]
    same = next(i for i in range(len(before)) if before[i] != after[i : i + 1])
    here, there = (repr(text[same : same + SHOWN]) for text in (before, after))
    raise TokenizerError(
        f"model.tokenizer: its chat template rewrites earlier turns: message {place + 1} turns"
        f" {here} into {there}; split the conversation into rows that end with their only"
        " assistant turn, or use a template that leaves earlier turns unchanged"
    )


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
    ) -> None:
        self.cursor = cursor
        self.too_long = 0
        self._tokenizer = tokenizer
        self._limit = limit
        self._index = conversation_index(settings, domain, key)
        self._rows = self._index.split(False, held_out_fraction)
        self.rows = len(self._rows)
        self._order = Order(self._rows, seed)
        for row in self._rows[:PROBED].tolist():
            self._sample(row)

    def draw(self, step: int, count: int) -> list[Sample]:
        """Return the next `count` conversations, independent of `step`.

        Raises DomainError where all are too long.
        """
        return [self._next() for _ in range(count)]

    def all(self) -> Iterator[Sample]:
        """Return every conversation once, in the order of the files."""
        return map(self._sample, self._rows.tolist())

    def _next(self) -> Sample:
        for _ in range(2 * self.rows):  # consecutive rows that include a whole epoch
            sample = self._sample(self._order.row(self.cursor))
            self.cursor += 1
            if sample.length <= self._limit:
                return sample
            self.too_long += 1
        why = f"every conversation is longer than {self._limit} tokens"
        raise DataError(f"{self._index.key}.max_tokens", why)

    def _sample(self, row: int) -> Sample:
        shown: Conversation = self._index.read(row)
        try:
            if isinstance(shown, tuple):
                return response_sample(self._tokenizer, *shown, self._index.domain)
            return conversation_sample(self._tokenizer, shown, self._index.domain)
        except TokenizerError as error:
            raise TokenizerError(f"{error}; in {self._index.place(row)}") from error


@cache
def conversation_index(
    settings: ConversationFileSettings, domain: str, key: str | None = None
) -> RowIndex:
    """Return the index of conversations; the files are read once a process.

    `key` is that of the settings, where they are not the domain's own demonstrations.
    """
    columns = [settings.messages]
    if settings.response is not None:
        columns = [settings.prompt, settings.response]
    if isinstance(settings, CollectedFileSettings):
        columns += [settings.messages, "domain"]

    def parse(row: Row) -> tuple[Conversation, str, str]:
        """Return a row's demonstration, and the hash of the turns before the first response too."""
        only = settings.domain if isinstance(settings, CollectedFileSettings) else None
        if only not in (None, row.get("domain")):
            raise RowError(f"it is of the domain {row.get('domain')}")
        # Of what a stage collected, `prompt` is the rendering of the chat messages.
        found = conversation_of(
            row,
            settings.messages,
            settings.prompt,
            settings.response,
            rendered=isinstance(settings, CollectedFileSettings),
        )
        if isinstance(found, tuple):
            return found, content_key("\0".join(found)), content_key(found[0])
        first = found[: [each["role"] for each in found].index(ASSISTANT)]
        return found, content_key(found), content_key(first)

    at = key or f"domains.{domain}.demonstrations"
    return build_index(settings, domain, at, columns, parse)
