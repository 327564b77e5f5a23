"""Output of text that must not act on the terminal.

YAML keys, causes in a ledger, file names, logs and bodies of HTTP errors may hold any character.
"""

from __future__ import annotations

import io
import re
import sys
from typing import TextIO

# Control characters (C0, DEL, C1), line and paragraph separators, marks that reorder a line, and
# surrogates, which stand for the bytes of a file name that are not UTF-8.
_ACTS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str, keep: str = "") -> str:
    r"""Return the text with Python escapes such as `\x1b` for characters that act on a terminal.

    Line breaks are among them. Characters in `keep` stay.
    """

    def escaped(found: re.Match[str]) -> str:
        letter = found[0]
        return letter if letter in keep else letter.encode("unicode_escape").decode()

    return _ACTS.sub(escaped, text)


def say(*texts: str, file: TextIO | None = None, flush: bool = False) -> None:
    """Print texts, each on a new line; a text may have several lines."""
    print(*(visible(text, keep="\n\t") for text in texts), sep="\n", file=file, flush=flush)


def encode_anything() -> None:
    """Make both outputs escape characters that their encoding lacks, such as `◆` in ASCII."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def clock(seconds: float) -> str:
    """Return a duration in words: `48 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
