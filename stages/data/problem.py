"""A problem of a domain, its chat messages, and the error that names a domain's wrong setting."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

from parallel.errors import UserError

Message = dict[str, Any]  # `{"role": ..., "content": ...}`, as every chat template reads it
Tool = dict[str, Any]  # `{"type": "function", "function": {...}}`
ASSISTANT = "assistant"
SPLIT_DIGITS = 16  # of a content key, 64 bits, which decide whether a problem is held out


class DomainError(UserError):
    """A domain that cannot be trained on; the message starts with the key to fix."""

    def __init__(self, domain: str, key: str, message: str) -> None:
        super().__init__(f"domains.{domain}.{key}: {message}")


class DataError(DomainError):
    """Data that cannot be used, of the settings at a full key: a domain's, or a stage's."""

    def __init__(self, key: str, message: str) -> None:
        UserError.__init__(self, f"{key}: {message}")


@dataclass(frozen=True)
class Problem:
    """A question, with the fields that rewards read.

    `prompt` is the text that the model reads: where the source has chat `messages`, their rendering
    with `tools` by the tokenizer's chat template. `answer` is the reference, or "". `fields` is the
    whole source row; for reasoning-gym the `dataset`'s name and the `entry` that its scorer reads.
    `index` is the problem's index in its stream.

    Example: the first 16 digits of the key decide the split: 0.81 of their range is training.
        >>> problem = Problem("sums", 0, "c1+1=", "2", {"dataset": "chain_sum"})
        >>> problem.key[:16], round(int(problem.key[:16], base=16) / 2**64, 2)
        ('cfc43f80c6bbbff2', 0.81)
        >>> Problem("sums", 7, " c1+1=", "2").key == problem.key
        True
    """

    domain: str
    index: int
    prompt: str
    answer: str
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    messages: tuple[Message, ...] | None = field(default=None, repr=False)
    tools: tuple[Tool, ...] = field(default=(), repr=False, compare=False)

    @cached_property
    def key(self) -> str:
        """The content hash of the prompt, 64 hexadecimal digits (see `content_key`)."""
        return content_key(self.prompt if self.messages is None else self.messages, self.tools)

    @property
    def question_key(self) -> str:
        """The content hash of the prompt without its tools."""
        return content_key(self.prompt if self.messages is None else self.messages)


def content_key(prompt: str | Sequence[Message], tools: Sequence[Tool] = ()) -> str:
    """Return the hash of a prompt's content, 64 hexadecimal digits: its SHA-256 without `tools`.

    It does not depend on the chat template or on whitespace, and a single user message hashes like
    its text: the held-out split is the same however a file writes its prompts.

    With tools the last 48 digits hash them too: a question with other tools is another problem.
    The first, which decide the split, do not: a held-out question is in no training prompt.

    Example:
        >>> content_key("1 + 1?") == content_key([{"role": "user", "content": " 1 +  1?"}])
        True
    """
    if isinstance(prompt, str):
        text = _spaced(prompt)
    elif len(prompt) == 1 and prompt[0] == {"role": "user", "content": prompt[0]["content"]}:
        text = _spaced(prompt[0]["content"])
    else:
        messages = [{**message, "content": _spaced(message["content"])} for message in prompt]
        text = json.dumps(messages, sort_keys=True, ensure_ascii=False)
    # Half of a surrogate pair, which has no bytes in UTF-8, has a hash too.
    key = sha256(text.encode(errors="surrogatepass")).hexdigest()
    if not tools:
        return key
    text = key + json.dumps(list(tools), sort_keys=True)
    return key[:SPLIT_DIGITS] + sha256(text.encode()).hexdigest()[SPLIT_DIGITS:]


def seed_of(*identifiers: object) -> int:
    """Return a seed below 2^62 that no other purpose shares."""
    digest = sha256("/".join(map(str, identifiers)).encode()).digest()
    return int.from_bytes(digest[:8]) >> 2


def _spaced(text: str) -> str:
    return " ".join(text.split())
