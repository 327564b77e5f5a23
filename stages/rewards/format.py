"""Rewards of how a response is written: its form, and the script of its words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from stages.rewards.reward import Reward
from stages.rewards.settings import FormatReward, LanguageReward

LETTERS = re.compile(r"[^\W\d_]+")
# How Unicode names a script's letters, and the scripts that put no spaces between words, of which
# every letter counts as one.
UNICODE_NAMES = {"CJK": "han", "IDEOGRAPHIC": "han"}
WITHOUT_SPACES = frozenset({"han", "hiragana", "katakana", "thai"})


def unfenced(text: str) -> str:
    """What stands in the one code fence that the text is, or the text."""
    lines = text.strip().splitlines()
    fenced = len(lines) > 1 and lines[0].strip().lower() in ("```", "```json")
    return "\n".join(lines[1:-1]) if fenced and lines[-1].strip() == "```" else text


def make_format(settings: FormatReward, _directory: Path) -> Reward:
    """1 where the whole response matches."""
    pattern = re.compile(settings.pattern, re.DOTALL)
    return lambda _, response: float(pattern.fullmatch(response.text) is not None)


def make_language(settings: LanguageReward, _directory: Path) -> Reward:
    """The share of words in the expected scripts."""
    expected = frozenset(settings.scripts)
    return lambda _, response: consistency(response.text, expected)


def consistency(text: str, expected: frozenset[str]) -> float:
    """The share of the words of `text` with letters of `expected` scripts alone; 1 without words,
    since nothing is then in another script."""
    words = list(_words(text))
    return sum(scripts <= expected for scripts in words) / len(words) if words else 1.0


def _words(text: str) -> Iterator[frozenset[str]]:
    """The scripts of every word. Marks on letters are left out: they would cut words in two."""
    plain = unicodedata.normalize("NFKC", text)
    letters = "".join(each for each in plain if not unicodedata.category(each).startswith("M"))
    for match in LETTERS.finditer(letters):
        scripts = [_script(letter) for letter in match[0]]
        spaced = [script for script in scripts if script not in WITHOUT_SPACES]
        yield from (frozenset({script}) for script in scripts if script in WITHOUT_SPACES)
        if spaced:
            yield frozenset(spaced)


@cache
def _script(letter: str) -> str:
    first = unicodedata.name(letter, "UNKNOWN").partition(" ")[0]
    return UNICODE_NAMES.get(first, first.lower())
