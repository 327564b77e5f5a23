"""Rows of JSONL and Parquet files, read in order or at random, and their columns' contents.

A reader's `scan` yields every row with its place `at`; `read` returns the whole row at `at`, or
raises RowError where it no longer exists; `place` names a row's file and line in a message. No file
is loaded whole.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as parquet

from stages.data.problem import ASSISTANT, Message

Row = dict[str, Any]

KEPT_BYTES = 256 << 20  # of decoded row groups; the newest is always kept
OPEN_FILES = 64
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # as escaped in JSON


class RowError(Exception):
    """A row that cannot be used; the message says why."""


class JsonlRows:
    """The reader of one JSON object a line; `at` is the line's first byte. Skips empty lines."""

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
                    raise _missing(column, known)
            at = 0
            batches = source.iter_batches(batch_size=1000, columns=list(columns))
            while True:
                with _parquet_errors():  # not around the yields: the reader's errors are its own
                    rows = next(filter(None, (batch.to_pylist() for batch in batches)), None)
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
            with _opened(file) as source:
                self._groups[file, group] = source.read_row_group(group)
        self._groups.move_to_end((file, group))
        while len(self._groups) > 1 and sum(t.nbytes for t in self._groups.values()) > KEPT_BYTES:
            self._groups.popitem(last=False)
        return self._groups[file, group]


ROWS: dict[str, JsonlRows | ParquetRows] = {"jsonl": JsonlRows(), "parquet": ParquetRows()}


def prompt_of(row: Row, column: str) -> str | list[Message]:
    """Return a prompt's text or chat messages. Raises RowError where it is neither."""
    value = column_of(row, column)
    if isinstance(value, str):
        if not value.strip():
            raise RowError(f"{column!r} is blank")
        return value
    if not isinstance(value, list):
        raise RowError(f"{column!r} is neither text nor a list of messages")
    messages = messages_of(row, column)
    if not any(message["content"].strip() for message in messages):
        raise RowError(f"{column!r} has only blank messages")
    if messages[-1]["role"] == ASSISTANT:
        raise RowError(f"{column!r} must not end with an assistant turn")
    return messages


def messages_of(row: Row, column: str) -> list[Message]:
    """Return a column's chat messages, without null keys, which Parquet cannot omit.

    Raises RowError where there are none.
    """
    value = column_of(row, column)
    if not isinstance(value, list) or not value:
        raise RowError(f"{column!r} is not a list of messages")
    messages = []
    for place, each in enumerate(value, start=1):
        parts = each.items() if isinstance(each, dict) else ()
        message = {name: part for name, part in parts if part is not None}
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise RowError(
                    f"{column!r} has a message, number {place}, whose {name} is not text"
                )
        messages.append(message)
    return messages


def answer_of(row: Row, column: str | None) -> str:
    """Return the reference answer: text, a finite number as JSON writes it, or "" without a column.

    Raises RowError for a value that is neither.
    """
    value = "" if column is None else column_of(row, column)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf:
        return json.dumps(value)
    raise RowError(f"{column!r} is neither text nor a finite number")


def column_of(row: Row, column: str) -> Any:
    """Return a column's value. Raises RowError where the row lacks it."""
    if column not in row:
        raise _missing(column, list(row))
    return row[column]


def _missing(column: str, known: Sequence[str]) -> RowError:
    return RowError(f"no column {column!r}; columns: {', '.join(map(repr, known)) or 'none'}")


def _parsed(line: bytes) -> Row | RowError:
    try:
        row = json.loads(line.decode("utf-8-sig"))  # json.loads(bytes) would accept UTF-16 too
        if SURROGATE.search(line):  # JSON allows half a pair, tokenizers do not
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return RowError("half of a surrogate pair, which is not text")
    except UnicodeDecodeError as error:
        return RowError(f"not UTF-8: {error}")
    except json.JSONDecodeError as error:
        return RowError(f"not valid JSON: {error.msg} at column {error.colno}")
    except ValueError:
        return RowError("a whole number has too many digits")
    except RecursionError:
        return RowError("nested too deeply")
    return row if isinstance(row, dict) else RowError("not a JSON object")


@contextmanager
def _parquet_errors() -> Iterator[None]:
    """Raise RowError for whatever pyarrow raises on damaged contents."""
    try:
        yield
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
