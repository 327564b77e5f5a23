"""Rows of JSONL and Parquet files, read in order or at random.

A reader's `scan` yields every row with its place `at`; `read` returns the whole row at `at`, or
raises RowError where it no longer exists; `place` names a row's file and line in a message. No file
is loaded whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as parquet

from parallel.parquet_files import open_parquet, read_parquet, row_batches
from stages.data.row_forms import Row, RowError, missing_column, parsed_line

KEPT_BYTES = 256 << 20  # of decoded row groups; the newest is always kept
OPEN_FILES = 64


class JsonlRows:
    """The reader of one JSON object a line; `at` is the line's first byte. Skips empty lines."""

    def scan(self, file: Path, columns: Sequence[str]) -> Iterator[tuple[int, Row | RowError]]:
        at = 0
        with file.open("rb") as lines:
            for line in lines:
                if line.strip():
                    yield at, parsed_line(line)
                at += len(line)

    def read(self, file: Path, at: int) -> Row:
        with file.open("rb") as lines:
            lines.seek(at)
            row = parsed_line(lines.readline())
        if isinstance(row, RowError):
            raise row
        return row

    def place(self, file: Path, at: int) -> str:
        number, passed = 1, 0
        with file.open("rb") as lines:
            while passed < at and (line := lines.readline()):
                number, passed = number + 1, passed + len(line)
        return f"{file}:{number}"


class ParquetRows:
    """The reader of Parquet; `at` is the row's number, from 0. Loads whole row groups."""

    def __init__(self) -> None:
        self._groups: OrderedDict[tuple[Path, int], pyarrow.Table] = OrderedDict()

    def scan(self, file: Path, columns: Sequence[str]) -> Iterator[tuple[int, Row | RowError]]:
        with _opened(file) as source:
            known = source.schema_arrow.names
        for column in columns:
            if column not in known:
                raise missing_column(column, known)
        at, batches = 0, row_batches(file, columns)
        while True:
            with _parquet_errors():  # not around the yields: the reader's errors are its own
                rows = next(filter(None, batches), None)
            if rows is None:
                return
            yield from enumerate(rows, at)
            at += len(rows)

    def read(self, file: Path, at: int) -> Row:
        ends = _group_ends(file)
        group = int(np.searchsorted(ends, at, side="right"))
        if group == len(ends):
            raise RowError("the row no longer exists")
        with _parquet_errors():
            table = self._group(file, group)
            place = at - int(ends[group] - table.num_rows)
            return table.slice(place, 1).to_pylist()[0]

    def place(self, file: Path, at: int) -> str:
        return f"{file}, row {at + 1}"

    def _group(self, file: Path, group: int) -> pyarrow.Table:
        """Return a row group, from a cache of the most recent ones."""
        if (file, group) not in self._groups:
            self._groups[file, group] = read_parquet(file, group=group)
        self._groups.move_to_end((file, group))
        while len(self._groups) > 1 and sum(t.nbytes for t in self._groups.values()) > KEPT_BYTES:
            self._groups.popitem(last=False)
        return self._groups[file, group]


ROWS: dict[str, JsonlRows | ParquetRows] = {"jsonl": JsonlRows(), "parquet": ParquetRows()}


@contextmanager
def _parquet_errors() -> Iterator[None]:
    """Raise RowError for whatever pyarrow raises on damaged contents."""
    try:
        yield
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise RowError(f"cannot be read as Parquet: {error}") from error


@contextmanager
def _opened(file: Path) -> Iterator[parquet.ParquetFile]:
    """Open a file. Raises RowError where it is not Parquet."""
    try:
        with open_parquet(file) as source:
            yield source
    except pyarrow.ArrowInvalid as error:
        raise RowError(f"not a Parquet file: {error}") from error


@lru_cache(maxsize=OPEN_FILES)
def _group_ends(file: Path) -> np.ndarray:
    """Return the number of rows up to the end of each row group, int64."""
    with _opened(file) as source:
        groups = range(source.num_row_groups)
        return np.cumsum([source.metadata.row_group(group).num_rows for group in groups])
