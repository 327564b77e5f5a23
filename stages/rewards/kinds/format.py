"""Rewards for a response's form: a regular expression, and the script of its words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stages.data.thoughts import Markers
from stages.rewards.reward import AnswerReward, Pattern, Response, Reward, Unfinished, register

LETTERS = re.compile(r"[^\W\d_]+")
# Scripts that Unicode names otherwise, and scripts without spaces between words, in which every
# letter counts as a word.
UNICODE_NAMES = {"CJK": "han", "IDEOGRAPHIC": "han"}
WITHOUT_SPACES = frozenset({"han", "hiragana", "katakana", "thai"})

Script = Literal[
    "arabic", "bengali", "cyrillic", "devanagari", "greek", "han", "hangul", "hebrew", "hiragana",
    "katakana", "latin", "tamil", "thai",
]  # fmt: skip


class FormatReward(AnswerReward):
    """1 where the whole response matches a regular expression (`.` matches newlines too)."""

    judges_answer: ClassVar[bool] = False
    kind: Literal["format"] = "format"
    thought_markers: tuple[Markers, ...] = ()  # thoughts are a part of the form
    pattern: Pattern = Field(description="regular expression that the whole response must match")


class LanguageReward(AnswerReward):
    """The share of the response's words that are written in the expected scripts alone."""

    judges_answer: ClassVar[bool] = False
    kind: Literal["language"] = "language"
    thought_markers: tuple[Markers, ...] = ()
    scripts: Annotated[list[Script], Field(min_length=1)] = Field(
        description="scripts that words may be written in"
    )
    unfinished: Unfinished = "score"


@register(FormatReward)
def make_format(settings: FormatReward, _directory: Path) -> Reward:
    """Return the reward.

    Example:
        >>> reward = make_format(FormatReward(pattern=r"<.*>[0-9]+"), Path())
        >>> [reward(None, Response(text, 9)) for text in ("<2+2>4", "4", "<2+2>4.")]
        [1.0, 0.0, 0.0]
    """
    pattern = re.compile(settings.pattern, re.DOTALL)
    return lambda _, response: float(pattern.fullmatch(response.text) is not None)


@register(LanguageReward)
def make_language(settings: LanguageReward, _directory: Path) -> Reward:
    """Return the reward.

    Example: one word of four is in another script.
        >>> reward = make_language(LanguageReward(scripts=["latin"]), Path())
        >>> reward(None, Response("one, two, \u0442\u0440\u0438, 4 four", 9))
        0.75
    """
    expected = frozenset(settings.scripts)

    def reward(_: object, response: Response) -> float:
        words = list(_words(response.text))
        return sum(scripts <= expected for scripts in words) / len(words) if words else 1.0

    return reward


def _words(text: str) -> Iterator[frozenset[str]]:
    """Yield the scripts of every word. Marks on letters are dropped: they would split words."""
    # Full-width and mathematical letters become those that their script names.
    plain = unicodedata.normalize("NFKC", text)
    letters = "".join(
        character for character in plain if not unicodedata.category(character).startswith("M")
    )
    for match in LETTERS.finditer(letters):
        scripts = [_script(letter) for letter in match[0]]
        spaced = [script for script in scripts if script not in WITHOUT_SPACES]
        yield from (frozenset({script}) for script in scripts if script in WITHOUT_SPACES)
        if spaced:
            yield frozenset(spaced)


@cache
def _script(letter: str) -> str:
    first_word = unicodedata.name(letter, "UNKNOWN").partition(" ")[0]
    return UNICODE_NAMES.get(first_word, first_word.lower())
