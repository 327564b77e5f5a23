"""A problem of a domain, and the error that names a domain's wrong setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any


class DomainError(Exception):
    """A domain that cannot be trained on; the message starts with the key to mend."""

    def __init__(self, domain: str, key: str, message: str) -> None:
        super().__init__(f"experts.{domain}.{key}: {message}")


@dataclass(frozen=True)
class Problem:
    """One question with a verifiable answer.

    `prompt`, `working` and `answer` are text in the compact form the model reads and writes;
    `entry` is what the dataset's own scorer compares with, and `fields` all else that its row
    holds. `index` is the problem's place in the stream it came from.
    """

    domain: str
    dataset: str
    index: int
    prompt: str
    working: str
    answer: str
    entry: dict[str, Any] = field(repr=False, compare=False)
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def key(self) -> str:
        """Content hash of the prompt, 64 hexadecimal digits: equal for all that reads the same."""
        return sha256(self.prompt.encode()).hexdigest()
