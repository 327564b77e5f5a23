"""Rows of JSONL and Parquet files, read in order or at random.

A reader's `scan` yields every row with its place `at`; `read` returns the whole row at `at`, or
raises RowError where it no longer exists; `place` names a row's file and line in a message. No file
is loaded whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as parquet

from parallel.parquet_files import open_parquet, read_group, row_batches, row_of
from stages.data.columns import MOST_NESTED, MissingColumn, Row, RowError
from stages.data.messages import SparseRow
from stages.data.row_forms import parsed_line

KEPT_BYTES = 256 << 20  # of decoded row groups; the newest is always kept
OPEN_FILES = 64
# Whatever pyarrow raises on contents that are damaged, or of types that it does not read.
PARQUET_ERRORS = (pyarrow.ArrowException, ValueError, OverflowError, IndexError)
_Group = tuple[Path, int, tuple[str, ...] | None]  # a row group of a file, and its columns


class JsonlRows:
    """The reader of one JSON object a line; `at` is the line's first byte. Skips empty lines."""

    def scan(
        self, file: Path, columns: Sequence[str], optional: Sequence[str] = ()
    ) -> Iterator[tuple[int, Row | RowError]]:
        at = 0
        with file.open("rb") as lines:
            for line in lines:
                if line.strip():
                    yield at, parsed_line(line)
                at += len(line)

    def read(self, file: Path, at: int, columns: Sequence[str] | None = None) -> Row:
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
        self._groups: OrderedDict[_Group, pyarrow.Table] = OrderedDict()

    def scan(
        self, file: Path, columns: Sequence[str], optional: Sequence[str] = ()
    ) -> Iterator[tuple[int, Row | RowError]]:
        with _opened(file) as source:
            schema = source.schema_arrow
        names = schema.names
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise RowError(f"has two columns {repeated!r}; rename one")
        for column in columns:
            if not has_column(schema, column):
                raise MissingColumn(column, schema_columns(schema))
        at = 0
        batches = row_batches(file, whole_columns([*columns, *optional], names))
        while True:
            with _parquet_errors():  # not around the yields: the reader's errors are its own
                rows = next(filter(None, batches), None)
            if rows is None:
                return
            yield from enumerate(map(SparseRow, rows), at)
            at += len(rows)

    def read(self, file: Path, at: int, columns: Sequence[str] | None = None) -> Row:
        """Return the row with the `columns` that the file has; None: with all that can be read.

        One that cannot, such as a timestamp with nanoseconds, is left out: nothing may need it.
        """
        ends = _group_ends(file)
        group = int(np.searchsorted(ends, at, side="right"))
        if group == len(ends):
            raise RowError("the row no longer exists")
        with _parquet_errors():
            table = self._group((file, group, None if columns is None else tuple(columns)))
            row = row_of(table, at - int(ends[group] - table.num_rows))
            if columns is not None:
                return SparseRow(row.to_pylist()[0])
        values = SparseRow()
        for name in table.column_names:
            with suppress(*PARQUET_ERRORS):
                values[name] = row.column(name)[0].as_py()
        return values

    def place(self, file: Path, at: int) -> str:
        return f"{file}, row {at + 1}"

    def _group(self, key: _Group) -> pyarrow.Table:
        """Return columns of a row group, from a cache of the most recent ones."""
        if key not in self._groups:
            self._groups[key] = _read_group(*key)
        self._groups.move_to_end(key)
        while len(self._groups) > 1 and sum(t.nbytes for t in self._groups.values()) > KEPT_BYTES:
            self._groups.popitem(last=False)
        return self._groups[key]


def has_column(schema: pyarrow.Schema, column: str) -> bool:
    """Return whether rows of a schema have a column, which may be in structs: `a.b`."""
    if column in schema.names:
        return True
    top, *below = column.split(".")
    if top not in schema.names:
        return False
    kind = schema.field(top).type
    for name in below:
        if not pyarrow.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return False
        kind = kind.field(name).type
    return True


def schema_columns(schema: pyarrow.Schema) -> list[str]:
    """Return the names of a schema's columns, those of small structs as `column_names` does."""
    names = []
    for field in schema:
        if pyarrow.types.is_struct(field.type) and 0 < field.type.num_fields <= MOST_NESTED:
            names += [f"{field.name}.{inner.name}" for inner in field.type]
        else:
            names.append(field.name)
    return names


def whole_columns(columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the file's columns, of `names`, that have these columns in them, each once."""
    tops = [name if name in names else name.partition(".")[0] for name in columns]
    return [name for name in dict.fromkeys(tops) if name in names]


@contextmanager
def _parquet_errors() -> Iterator[None]:
    """Raise RowError for whatever pyarrow raises on damaged contents."""
    try:
        yield
    except PARQUET_ERRORS as error:
        raise RowError(f"cannot be read as Parquet: {error}") from error


def _read_group(file: Path, group: int, columns: Sequence[str] | None) -> pyarrow.Table:
    """Return the columns of a row group that the file has; None: all that can be read."""
    with _opened(file) as source:
        names = source.schema_arrow.names
    if columns is not None:
        return read_group(file, group, whole_columns(columns, names))
    try:
        return read_group(file, group)
    except PARQUET_ERRORS:  # one by one: a damaged column may be one that nothing reads
        readable = {}
        for name in names:
            with suppress(*PARQUET_ERRORS):
                readable[name] = read_group(file, group, [name]).column(0)
        return pyarrow.table(readable)


@contextmanager
def _opened(file: Path) -> Iterator[parquet.ParquetFile]:
    """Open a file. Raises RowError where it is not Parquet."""
    with ExitStack() as stack:
        try:
            source = stack.enter_context(open_parquet(file))
        except PARQUET_ERRORS as error:
            raise RowError(f"not a Parquet file: {error}") from error
        yield source


@lru_cache(maxsize=OPEN_FILES)
def _group_ends(file: Path) -> np.ndarray:
    """Return the number of rows up to the end of each row group, int64."""
    with _opened(file) as source:
        groups = range(source.num_row_groups)
        return np.cumsum([source.metadata.row_group(group).num_rows for group in groups])
