"""Parquet files from outside, opened and decoded within bounds; never imports torch.

A few hundred bytes of Parquet can say gigabytes: a compressed page of zeros, a dictionary of one
long text that every row names, a list whose length is run-length encoded. Each is checked before it
is decoded. Damaged files raise ValueError, an ArrowException or OSError, all in `UNREADABLE`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from parallel.files import naming, open_file

UNREADABLE = (OSError, ValueError, KeyError, IndexError, OverflowError, pyarrow.ArrowException)
MOST_BYTES = 1 << 30  # of a row group's texts that are decoded without counting them
MOST_TABLE_BYTES = 1 << 30  # of encoded texts that are decoded as a whole
MOST_ROW_BYTES = 256 << 20  # of one decoded row
BATCH_ROWS, BATCH_BYTES = 1000, 64 << 20
# Above these the page or the list is no data: constant columns compress a thousandfold, too.
MOST_COMPRESSION, MOST_REPEATED, FREE_BYTES = 1000, 16, 256 << 20


@contextmanager
def open_parquet(path: Path, dictionaries: Sequence[str] = ()) -> Iterator[parquet.ParquetFile]:
    """Open a regular file; texts in the columns `dictionaries` (by path) stay encoded.

    Raises:
        OSError: it cannot be opened, or is a FIFO or a device, which would block for ever.
        ArrowException: it is not Parquet.
    """
    with naming(path), open_file(path) as file:
        yield parquet.ParquetFile(file, read_dictionary=[*dictionaries])


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> pyarrow.Table:
    """Return columns of a file, by default all.

    Raises:
        UNREADABLE: it is damaged, or its dictionaries make more than MOST_TABLE_BYTES.
    """
    names = None if columns is None else [*columns]
    with open_parquet(path) as file:
        groups = range(file.num_row_groups)
        size = 0
        for number in groups:
            size += _encoded_bytes(path, file, number, names)
            if size > MOST_TABLE_BYTES:
                raise ValueError(f"decodes to over {MOST_TABLE_BYTES >> 20} MiB; split it")
        # With Arrow's threads 7 of 80 processes that ended soon after aborted: "terminate called
        # without an active exception".
        return file.read_row_groups([*groups], names, use_threads=False)


def read_group(path: Path, group: int, columns: Sequence[str] | None = None) -> pyarrow.Table:
    """Return columns of a row group, by default all, for reading single rows of it by `row_of`.

    Texts stay encoded where their dictionaries could make more than MOST_BYTES: a system's message
    of 20 kB in each of 100,000 rows is there once.

    Raises:
        UNREADABLE: it is damaged.
    """
    names = None if columns is None else [*columns]
    with open_parquet(path) as file:
        encoded = _must_be_counted(path, file, group, names)
    with open_parquet(path, encoded) as source:
        return source.read_row_group(group, names, use_threads=False)


def row_of(table: pyarrow.Table, place: int) -> pyarrow.Table:
    """Return a row of a table of `read_group`, or raise ValueError if it is too large."""
    row = table.slice(place, 1)
    size = sum(_bytes(chunk) for column in row.columns for chunk in column.chunks)
    if size > MOST_ROW_BYTES:
        raise _too_large(size)
    return row


def row_batches(path: Path, columns: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a file in order, a few MiB of them at a time.

    Raises:
        UNREADABLE: it is damaged, or a row has more than MOST_ROW_BYTES.
    """
    names = [*columns]
    with open_parquet(path) as file:
        for group in range(file.num_row_groups):
            counted = _must_be_counted(path, file, group, names)
            batch_rows = _batch_rows(file, group, names)
            with open_parquet(path, counted) as source:
                for batch in source.iter_batches(batch_rows, [group], names, use_threads=False):
                    yield from _within(batch) if counted else [batch.to_pylist()]


def _within(batch: pyarrow.RecordBatch) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a batch whose texts are encoded, about BATCH_BYTES at a time."""
    size = sum(map(_bytes, batch.columns))
    if len(batch) > 1 and size > BATCH_BYTES:
        half = len(batch) // 2
        yield from _within(batch.slice(0, half))
        yield from _within(batch.slice(half))
    elif size > MOST_ROW_BYTES:
        raise _too_large(size)
    else:
        yield batch.to_pylist()


def _too_large(size: int) -> ValueError:
    return ValueError(f"a row of {size >> 20} MiB, more than {MOST_ROW_BYTES >> 20} MiB")


def _batch_rows(file: parquet.ParquetFile, group: int, names: list[str] | None) -> int:
    """Return how many rows of a row group have about BATCH_BYTES."""
    rows = max(1, file.metadata.row_group(group).num_rows)
    size = sum(chunk.total_uncompressed_size for chunk in _chunks(file, group, names))
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(size, 1)))


def _encoded_bytes(
    path: Path, file: parquet.ParquetFile, group: int, names: list[str] | None
) -> int:
    """Return the bytes of a row group whose texts must be counted, decoded; 0 for any other."""
    counted = _must_be_counted(path, file, group, names)
    if not counted:
        return 0
    size = 0
    with open_parquet(path, counted) as source:
        rows = _batch_rows(file, group, names)
        for batch in source.iter_batches(rows, [group], names, use_threads=False):
            size += sum(map(_bytes, batch.columns))
    return size


def _must_be_counted(
    path: Path, file: parquet.ParquetFile, group: int, names: list[str] | None
) -> list[str]:
    """Return the columns of texts whose dictionaries could make more than MOST_BYTES of a group.

    Raises:
        ValueError: its pages or lists are larger than those of data.
    """
    chunks = [*_chunks(file, group, names)]
    for chunk in chunks:
        _check_sizes(chunk)
    texts = [
        chunk.path_in_schema
        for chunk in chunks
        if chunk.physical_type == "BYTE_ARRAY"
        and chunk.has_dictionary_page
        # No text is longer than all pages, where every text is at least once.
        and chunk.num_values * chunk.total_uncompressed_size > MOST_BYTES
    ]
    if not texts:
        return []
    with open_parquet(path, texts) as source:
        batch = next(source.iter_batches(1, [group], names, use_threads=False), None)
    longest = max(map(_longest, batch.columns), default=0) if batch is not None else 0
    most = max(chunk.num_values for chunk in chunks if chunk.path_in_schema in texts)
    return texts if longest * most > MOST_BYTES else []


def _check_sizes(chunk: parquet.ColumnChunkMetaData) -> None:
    """Raise ValueError where a column of a row group says more than data can.

    A list that is no data: tokens' ids have at least a byte each.
    """
    size, compressed = chunk.total_uncompressed_size, max(chunk.total_compressed_size, 0)
    if size > MOST_COMPRESSION * compressed + FREE_BYTES:
        raise ValueError(f"{chunk.path_in_schema}: {size >> 20} MiB in {compressed} bytes")
    values = 8 * chunk.num_values
    if "." in chunk.path_in_schema and values > MOST_REPEATED * size + FREE_BYTES:
        raise ValueError(f"{chunk.path_in_schema}: {chunk.num_values} values in {size} bytes")


def _chunks(
    file: parquet.ParquetFile, group: int, names: list[str] | None
) -> Iterator[parquet.ColumnChunkMetaData]:
    """Yield the column chunks of a row group that are read; those of nested columns have paths."""
    metadata = file.metadata.row_group(group)
    for place in range(metadata.num_columns):
        chunk = metadata.column(place)
        top = chunk.path_in_schema.partition(".")[0]
        if names is None or top in names or chunk.path_in_schema in names:
            yield chunk


def _dictionaries(array: pyarrow.Array) -> Iterator[pyarrow.DictionaryArray]:
    """Yield the encoded texts of a column, also those below lists, maps and structs."""
    kind = array.type
    if pyarrow.types.is_dictionary(kind):
        yield array
    elif pyarrow.types.is_struct(kind):
        for child in array.flatten():
            yield from _dictionaries(child)
    elif pyarrow.types.is_nested(kind):
        yield from _dictionaries(array.flatten())


def _longest(array: pyarrow.Array) -> int:
    """Return the bytes of the longest text in a column's dictionaries."""
    lengths = (
        compute.max(compute.binary_length(texts.dictionary)) for texts in _dictionaries(array)
    )
    return max((length.as_py() or 0 for length in lengths), default=0)


def _bytes(array: pyarrow.Array) -> int:
    """Return the bytes of a column when its texts are decoded."""
    size = int(array.nbytes)
    for texts in _dictionaries(array):
        lengths = compute.binary_length(texts.dictionary).take(texts.indices)
        size += (compute.sum(compute.cast(lengths, pyarrow.int64())).as_py() or 0) - int(
            texts.dictionary.nbytes
        )
    return size
