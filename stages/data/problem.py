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
    """A question, with the fields that rewards read.

    `prompt` is the text that the model reads: where the source has chat `messages`, their rendering
    by the tokenizer's chat template. `answer` is the reference, or "". `fields` is the whole source
    row; for reasoning-gym the `dataset`'s name and the `entry` that its scorer reads. `index` is
    the problem's index in its stream.
    """

    domain: str
    index: int
    prompt: str
    answer: str
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    messages: tuple[Message, ...] | None = field(default=None, repr=False)

    @cached_property
    def key(self) -> str:
        """The content hash of the prompt, 64 hexadecimal digits (see `content_key`)."""
        return content_key(self.prompt if self.messages is None else self.messages)
