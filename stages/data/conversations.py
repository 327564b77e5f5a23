"""Conversations as samples to imitate: every turn of the assistant is learned, the rest is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parallel.sample import Sample
from stages.data.chat import ASSISTANT, Message
from stages.data.tokenizer import Tokenizer, TokenizerError

SHOWN = 60  # characters of a rendering in an error


@dataclass(frozen=True)
class Segment:
    """A piece of a conversation's text; `learned` is what the assistant said, with what the
    template puts behind it."""

    text: str
    learned: bool


def segments(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[Segment]:
    """The conversation up to the assistant's last turn, in pieces that alternate.

    A turn's piece begins where the template stops when it asks for that very turn, since that is
    what a rollout's prompt ends with. Raises TokenizerError where the beginning of a conversation
    is not rendered as the beginning of the whole: then what is trained is not what is sampled.
    """
    found: list[Segment] = []
    text = ""
    for place, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        asked = tokenizer.render(messages[:place], generation_prompt=True)
        answered = tokenizer.render(messages[: place + 1], generation_prompt=False)
        found.append(Segment(_continued(text, asked, place), learned=False))
        found.append(Segment(_continued(asked, answered, place), learned=True))
        text = answered
    return found


def conversation_sample(tokenizer: Tokenizer, messages: Sequence[Message], domain: str) -> Sample:
    """The prompt is all before the assistant's first turn; of the rest, the assistant's turns are
    learned, each up to its end token.

    Pieces are encoded one by one, as a rollout's prompt and response are. Raises TokenizerError
    where the chat template does not allow it.
    """
    first, *rest = segments(tokenizer, messages)
    ids: list[int] = []
    learned: list[bool] = []
    for segment in rest:
        own = tokenizer.encode(segment.text)
        upto = _after_end(tokenizer, own, segment.text) if segment.learned else 0
        ids += own
        learned += [place < upto for place in range(len(own))]
    while not learned[-1]:  # what the template puts behind the last end token
        ids.pop()
        learned.pop()
    return Sample(
        domain=domain,
        prompt=np.array(tokenizer.encode(first.text), np.int32),
        response=np.array(ids, np.int32),
        loss_mask=None if all(learned) else np.array(learned),
    )


def response_sample(tokenizer: Tokenizer, prompt: str, response: str, domain: str) -> Sample:
    """A prompt of text and a response of text, which gets an end token."""
    return Sample(
        domain=domain,
        prompt=np.array(tokenizer.encode(prompt), np.int32),
        response=np.array([*tokenizer.encode(response), tokenizer.end_token], np.int32),
    )


def _continued(before: str, after: str, place: int) -> str:
    """What `after` adds to `before`, which it should begin with."""
    if after.startswith(before):
        return after[len(before) :]
    same = next(i for i in range(len(before)) if before[i] != after[i : i + 1])
    here, there = (repr(text[same : same + SHOWN]) for text in (before, after))
    raise TokenizerError(
        "model.tokenizer: its chat template rewrites what came before when a conversation goes on:"
        f" message {place + 1} turns {here} into {there}; give every turn of the assistant a row"
        " of its own that ends with it, or use a template that leaves earlier turns alone"
    )


def _after_end(tokenizer: Tokenizer, ids: list[int], text: str) -> int:
    """How many of a turn's ids are learned: up to its last end token, which a rollout stops at."""
    if tokenizer.end_token not in ids:
        raise TokenizerError(
            f"model.tokenizer: its chat template ends a turn of the assistant, {text[-SHOWN:]!r},"
            f" without the end token {tokenizer.end_token}; set eos_token in its"
            " tokenizer_config.json to what the template writes"
        )
    return len(ids) - ids[::-1].index(tokenizer.end_token)
