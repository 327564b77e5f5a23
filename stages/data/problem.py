"""A problem of a domain, and the error that names a domain's wrong setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from parallel.errors import UserError
from stages.data.chat import Message, content_key


class DomainError(UserError):
    """A domain that cannot be trained on; the message starts with the key to fix."""

    def __init__(self, domain: str, key: str, message: str) -> None:
        super().__init__(f"domains.{domain}.{key}: {message}")


@dataclass(frozen=True)
class Problem:
    """One question, and what a reward may want to know of it.

    `prompt` is the text the model reads: where the source has chat messages, those are `messages`,
    and the prompt is what the tokenizer's chat template makes of them. `answer` is the reference,
    or "". `fields` is the whole row it came from; of reasoning-gym, the `dataset`'s name and its
    `entry`, which the dataset's own scorer compares with. `index` is the problem's place in the
    stream it came from.
    """

    domain: str
    index: int
    prompt: str
    answer: str
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    messages: tuple[Message, ...] | None = field(default=None, repr=False)

    @cached_property
    def key(self) -> str:
        """Content hash of the prompt, 64 hexadecimal digits: equal for all that reads the same."""
        return content_key(self.prompt if self.messages is None else self.messages)
