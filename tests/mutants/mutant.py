"""A mistake made on purpose in one file of a clone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class StaleMutant(Exception):
    """The code that a mutant changes is no longer there, or stands there twice."""


@dataclass(frozen=True)
class Mutant:
    """A mistake: `old` in `file` becomes `new`, and the tests that should notice it.

    `tests` are paths or node ids that `make test` runs, separated by spaces.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str

    def applied(self, repository: Path) -> str:
        """Return the file's text with the mistake in it.

        Raises:
            StaleMutant: the old text does not stand there exactly once.
        """
        text = (repository / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise StaleMutant(f"{self.name}: {self.file} has {self.old!r} {count} times")
        return text.replace(self.old, self.new)
