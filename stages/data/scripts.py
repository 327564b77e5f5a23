"""The Unicode scripts of letters, by the names that Unicode gives them. Never imports torch.

Python's `unicodedata` has no property Script. A letter's name begins with its script's, except for
ideographs (CJK), and for symbols that are letters of no script, such as the mathematical alphabets.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import Literal

Script = Literal[
    "Arabic",
    "Armenian",
    "Bengali",
    "Cyrillic",
    "Devanagari",
    "Ethiopic",
    "Georgian",
    "Greek",
    "Gujarati",
    "Gurmukhi",
    "Han",
    "Hangul",
    "Hebrew",
    "Hiragana",
    "Kannada",
    "Katakana",
    "Khmer",
    "Lao",
    "Latin",
    "Malayalam",
    "Mongolian",
    "Myanmar",
    "Oriya",
    "Sinhala",
    "Tamil",
    "Telugu",
    "Thai",
    "Tibetan",
]
FIRST_WORDS = {"CJK": "HAN", "IDEOGRAPHIC": "HAN", "HENTAIGANA": "HIRAGANA", "ROMAN": "LATIN"}
# Before the name of the script.
WIDTHS = ("FULLWIDTH", "HALFWIDTH", "SUPERSCRIPT")
# Symbols that count as letters and belong to the script Common: of no language.
COMMON = frozenset(
    {
        *("MATHEMATICAL", "DOUBLE-STRUCK", "SCRIPT", "BLACK-LETTER", "MODIFIER", "MICRO", "EULER"),
        *("PLANCK", "ALEF", "BET", "GIMEL", "DALET", "INFORMATION", "KELVIN", "ANGSTROM", "OHM"),
        *("FEMININE", "MASCULINE", "VEDIC", "VERTICAL", "KATAKANA-HIRAGANA", "MASU", "CARON"),
        *("TURNED", "INVERTED", "REVERSED"),
    }
)


def other_letters(text: str, allowed: tuple[str, ...]) -> float:
    """Return the share of a text's letters that belong to none of the `allowed` scripts.

    Letters of the script Common, such as mathematical symbols, are not counted; 0 without letters.
    """
    wanted = {name.upper() for name in allowed}
    scripts = [script for script in map(script_of, text) if script is not None]
    return sum(script not in wanted for script in scripts) / max(len(scripts), 1)


@cache
def script_of(character: str) -> str | None:
    """Return the script of a letter in upper case; None of another character, and of Common."""
    if not character.isalpha():
        return None
    words = unicodedata.name(character, "UNKNOWN").split()
    first = words[1] if words[0] in WIDTHS and len(words) > 1 else words[0]
    if first in COMMON:
        return None
    return FIRST_WORDS.get(first, first)
