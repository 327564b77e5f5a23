"""Chat messages: `{"role": ..., "content": ...}`, as every chat template reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

Message = dict[str, Any]
ASSISTANT = "assistant"


def as_messages(value: object) -> list[Message]:
    """Return the chat messages in a row's column, without null keys, which Parquet cannot omit.

    Raises ValueError where `value` is not a list of messages.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("is not a list of messages")
    messages = []
    for place, each in enumerate(value, start=1):
        message = {}
        if isinstance(each, dict):
            message = {name: part for name, part in each.items() if part is not None}
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise ValueError(f"has a message, number {place}, whose {name} is not text")
        messages.append(message)
    return messages


def content_key(prompt: str | Sequence[Message]) -> str:
    """Return the SHA-256 of a prompt's content, 64 hexadecimal digits.

    It does not depend on the chat template or on whitespace, and a single user message hashes like
    its text: the held-out split is the same however a file writes its prompts.
    """
    if isinstance(prompt, str):
        text = _spaced(prompt)
    elif len(prompt) == 1 and prompt[0].keys() == {"role", "content"} and _asks(prompt[0]):
        text = _spaced(prompt[0]["content"])
    else:
        messages = [{**each, "content": _spaced(each["content"])} for each in prompt]
        text = json.dumps(messages, sort_keys=True, ensure_ascii=False)
    return sha256(text.encode(errors="surrogatepass")).hexdigest()


def _spaced(text: str) -> str:
    return " ".join(text.split())


def _asks(message: Message) -> bool:
    return message["role"] == "user"
