"""An index of the usable rows of files, their held-out split and their order: 20 bytes a row."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from parallel.errors import UserError, report_notice
from stages.data.arrow_rows import ROWS
from stages.data.columns import MissingColumn, Row, RowError, renaming
from stages.data.problem import SPLIT_DIGITS, DataError
from stages.data.settings import FileSettings, ToolFileSettings

# Returns what a stage reads of a row, and the content hashes of the row and of its prompt, 64
# hexadecimal digits each, or raises RowError.
Parse = Callable[[Row], tuple[Any, str, str]]


PROBED = 32  # rows that are rendered before training begins


class UnusableRow(DataError):
    """A row that turns out unusable when it is drawn, where `on_bad_row` skips such rows."""


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
    key: str  # the settings' own, such as domains.math.prompts
    parse: Parse = field(repr=False)
    columns: tuple[str, ...] | None  # that are read of a row; None: all that can be
    files: list[Path]
    counts: Counts
    file: np.ndarray = field(repr=False)
    at: np.ndarray = field(repr=False)
    keys: np.ndarray = field(repr=False)

    def split(self, held_out: bool, fraction: float) -> np.ndarray:
        """Return the rows, int64, of the held-out or the training split.

        `fraction` of all prompts is held out. Raises DataError where the split is empty.
        """
        # Rounded up, where `np.uint64` would round down: as `is_held_out` decides.
        below = self.keys < np.uint64(ceil(fraction * 2**64))
        rows = np.flatnonzero(below == held_out)
        if not len(rows):
            split = "held-out" if held_out else "training"
            raise DataError(
                f"{self.key}.path",
                f"none of the {len(self.keys)} usable rows is in the {split} split; add rows or"
                f" change domains.{self.domain}.prompts.held_out_fraction",
            )
        return rows

    def read(self, row: int) -> Any:
        """Return what `parse` makes of a row.

        Raises DataError where it no longer exists or has another prompt, and UnusableRow where it
        cannot be read and is skipped.
        """
        file = self.files[self.file[row]]
        try:
            reader = ROWS[self.settings.source]
            content, _, key = self.parse(reader.read(file, int(self.at[row]), self.columns))
        except RowError as error:
            if self.settings.on_bad_row == "skip":
                raise UnusableRow(f"{self.key}.path", f"{self.place(row)}: {error}") from error
            why = f"{file} changed since it was indexed: {error}"
            raise DataError(f"{self.key}.path", why) from error
        except OSError as error:
            why = f"{file} changed since it was indexed: {error}"
            raise DataError(f"{self.key}.path", why) from error
        # Never skipped: an indexed row that now has another prompt may be a held-out one.
        if int(key[:SPLIT_DIGITS], base=16) != int(self.keys[row]):
            why = f"{file} changed since it was indexed: it has another prompt"
            raise DataError(f"{self.key}.path", why)
        return content

    def rows_of(self, key: str) -> np.ndarray:
        """Return the rows, int64, whose prompt has this content key: several with other tools."""
        return np.flatnonzero(self.keys == np.uint64(int(key[:SPLIT_DIGITS], base=16)))

    def rejected(self, row: int, error: UserError) -> UserError:
        """Return the error of a row that the tokenizer or its chat template rejects, naming it."""
        if self.settings.on_bad_row == "skip":
            return UnusableRow(f"{self.key}.path", f"{self.place(row)}: {error}")
        return type(error)(f"{error}; in {self.place(row)}")

    def place(self, row: int) -> str:
        """Return a row's file and line, for a message."""
        return ROWS[self.settings.source].place(self.files[self.file[row]], int(self.at[row]))


def optional_columns(settings: ToolFileSettings) -> tuple[str, ...]:
    """Return the columns that are read where the files have them."""
    return () if settings.tools is None else (settings.tools,)


def usable[Content](read: Callable[[int], Content], row: int, key: str) -> Content | None:
    """Return what `read` makes of a row; None, with a notice, where it is unusable and skipped."""
    try:
        return read(row)
    except UnusableRow as error:
        report_unusable(key, str(error))
        return None


def probed[Content](
    read: Callable[[int], Content], rows: Sequence[int], key: str
) -> Iterator[Content]:
    """Yield what `read` makes of the first rows, before training depends on it.

    Raises UnusableRow where none of them is usable, as with an unusable chat template.
    """
    error: UnusableRow | None = None
    successes = 0
    for row in rows[:PROBED]:
        try:
            yield read(row)
            successes += 1
        except UnusableRow as unusable_row:
            error = error or unusable_row
    if error is not None:
        if not successes:
            raise error
        report_unusable(key, str(error))


@cache
def _reported() -> set[str]:
    return set()


def report_unusable(key: str, error: str) -> None:
    """Report the first row of a source that is unusable when it is drawn, once a process."""
    if key not in _reported():
        _reported().add(key)
        report_notice(f"{error}; skipping such rows, as {key}.on_bad_row says")


def build_index(
    settings: FileSettings,
    domain: str,
    key: str,
    columns: Sequence[str],
    parse: Parse,
    *,
    optional: Sequence[str] = (),
    whole: bool = False,
) -> RowIndex:
    """Read every row of the files once; keep the first row of each content.

    Files may lack the `optional` columns. Of a row that is drawn, all columns are read where it is
    `whole`, since rewards may name any, and else the same as here.
    Skipped rows are counted and reported. Raises DataError, naming the file and the line, for an
    unusable row that must not be skipped, and where no row is usable.
    """
    files, reader = settings.files(), ROWS[settings.source]
    if not files:
        raise DataError(f"{key}.path", f"no {settings.source} file at {settings.path}")
    numbers, places = array("I"), array("q")
    identities, keys = array("Q"), array("Q")
    rows = bad = 0
    first_error = ""
    for number, file in enumerate(files):
        try:
            for at, row in reader.scan(file, columns, optional):
                rows += 1
                try:
                    if isinstance(row, RowError):
                        raise row
                    _, identity, of_prompt = parse(row)
                except RowError as error:
                    wrong = f"{reader.place(file, at)}: {error}"
                    if settings.on_bad_row == "stop":
                        remedy = f"fix it, or skip such rows with {key}.on_bad_row: skip"
                        raise DataError(key, f"{wrong}; {remedy}") from error
                    bad += 1
                    first_error = first_error or wrong
                    continue
                numbers.append(number)
                places.append(at)
                # Its last digits differ where only the tools do.
                identities.append(int(identity[-SPLIT_DIGITS:], base=16))
                keys.append(int(of_prompt[:SPLIT_DIGITS], base=16))
        except MissingColumn as error:  # of Parquet, whose rows have the same columns
            fix = renaming(key, settings.columns(), error.columns)
            raise DataError(key, f"{file}: {error}; {fix}") from error
        except (OSError, RowError) as error:
            raise DataError(key, f"{file}: {error}") from error
    if not keys:
        why = f": {first_error}" if first_error else ""
        raise DataError(key, f"no usable row in {files[0]}{why}")
    # `np.unique` sorts by content: back to the order of the files, which the seeds shuffle.
    first_rows = np.sort(np.unique(np.frombuffer(identities, np.uint64), return_index=True)[1])
    counts = Counts(rows, bad, duplicates=len(keys) - len(first_rows))
    unusable = f"{bad} unusable ({first_error})" if bad else ""
    repeated = f"{counts.duplicates} repeated" if counts.duplicates else ""
    if skipped := ", ".join(filter(None, (unusable, repeated))):
        report_notice(f"{key}: skipped rows, of {rows}: {skipped}")
    columns_kept = (
        np.frombuffer(values, kind)[first_rows]
        for values, kind in ((numbers, np.uint32), (places, np.int64), (keys, np.uint64))
    )
    drawn_columns = None if whole else (*columns, *optional)
    return RowIndex(settings, domain, key, parse, drawn_columns, files, counts, *columns_kept)


class Order:
    """An endless order of rows, shuffled every epoch, a pure function of `seed`.

    Example: cursors 0 to 2 are the first epoch of three rows, and 3 to 5 the second.
        >>> order = Order(np.array([4, 7, 9]), seed=0)
        >>> [sorted(order.row(cursor) for cursor in epoch) for epoch in (range(3), range(3, 6))]
        [[4, 7, 9], [4, 7, 9]]
    """

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
