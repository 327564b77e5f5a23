"""Chat messages: `{"role": ..., "content": ...}`, as every chat template reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

Message = dict[str, Any]
ASSISTANT = "assistant"


def as_messages(value: object) -> list[Message]:
    """The messages of a row's column; what is null is left out, as Parquet cannot.

    Raises ValueError where it is no list of messages.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("is no list of messages")
    messages = []
    for place, each in enumerate(value, start=1):
        message = {}
        if isinstance(each, dict):
            message = {name: part for name, part in each.items() if part is not None}
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise ValueError(f"has a message, the {place}., whose {name} is no text")
        messages.append(message)
    return messages


def content_key(prompt: str | Sequence[Message]) -> str:
    """SHA-256 of what a prompt says, 64 hexadecimal digits.

    It does not depend on a chat template, and a single message of the user is the same prompt as
    its text: so the held-out split is the same however a file writes its prompts. Nor does it
    depend on the kind and amount of whitespace between words, or on any around the text.
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
