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
from stages.data.chat_template import TOOL_CALL
from stages.data.compact_forms import FORMATS
from stages.data.index import (
    Order,
    RowIndex,
    build_index,
    optional_columns,
    probed,
    usable,
)
from stages.data.messages import Row, RowError, is_learned, tools_of
from stages.data.problem import (
    ASSISTANT,
    DataError,
    DomainError,
    Message,
    Problem,
    Tool,
    content_key,
)
from stages.data.prompts import PromptStream
from stages.data.row_forms import Conversation, conversation_of
from stages.data.settings import (
    CollectedFileSettings,
    ConversationFileSettings,
    GeneratedDemonstrationSettings,
)
from stages.data.thoughts import THINK
from stages.data.tokenizer import Tokenizer, TokenizerError

SHOWN = 60  # characters of a rendering in an error
OPENING, CLOSING = THINK
NOT_RENDERED = "\0"  # begins no prompt
# Of an assistant's message: templates that do not know one leave it out silently.
LEARNED_KEYS = ("content", "reasoning_content", "thinking")


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


def conversation_samples(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    domain: str,
    context_turns: int = 0,
    tools: Sequence[Tool] = (),
) -> list[Sample]:
    """Return a conversation as samples in which every assistant turn is learned once.

    The first `context_turns` assistant turns are only in the first prompt. There is one sample
    where the template renders earlier turns as it rendered them when they were the last; where it
    rewrites them, as Qwen3's drops their thoughts, or leaves out their end token, a further sample
    begins, whose prompt is what a rollout would read at that turn.
    Raises TokenizerError as `segments`.
    """
    return [
        _sample(tokenizer, prompt, texts, answered, domain)
        for (prompt, *texts), answered in segments(tokenizer, messages, context_turns, tools)
    ]


def conversation_sample(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    domain: str,
    context_turns: int = 0,
    tools: Sequence[Tool] = (),
) -> Sample:
    """Return the only sample of a conversation, as `conversation_samples`.

    Raises TokenizerError also where there are several.
    """
    sample, *more = conversation_samples(tokenizer, messages, domain, context_turns, tools)
    if more:
        raise TokenizerError(
            f"model.tokenizer: its chat template rewrites earlier turns, so that the response has"
            f" {1 + len(more)} assistant turns after different prompts; write the earlier ones into"
            " the prompt"
        )
    return sample


def _sample(
    tokenizer: Tokenizer,
    prompt: str,
    texts: Sequence[str],
    answered: Sequence[Message],
    domain: str,
) -> Sample:
    """Return the sample of a prompt's text and of learned and masked texts in turn.

    The loss mask covers each learned text up to its end token, at which a rollout stops. Where the
    template writes none in a turn it is the first token of the next one, if that is an end token,
    and after the last turn, of `answered`, `closing_token`. Texts are encoded one by one, as a
    rollout's prompt and response are.
    """
    ids: list[int] = []
    learned: list[bool] = []
    ended = True
    for number, text in enumerate(texts):
        text_ids = tokenizer.encode(text)
        ends = [place for place, token in enumerate(text_ids) if token in tokenizer.end_tokens]
        if number % 2 == 0:  # an assistant turn
            ended = bool(ends)
            upto = ends[-1] + 1 if ended else len(text_ids)
        else:  # which begins with what ends the turn before, where that has no end token
            upto = int(not ended and ends[:1] == [0])
        ids += text_ids
        learned += [place < upto for place in range(len(text_ids))]
    if not ended:
        ids.append(closing_token(tokenizer, answered))
        learned.append(True)
    while not learned[-1]:  # the template's suffix after the last end token
        ids.pop()
        learned.pop()
    return Sample(
        domain=domain,
        prompt=np.array(tokenizer.encode(prompt), np.int32),
        response=np.array(ids, np.int32),
        loss_mask=None if all(learned) else np.array(learned),
    )


def segments(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    context_turns: int = 0,
    tools: Sequence[Tool] = (),
) -> list[tuple[list[str], Sequence[Message]]]:
    """Return the texts of every sample of a conversation, and its messages to the last learned one.

    A sample has a prompt, then learned and masked texts in turn. A learned text is an assistant
    turn with the template's suffix; it begins after the template's generation prompt, where a
    rollout's prompt ends.
    Raises TokenizerError where the template does not render a turn after its generation prompt:
    training would then see other tokens than sampling.
    """
    samples: list[tuple[list[str], Sequence[Message]]] = []
    text = ""
    turns = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
    for place in turns[context_turns:]:
        if not is_learned(messages[place]):  # only in the prompts of later turns
            continue
        prompt = tokenizer.render(messages[:place], generation_prompt=True, tools=tools)
        answered = tokenizer.render(messages[: place + 1], generation_prompt=False, tools=tools)
        following = prompt[len(text) :] if samples and prompt.startswith(text) else None
        if following is not None and _ends(tokenizer, samples[-1][0][-1], following):
            texts = [*samples.pop()[0], following]
        else:
            texts = [prompt]
        try:
            turn, text = _turn(prompt, answered, messages[place], place), answered
        except TokenizerError:
            turn, text = _thinking_turn(tokenizer, prompt, messages[place]), NOT_RENDERED
            if not turn:
                raise
        samples.append(([*texts, turn], messages[: place + 1]))
    return samples


def _ends(tokenizer: Tokenizer, turn: str, following: str) -> bool:
    """Return whether an end token is in a turn, or begins what follows it before the next one.

    Two turns with no text between are one. DeepSeek-V3's template ends no turn of a single tool
    call: a sample of its own, completed with the end token, teaches that.
    """
    ids = [*tokenizer.encode(turn), *tokenizer.encode(following)[:1]]
    return not following or not set(ids).isdisjoint(tokenizer.end_tokens)


def closing_token(tokenizer: Tokenizer, messages: Sequence[Message]) -> int:
    """Return the end token after the last turn, which a template without one in it leaves out.

    It is the end token with which the template begins the next turn, the tool's after a turn that
    ends with a call of a tool, else the user's: GLM's `<|observation|>` or `<|user|>`. A template
    that begins no turn with an end token, or rejects the turn, leaves the first of
    `tokenizer.end_tokens`.
    """
    role = "tool" if _calls_tools(messages[-1]) else "user"
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


def _calls_tools(message: Message) -> bool:
    """Return whether a turn ends with a call of a tool, written into its content or beside it.

    As text a call is the end of what follows the thoughts: vLLM's parsers read no call in those,
    and templates write calls after the content.
    """
    opening, closing = TOOL_CALL
    answer = str(message.get("content") or "").rpartition(CLOSING)[2].strip()
    return bool(message.get("tool_calls")) or (opening in answer and answer.endswith(closing))


def _thinking_turn(tokenizer: Tokenizer, prompt: str, message: Message) -> str:
    """Return the text of a turn whose thoughts the prompt opens, as a rollout would write it.

    DeepSeek-R1's template ends a prompt with <think>, and renders no thoughts in any turn. The
    content may begin with <think>, or after it, as a collected response does. "" where the prompt
    does not end so, or the message has no thoughts.
    """
    content = str(message["content"])
    if thoughts := message.get("reasoning_content"):
        content = f"{OPENING}\n{thoughts}\n{CLOSING}\n\n{content}"
    opened = prompt.rstrip("\n")
    begins = content.lstrip().startswith(OPENING)
    if not opened.endswith(OPENING) or not (begins or CLOSING in content):
        return ""
    if message.get("tool_calls"):
        return ""
    if begins:
        newlines = "\n" * (len(prompt) - len(opened))
        content = content.lstrip().removeprefix(OPENING).removeprefix(newlines)
    return content + tokenizer.decode_prompt([tokenizer.end_token])


def _turn(prompt: str, answered: str, message: Message, place: int) -> str:
    """Return the text of an assistant turn after its prompt.

    Raises TokenizerError where it does not follow the prompt, or lacks a part of the message.
    """
    if not answered.startswith(prompt):
        same = next(i for i in range(len(prompt)) if prompt[i] != answered[i : i + 1])
        here, there = (repr(text[same : same + SHOWN]) for text in (prompt, answered))
        raise TokenizerError(
            f"model.tokenizer: its chat template renders message {place + 1} otherwise than after"
            f" its generation prompt: {here} there, {there} here; model.chat_template_arguments may"
            " choose another generation prompt, or use a template that renders both alike"
        )
    text = answered[len(prompt) :]
    for key in LEARNED_KEYS:
        # Templates trim contents and write their own whitespace around thoughts.
        if "".join(str(message.get(key) or "").split()) not in "".join(text.split()):
            raise TokenizerError(
                f"model.tokenizer: its chat template leaves out a part of the {key} of message"
                f" {place + 1}, {str(message[key])[:SHOWN]!r}; use a template that renders it, or"
                " remove it from the rows"
            )
    return text


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
