"""Configuration errors: the file and line, the key, the problem and its fix."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import BraidError
from pipeline.text import visible

# Limits that keep a message on one screen, whatever a file holds.
MOST_SHOWN = 50
LONGEST_KEY = 200
LONGEST_MESSAGE = 1000
LONGEST_VALUE = 200


@dataclass(frozen=True)
class SourceLocation:
    """A file and a line; the file is None for the command line."""

    file: Path | None
    line: int | None = None

    def at(self, line: int) -> SourceLocation:
        """Return another line of this file."""
        return self if self.file is None else SourceLocation(self.file, line)

    def beside(self, path: str) -> Path:
        """Resolve a path that is written here: relative to this file's directory."""
        directory = Path() if self.file is None else self.file.parent
        return Path(os.path.normpath(directory / path))

    def __str__(self) -> str:
        if self.file is None:
            return "command line"
        return shown(self.file) + ("" if self.line is None else f":{self.line}")


@dataclass(frozen=True)
class Violation:
    """One error, printed on one line as `file:line: key: message`, whatever the key holds."""

    place: SourceLocation
    key: str
    message: str

    def __str__(self) -> str:
        key, message = shortened(self.key, LONGEST_KEY), shortened(self.message, LONGEST_MESSAGE)
        return visible(": ".join(part for part in (str(self.place), key, message) if part))


class ConfigError(BraidError):
    """An invalid configuration. Its message shows the first MOST_SHOWN violations.

    `more` counts violations that were found and are not in `violations`.
    """

    def __init__(self, violations: Sequence[Violation], more: int = 0) -> None:
        self.violations = tuple(violations)
        count = len(self.violations) + more
        title = f"{count} configuration error{'s' if count > 1 else ''}:"
        lines = [title, *map(str, self.violations[:MOST_SHOWN])]
        if len(lines) <= count:
            lines.append(f"... and {count + 1 - len(lines)} more")
        super().__init__("\n".join(lines))


def shortened(text: str, longest: int) -> str:
    """Return a text, cut off after `longest` characters."""
    return text if len(text) <= longest else f"{text[:longest]}..."


def dotted(key: Iterable[str | int]) -> str:
    """Return `("layout", "ranks")` as `layout.ranks`."""
    return ".".join(map(str, key))


def shown(path: Path) -> str:
    """Return a path as text, relative where it is below the working directory."""
    absolute, here = path.absolute(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def hint(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known one, or all."""
    names = list(known)
    # A name may look like a known one and have a Cyrillic or Greek letter.
    other = "" if name.isascii() else f"{name!a} has non-ASCII letters; "
    if near := difflib.get_close_matches(name, names, n=1):
        return f'{other}did you mean "{near[0]}"?'
    return f"{other}known: {', '.join(names)}" if names else f"{other}none is defined"
