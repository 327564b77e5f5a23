"""Parquet from outside: honest files are read whole, and small ones that say gigabytes are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest

from parallel import parquet_files
from parallel.parquet_files import UNREADABLE, read_parquet, row_batches

LONG = "x" * 3_000_000  # of a text that a dictionary has once and 1,000 rows name
MEMORY = 700 << 20  # bytes of a process that reads one
READ = """
import re, sys
from pathlib import Path
from parallel.parquet_files import UNREADABLE, read_parquet, row_batches
path, column, how = sys.argv[1:]
count = 0
try:
    if how == "table":
        read_parquet(Path(path), [column])
    for rows in row_batches(Path(path), [column]):
        count += len(rows)
except UNREADABLE as error:
    print("refused", error)
# Of this program alone: ru_maxrss begins with that of the process that has forked it.
[peak] = re.findall(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())
print(count, int(peak) << 10)
"""


def encoded(count: int) -> pyarrow.DictionaryArray:
    """Return a column of `count` equal long texts."""
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, "int32"), [LONG])


def chats(count: int) -> pyarrow.Array:
    """Return a column of `count` conversations, each of one long message."""
    messages = pyarrow.StructArray.from_arrays(
        [pyarrow.array(["user"] * count), encoded(count)], ["role", "content"]
    )
    return pyarrow.ListArray.from_arrays(pyarrow.array(range(count + 1), "int32"), messages)


def write(path: Path, column: pyarrow.Array, **options: object) -> Path:
    table = pyarrow.table({"column": column})
    parquet.write_table(table, path, compression="zstd", store_schema=False, **options)
    return path


@pytest.mark.parametrize(("column", "how"), [(encoded, "rows"), (chats, "rows"), (chats, "table")])
def test_a_dictionary_of_one_long_text_takes_no_gigabytes(
    column: object, how: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.parquet", column(1000))  # type: ignore[operator]
    assert path.stat().st_size < 1000  # and 3 GB where it is decoded at once
    command = [sys.executable, "-c", READ, str(path), "column", how]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    *refused, last = out.splitlines()
    rows, memory = map(int, last.split())
    assert memory < MEMORY
    assert (rows, refused) == ((1000, []) if how == "rows" else (0, [*refused]))
    assert how == "rows" or refused == ["refused decodes to over 1024 MiB; split it"]


def test_a_list_whose_length_is_encoded_is_refused(tmp_path: Path) -> None:
    ids = pyarrow.array(np.full(40_000_000, 7, "int32"))
    path = write(tmp_path / "a.parquet", pyarrow.ListArray.from_arrays([0, len(ids)], ids))
    assert path.stat().st_size < 1000
    for read in (read_parquet, lambda path: [*row_batches(path, ["column"])]):
        with pytest.raises(ValueError, match="40000000 values in"):
            read(path)


def test_a_page_of_zeros_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pyarrow.array(["\0" * (300 << 20)]), use_dictionary=False)
    assert path.stat().st_size < 100_000
    with pytest.raises(ValueError, match="300 MiB in"):
        [*row_batches(path, ["column"])]


@pytest.mark.parametrize("dictionary", [True, False])
def test_honest_rows_are_read_in_order(
    dictionary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {
            **{"prompt": f"text {n}" * (n % 40), "answer": "seven" if n % 3 else None, "n": n},
            "messages": [{"role": "user", "content": f"{n}" * 50}] * (n % 4),
        }
        for n in range(5000)
    ]
    path = tmp_path / "a.parquet"
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, path, row_group_size=1800, use_dictionary=dictionary)
    names = ["prompt", "answer", "messages", "n"]

    def read() -> list[dict[str, object]]:
        return [row for batch in row_batches(path, names) for row in batch]

    assert read() == rows and read_parquet(path).to_pylist() == rows
    # As of a file whose texts must be counted: many small slices of encoded columns.
    monkeypatch.setattr(parquet_files, "MOST_BYTES", 100)
    monkeypatch.setattr(parquet_files, "BATCH_BYTES", 3000)
    assert read() == rows and read_parquet(path).to_pylist() == rows


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (read_parquet, lambda path: [*row_batches(path, [])]):
        with pytest.raises(UNREADABLE, match="not a regular file"):
            read(tmp_path / "pipe")
