"""Sequential and random access to rows of JSONL and Parquet files; no file is loaded whole."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow
import pyarrow.parquet as parquet

Row = dict[str, Any]

KEPT_BYTES = 256 << 20  # of decoded row groups; the newest is always kept
OPEN_FILES = 64
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # as escaped in JSON


class RowError(ValueError):
    """A row that cannot be used; the message says why."""


class Rows(Protocol):
    """A reader of one format's files; a file and the number `at` identify a row."""

    def scan(self, file: Path, columns: Sequence[str]) -> Iterator[tuple[int, Row | RowError]]:
        """Yield every row with `at`. Raises RowError where the file lacks one of the columns."""

    def read(self, file: Path, at: int) -> Row:
        """Return the whole row at `at`. Raises RowError where it no longer exists."""

    def place(self, file: Path, at: int) -> str:
        """Return the row's file and line, for a message."""


class JsonlRows:
    """A reader of one JSON object a line; `at` is the line's first byte. Skips empty lines."""

    def scan(self, file: Path, columns: Sequence[str]) -> Iterator[tuple[int, Row | RowError]]:
        at = 0
        with file.open("rb") as lines:
            for line in lines:
                if line.strip():
                    yield at, _parsed(line)
                at += len(line)

    def read(self, file: Path, at: int) -> Row:
        with file.open("rb") as lines:
            lines.seek(at)
            row = _parsed(lines.readline())
        if isinstance(row, RowError):
            raise row
        return row

    def place(self, file: Path, at: int) -> str:
        """Return FILE:LINE; reads the file up to there."""
        number, passed = 1, 0
        with file.open("rb") as lines:
            while passed < at and (line := lines.readline()):
                number, passed = number + 1, passed + len(line)
        return f"{file}:{number}"


class ParquetRows:
    """A reader of Parquet; `at` is the row's number, from 0. Loads whole row groups."""

    def __init__(self) -> None:
        self._groups: OrderedDict[tuple[Path, int], pyarrow.Table] = OrderedDict()

    def scan(self, file: Path, columns: Sequence[str]) -> Iterator[tuple[int, Row | RowError]]:
        with _opened(file) as source:
            known = source.schema_arrow.names
            for column in columns:
                if column not in known:
                    raise missing(column, known)
            at = 0
            batches = source.iter_batches(batch_size=1000, columns=list(columns))
            while rows := _next_rows(batches):
                for row in rows:
                    yield at, row
                    at += 1

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
        """Return `FILE, row N`, counted from 1."""
        return f"{file}, row {at + 1}"

    def _group(self, file: Path, group: int) -> pyarrow.Table:
        """Return a row group, from a cache of the most recent ones."""
        if (file, group) not in self._groups:
            with _opened(file) as source:
                self._groups[file, group] = source.read_row_group(group)
        self._groups.move_to_end((file, group))
        while len(self._groups) > 1 and sum(t.nbytes for t in self._groups.values()) > KEPT_BYTES:
            self._groups.popitem(last=False)
        return self._groups[file, group]


ROWS: dict[str, Rows] = {"jsonl": JsonlRows(), "parquet": ParquetRows()}


def missing(column: str, known: Sequence[str]) -> RowError:
    """Return the error of a row or a file that lacks a column."""
    return RowError(f"no column {column!r}; columns: {', '.join(map(repr, known)) or 'none'}")


def _parsed(line: bytes) -> Row | RowError:
    try:
        row = json.loads(line.decode("utf-8-sig"))  # json.loads(bytes) would accept UTF-16 too
    except UnicodeDecodeError as error:
        return RowError(f"not UTF-8: {error}")
    except json.JSONDecodeError as error:
        return RowError(f"not valid JSON: {error.msg} at column {error.colno}")
    except ValueError:
        return RowError("a whole number has too many digits")
    except RecursionError:
        return RowError("nested too deeply")
    if SURROGATE.search(line) and not _is_text(row):
        return RowError("half of a surrogate pair, which is not text")
    return row if isinstance(row, dict) else RowError("not a JSON object")


def _is_text(row: Any) -> bool:
    """Return whether no text has half a surrogate pair: JSON allows it, tokenizers do not."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _next_rows(batches: Iterator[pyarrow.RecordBatch]) -> list[Row]:
    """Return the rows of the next batch that has any; none at the end."""
    with _parquet_errors():
        return next(filter(None, (batch.to_pylist() for batch in batches)), [])


@contextmanager
def _parquet_errors() -> Iterator[None]:
    """Raise RowError for whatever pyarrow raises on damaged contents."""
    try:
        yield
    except RowError:
        raise
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise RowError(f"cannot be read as Parquet: {error}") from error


def _opened(file: Path) -> parquet.ParquetFile:
    """Return the open file. Raises RowError where it is not Parquet."""
    try:
        return parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise RowError(f"not a Parquet file: {error}") from error


@lru_cache(maxsize=OPEN_FILES)
def _group_ends(file: Path) -> np.ndarray:
    """Return the number of rows up to the end of each row group, int64."""
    with _opened(file) as source:
        groups = range(source.num_row_groups)
        return np.cumsum([source.metadata.row_group(group).num_rows for group in groups])
