"""Text for people: paths, errors, durations, sizes, and output that cannot act on the terminal.

YAML keys, causes in a ledger, file names, logs and bodies of HTTP errors may hold any character.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import TextIO

# Control characters (C0, DEL, C1), line and paragraph separators, marks that reorder a line, and
# surrogates, which stand for the bytes of a file name that are not UTF-8.
_ACTS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

SLOW_SECONDS = 2.0  # that a command may take before it says what it does


def visible(text: str, keep: str = "") -> str:
    r"""Return the text with Python escapes such as `\x1b` for characters that act on a terminal.

    Line breaks are among them. Characters in `keep` stay.
    """

    def escaped(match: re.Match[str]) -> str:
        letter = match[0]
        return letter if letter in keep else letter.encode("unicode_escape").decode()

    return _ACTS.sub(escaped, text)


def say(*texts: str, file: TextIO | None = None, flush: bool = False) -> None:
    """Print texts, each on a new line; a text may have several lines."""
    print(*(visible(text, keep="\n\t") for text in texts), sep="\n", file=file, flush=flush)


@contextmanager
def while_slow(text: str, seconds: float = SLOW_SECONDS) -> Iterator[None]:
    """Say on standard error what is being done, once it has taken `seconds`.

    On a terminal alone: a file and a pipe get the same lines on a slow machine and on a fast one.
    """
    timer = Timer(seconds, say, (f"{text} …",), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def warn(texts: Iterable[str]) -> None:
    """Print texts on standard error, each as a warning; a text may have several lines."""
    for text in texts:
        say(f"warning: {text}", file=sys.stderr)


def open_streams() -> None:
    """Open what the caller has closed, as with `>&-`, and let outputs take any character.

    Characters that an output's encoding lacks, such as `◆` in ASCII, are escaped.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # its descriptor would be given to the next opened file
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
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


def reason(error: Exception) -> str:
    """Return the message of an error; for an OSError with the path."""
    if not isinstance(error, OSError):
        return str(error) or type(error).__name__
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def signal_name(number: int) -> str:
    """Return the name of a signal; real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shown(path: Path) -> str:
    """Return a path as text, relative where it is below the working directory.

    A name may hold any byte but NUL and a slash: what acts on a terminal, or would begin a line of
    its own in a file, is escaped.
    """
    absolute, here = path.absolute(), Path.cwd()
    return visible(str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute))


def human(count: int) -> str:
    """Return bytes to three digits, such as `1.04 MiB`."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1000 or unit == "TiB":
            break
        size /= 1024
    digits = max(0, 3 - len(str(int(size)))) if unit != "B" else 0
    return f"{size:,.{digits}f} {unit}"
