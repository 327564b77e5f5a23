"""An index of the usable rows of files, their held-out split and their order: 20 bytes a row."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import ceil
from pathlib import Path

import numpy as np

from parallel.status_pipe import report_notice
from stages.data.problem import DomainError
from stages.data.sources.rows import ROWS, Row, RowError
from stages.data.sources.settings import FileSettings

# Returns the content hashes of a row and of its prompt, 64 hexadecimal digits each.
Identify = Callable[[Row], tuple[str, str]]


@dataclass(frozen=True)
class Counts:
    """The numbers of all rows, of unusable rows and of duplicates in the files."""

    rows: int
    bad: int
    duplicates: int


@dataclass(frozen=True)
class RowIndex:
    """The distinct usable rows, in the order of the files.

    `file` uint32 [rows] indexes `files`, and `at` int64 [rows] is the row's position in its file;
    `keys` uint64 [rows] are the first 64 bits of the hashes of their prompts.
    """

    settings: FileSettings
    domain: str
    block: str  # the settings' key below the domain's
    files: list[Path]
    counts: Counts
    file: np.ndarray = field(repr=False)
    at: np.ndarray = field(repr=False)
    keys: np.ndarray = field(repr=False)

    def split(self, held_out: bool, fraction: float) -> np.ndarray:
        """Return the rows, int64, of the held-out or the training split.

        `fraction` of all prompts is held out. Raises DomainError where the split is empty.
        """
        below = self.keys < np.uint64(ceil(fraction * 2**64))
        rows = np.flatnonzero(below == held_out)
        if not len(rows):
            split = "held-out" if held_out else "training"
            raise DomainError(
                self.domain,
                f"{self.block}.path",
                f"none of the {len(self.keys)} usable rows is in the {split} split; add rows or"
                f" change domains.{self.domain}.prompts.held_out_fraction",
            )
        return rows

    def read(self, row: int) -> Row:
        """Return a row from its file. Raises DomainError where it no longer exists."""
        try:
            return ROWS[self.settings.source].read(self.files[self.file[row]], int(self.at[row]))
        except (OSError, RowError) as error:
            raise self.changed(row, str(error)) from error

    def place(self, row: int) -> str:
        """Return a row's file and line, for a message."""
        return ROWS[self.settings.source].place(self.files[self.file[row]], int(self.at[row]))

    def check(self, row: int, key: str) -> None:
        """Raise DomainError where a row's prompt changed since it was indexed."""
        if _leading(key) != int(self.keys[row]):
            raise self.changed(row, "it has another prompt")

    def changed(self, row: int, why: str) -> DomainError:
        """Return the error for a file that changed while a stage reads it."""
        file = self.files[self.file[row]]
        return DomainError(
            self.domain, f"{self.block}.path", f"{file} changed since it was indexed: {why}"
        )


def build_index(
    settings: FileSettings, domain: str, block: str, columns: Sequence[str], identify: Identify
) -> RowIndex:
    """Read every row of the files once.

    `identify` raises RowError for an unusable row. Skipped rows are counted and reported. Raises
    DomainError, naming the file and the line, for an unusable row that must not be skipped, and
    where no row is usable.
    """
    files = settings.files()
    if not files:
        raise DomainError(domain, f"{block}.path", f"no {settings.source} file at {settings.path}")
    reading = _Reading(settings, domain, block, identify)
    for number, file in enumerate(files):
        try:
            for at, row in ROWS[settings.source].scan(file, columns):
                reading.take(number, file, at, row)
        except (OSError, RowError) as error:
            raise DomainError(domain, block, f"{file}: {error}") from error
    return reading.index(files)


class _Reading:
    """A row index under construction, and its rows' errors."""

    def __init__(self, settings: FileSettings, domain: str, block: str, identify: Identify) -> None:
        self._settings, self._domain, self._block = settings, domain, block
        self._identify = identify
        self._file, self._at = array("I"), array("q")
        self._identities, self._keys = array("Q"), array("Q")
        self._rows = self._bad = 0
        self._first_error = ""

    def take(self, number: int, file: Path, at: int, row: Row | RowError) -> None:
        self._rows += 1
        try:
            if isinstance(row, RowError):
                raise row
            identity, key = self._identify(row)
        except RowError as error:
            self._note(f"{ROWS[self._settings.source].place(file, at)}: {error}", error)
            return
        self._file.append(number)
        self._at.append(at)
        self._identities.append(_leading(identity))
        self._keys.append(_leading(key))

    def index(self, files: list[Path]) -> RowIndex:
        """Return the index of the first row of each content."""
        if not self._keys:
            why = f": {self._first_error}" if self._first_error else ""
            raise DomainError(self._domain, self._block, f"no usable row in {files[0]}{why}")
        identities = np.frombuffer(self._identities, np.uint64)
        kept = np.sort(np.unique(identities, return_index=True)[1])
        counts = Counts(self._rows, self._bad, len(identities) - len(kept))
        self._report(counts)
        return RowIndex(
            settings=self._settings,
            domain=self._domain,
            block=self._block,
            files=files,
            counts=counts,
            file=np.frombuffer(self._file, np.uint32)[kept],
            at=np.frombuffer(self._at, np.int64)[kept],
            keys=np.frombuffer(self._keys, np.uint64)[kept],
        )

    def _note(self, error: str, cause: RowError) -> None:
        if self._settings.on_bad_row == "stop":
            remedy = f"fix it, or skip such rows with {self._block}.on_bad_row: skip"
            raise DomainError(self._domain, self._block, f"{error}; {remedy}") from cause
        self._bad += 1
        self._first_error = self._first_error or error

    def _report(self, counts: Counts) -> None:
        skipped = []
        if counts.bad:
            skipped.append(f"{counts.bad} unusable ({self._first_error})")
        if counts.duplicates:
            skipped.append(f"{counts.duplicates} repeated")
        if skipped:
            block = f"domains.{self._domain}.{self._block}"
            report_notice(f"{block}: skipped rows, of {counts.rows}: {', '.join(skipped)}")


class Order:
    """An endless order of rows, shuffled every epoch, a pure function of `seed`."""

    def __init__(self, rows: np.ndarray, seed: int) -> None:
        self._rows = rows
        self._seed = seed
        self._epoch = -1
        self._shuffled = rows

    def row(self, cursor: int) -> int:
        """Return the row of the index at `cursor`, which counts from 0 through all epochs."""
        epoch, place = divmod(cursor, len(self._rows))
        if epoch != self._epoch:
            digest = sha256(f"{self._seed}/{epoch}".encode()).digest()
            # Of numpy's generators only RandomState is guaranteed to draw the same for ever.
            random = np.random.RandomState(np.frombuffer(digest, ">u4").astype(np.uint32))
            self._shuffled = random.permutation(self._rows)
            self._epoch = epoch
        return int(self._shuffled[place])


def _leading(key: str) -> int:
    """Return the first 64 bits of a hash."""
    return int(key[:16], base=16)
