"""What is wrong with a configuration: where, which key, and how to mend it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import BraidError
from pipeline.text import visible

# Of a message: what a screen shows, whatever stands in a file.
MOST_SHOWN = 50
LONGEST_KEY = 200
LONGEST_MESSAGE = 1000
LONGEST_VALUE = 200


@dataclass(frozen=True)
class SourceLocation:
    """A file and a line; no file means the command line."""

    file: Path | None
    line: int | None = None

    def at(self, line: int) -> SourceLocation:
        """The same file at another line."""
        return self if self.file is None else SourceLocation(self.file, line)

    def beside(self, path: str) -> Path:
        """A path written here: relative paths start at this file's folder."""
        folder = Path() if self.file is None else self.file.parent
        return Path(os.path.normpath(folder / path))

    def __str__(self) -> str:
        if self.file is None:
            return "command line"
        return shown(self.file) + ("" if self.line is None else f":{self.line}")


@dataclass(frozen=True)
class Violation:
    """One fault, printed as `file:line: key: message`, on one line whatever a key is."""

    place: SourceLocation
    key: str
    message: str

    def __str__(self) -> str:
        key, message = shortened(self.key, LONGEST_KEY), shortened(self.message, LONGEST_MESSAGE)
        return visible(": ".join(part for part in (str(self.place), key, message) if part))


class ConfigError(BraidError):
    """A configuration that cannot run; `violations` lists the reasons, without `more` of the same.

    The message shows the first MOST_SHOWN.
    """

    def __init__(self, violations: Sequence[Violation], more: int = 0) -> None:
        self.violations = tuple(violations)
        count = len(self.violations) + more
        title = f"the configuration has {count} fault{'s' if count > 1 else ''}:"
        lines = [title, *map(str, self.violations[:MOST_SHOWN])]
        if len(lines) <= count:
            lines.append(f"... and {count + 1 - len(lines)} more")
        super().__init__("\n".join(lines))


def shortened(text: str, longest: int) -> str:
    """Return a text of at most about `longest` characters: the end of a longer one is left out."""
    return text if len(text) <= longest else f"{text[:longest]}..."


def dotted(key: Iterable[str | int]) -> str:
    """`("layout", "ranks")` as a person writes it: `layout.ranks`."""
    return ".".join(map(str, key))


def shown(path: Path) -> str:
    """A path as a person would type it: relative when it lies below the working directory."""
    absolute, here = path.absolute(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def hint(name: str, known: Iterable[str]) -> str:
    """The nearest known name, or all of them: the end of a message about an unknown name."""
    names = list(known)
    # What looks like a known name may have letters of another alphabet.
    other = "" if name.isascii() else f"{name!a} has letters beyond ASCII; "
    if near := difflib.get_close_matches(name, names, n=1):
        return f'{other}did you mean "{near[0]}"?'
    return f"{other}known: {', '.join(names)}" if names else f"{other}nothing is known here"
