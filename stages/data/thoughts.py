"""The thoughts of a response and the answer after them: one rule for every reward of an answer.

A reasoning model writes its thoughts between two markers before it answers. Its template may end
the prompt with the opening one (DeepSeek-R1, Qwen3-Thinking), so that the response has the closing
one alone. Never imports torch.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Marker = Annotated[str, Field(pattern=r"\S")]
Markers = tuple[Marker, Marker]  # that open and close thoughts

THINK: Markers = ("<think>", "</think>")  # DeepSeek, GLM, Qwen and most others
KNOWN: tuple[Markers, ...] = (
    THINK,
    ("[THINK]", "[/THINK]"),  # Magistral
    # gpt-oss's channels. Between thoughts and answer stands <|end|><|start|>assistant.
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)


def split_thoughts(
    prompt: str, response: str, markers: tuple[Markers, ...] = KNOWN
) -> tuple[str, str | None]:
    r"""Return a response's thoughts and its answer, which is None where the thoughts do not end.

    Thoughts are opened by the end of the prompt or by the beginning of the response, and end at the
    last closing marker, as in the chat templates of the families that have them. Other text is
    answer: a marker within a program opens nothing.

    Example:
        >>> split_thoughts("2 + 2?", "<think>so</think>\n4")
        ('so', '4')
        >>> split_thoughts("2 + 2?<think>\n", "so</think>4")
        ('so', '4')
        >>> split_thoughts("2 + 2?", "<think>so 4")
        ('so 4', None)
    """
    for opening, closing in markers:
        text = response.lstrip()
        is_opened = opens_thoughts(prompt, opening)
        if not is_opened and not text.startswith((opening, closing)):
            continue
        thoughts, closed, answer = text.removeprefix(opening).rpartition(closing)
        # Thoughts that are opened once more after the last closing marker do not end either.
        if closed and not answer.lstrip().startswith(opening):
            return thoughts, answer.lstrip()
        return text.removeprefix(opening), None
    return "", response


def opens_thoughts(prompt: str, opening: str) -> bool:
    """Return whether a prompt ends inside thoughts, as a chat template may leave it."""
    return prompt.rstrip().endswith(opening)


def answer_after(prompt: str, answer: str, markers: tuple[Markers, ...] = KNOWN) -> str:
    """Return a response to the prompt that is this answer, after no thoughts."""
    closings = [closing for opening, closing in markers if opens_thoughts(prompt, opening)]
    return f"{closings[0]}{answer}" if closings else answer
