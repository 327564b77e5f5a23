"""Rows of Arrow files, as Hugging Face's `datasets` saves and caches them; the reader of a source.

`save_to_disk` and the cache of `load_dataset` write streams of record batches, a thousand rows
each; Feather and `ArrowWriter` of pyarrow write the file format. Both are mapped into memory, which
takes as much of it as is read. Offsets of a damaged batch could point anywhere, so what is decoded
is validated before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow

from parallel.files import open_file
from stages.data.columns import MissingColumn, Row, RowError
from stages.data.messages import SparseRow
from stages.data.rows import (
    PARQUET_ERRORS,
    JsonlRows,
    ParquetRows,
    has_column,
    schema_columns,
    whole_columns,
)

FILE_FORMAT = b"ARROW1"  # the first bytes; a stream begins with the length of its schema
BATCH_ROWS = 1000  # that are decoded at once
MOST_BATCH_BYTES = 2 << 30  # of a batch; compressed ones are larger than their file
OPEN_FILES = 64


class ArrowRows:
    """The reader of Arrow files; `at` is the row's number, from 0."""

    def scan(
        self, file: Path, columns: Sequence[str], optional: Sequence[str] = ()
    ) -> Iterator[tuple[int, Row | RowError]]:
        schema, batches, _ = _opened(file)
        for column in columns:
            if not has_column(schema, column):
                raise MissingColumn(column, schema_columns(schema))
        names = whole_columns([*columns, *optional], schema.names)
        at = 0
        for batch in batches:
            for start in range(0, len(batch), BATCH_ROWS):
                rows = _decoded(batch.slice(start, BATCH_ROWS).select(names))
                yield from enumerate(map(SparseRow, rows), at)
                at += len(rows)

    def read(self, file: Path, at: int, columns: Sequence[str] | None = None) -> Row:
        """Return the row with the `columns` that the file has; None: with all."""
        schema, batches, ends = _opened(file)
        number = int(np.searchsorted(ends, at, side="right"))
        if number == len(ends):
            raise RowError("the row no longer exists")
        batch = batches[number]
        row = batch.slice(at - int(ends[number]) + len(batch), 1)
        names = schema.names if columns is None else whole_columns(columns, schema.names)
        return SparseRow(_decoded(row.select(names))[0])

    def place(self, file: Path, at: int) -> str:
        return f"{file}, row {at + 1}"


ROWS: dict[str, JsonlRows | ParquetRows | ArrowRows] = {
    "jsonl": JsonlRows(),
    "parquet": ParquetRows(),
    "arrow": ArrowRows(),
}


@lru_cache(maxsize=OPEN_FILES)
def _opened(file: Path) -> tuple[pyarrow.Schema, list[pyarrow.RecordBatch], np.ndarray]:
    """Return a file's schema, batches, and the number of rows up to the end of each, int64.

    Raises:
        RowError: it is not Arrow, is damaged, or has too large a batch.
        OSError: it cannot be opened.
    """
    with open_file(file) as opened:  # which is no FIFO, that mapping would wait for
        of_file_format = opened.read(len(FILE_FORMAT)) == FILE_FORMAT
    try:
        mapped = pyarrow.memory_map(str(file))
        if of_file_format:
            reader = pyarrow.ipc.open_file(mapped)
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        else:
            reader = pyarrow.ipc.open_stream(mapped)
            batches = [*reader]
    except PARQUET_ERRORS as error:
        raise RowError(f"cannot be read as Arrow: {error}") from error
    if any(batch.nbytes > MOST_BATCH_BYTES for batch in batches):
        raise RowError(f"has a batch of more than {MOST_BATCH_BYTES >> 30} GiB; write smaller ones")
    return reader.schema, batches, np.cumsum([len(batch) for batch in batches])


def _decoded(batch: pyarrow.RecordBatch) -> list[Row]:
    """Return the rows of a batch. Raises RowError where it is damaged."""
    try:
        batch.validate(full=True)
        return batch.to_pylist()
    except PARQUET_ERRORS as error:
        raise RowError(f"cannot be read as Arrow: {error}") from error
