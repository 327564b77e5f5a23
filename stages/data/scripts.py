"""The Unicode scripts of letters, by the `regex` package: Python has no property Script.

Never imports torch.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from regex import Pattern

Script = Literal[
    "Arabic", "Armenian", "Bengali", "Cyrillic", "Devanagari", "Ethiopic", "Georgian", "Greek",
    "Gujarati", "Gurmukhi", "Han", "Hangul", "Hebrew", "Hiragana", "Kannada", "Katakana", "Khmer",
    "Lao", "Latin", "Malayalam", "Mongolian", "Myanmar", "Oriya", "Sinhala", "Tamil", "Telugu",
    "Thai", "Tibetan",
]  # fmt: skip


def other_letters(text: str, allowed: tuple[Script, ...]) -> float:
    """Return the share of a text's letters that belong to none of the `allowed` scripts.

    Letters of the script Common, such as mathematical symbols, are not counted; 0 without letters.

    Example:
        >>> other_letters("x² + 是", ("Latin",))
        0.5
    """
    letters, of_allowed = _patterns(allowed)
    count = len(letters.findall(text))
    return (count - len(of_allowed.findall(text))) / max(count, 1)


@cache
def _patterns(allowed: tuple[Script, ...]) -> tuple[Pattern[str], Pattern[str]]:
    """Return what matches a letter of any script, and one of the `allowed` scripts."""
    # A login node, which reads the settings of these scripts, has no such package.
    import regex

    scripts = "".join(rf"\p{{Script={script}}}" for script in allowed)
    letters = r"[\p{L}--\p{Script=Common}]"
    return regex.compile(rf"(?V1){letters}"), regex.compile(rf"(?V1)[{letters}&&[{scripts}]]")
