"""Conversations as SFT samples: assistant turns are trained on, all other tokens are masked."""

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
    """A piece of a conversation's text; `learned`: an assistant turn with the template's suffix."""

    text: str
    learned: bool


def segments(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[Segment]:
    """Return the conversation up to the last assistant turn, as alternating segments.

    An assistant turn begins after the template's generation prompt, where a rollout's prompt ends.
    Raises TokenizerError where the template does not render the first turns as a prefix of the
    whole: training would then see other tokens than sampling.
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
    """Return a conversation as a sample whose prompt ends before the first assistant turn.

    The loss mask covers each assistant turn up to its end token. Segments are encoded one by one,
    as a rollout's prompt and response are. Raises TokenizerError as `segments`.
    """
    first, *rest = segments(tokenizer, messages)
    ids: list[int] = []
    learned: list[bool] = []
    for segment in rest:
        own = tokenizer.encode(segment.text)
        upto = _learned_ids(tokenizer, own, segment.text) if segment.learned else 0
        ids += own
        learned += [place < upto for place in range(len(own))]
    while not learned[-1]:  # the template's suffix after the last end token
        ids.pop()
        learned.pop()
    return Sample(
        domain=domain,
        prompt=np.array(tokenizer.encode(first.text), np.int32),
        response=np.array(ids, np.int32),
        loss_mask=None if all(learned) else np.array(learned),
    )


def response_sample(tokenizer: Tokenizer, prompt: str, response: str, domain: str) -> Sample:
    """Return a text prompt and a text response, with an end token, as a sample."""
    return Sample(
        domain=domain,
        prompt=np.array(tokenizer.encode(prompt), np.int32),
        response=np.array([*tokenizer.encode(response), tokenizer.end_token], np.int32),
    )


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


def _learned_ids(tokenizer: Tokenizer, ids: list[int], text: str) -> int:
    """Return the number of an assistant turn's ids up to its last end token.

    A rollout stops there. Raises TokenizerError where there is no end token.
    """
    if tokenizer.end_token not in ids:
        raise TokenizerError(
            f"model.tokenizer: its chat template ends an assistant turn, {text[-SHOWN:]!r},"
            f" without the end token {tokenizer.end_token}; set eos_token in its"
            " tokenizer_config.json to what the template writes"
        )
    return len(ids) - ids[::-1].index(tokenizer.end_token)
