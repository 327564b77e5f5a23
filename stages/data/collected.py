"""Responses that a stage collected, as rows of Parquet with their provenance.

Equal rows make equal files: row groups of a fixed size, and nothing of when or where.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet

from parallel.errors import UserError
from parallel.files import naming, open_file, replacing
from stages.data.chat_template import with_calls
from stages.data.problem import Message, Problem

Row = dict[str, Any]

ROW_GROUP = 1024  # rows
DIGEST = b"rows"  # the key of a part's digest in its metadata
MESSAGES = pyarrow.list_(pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string()}))
# Of a response that was drawn; `messages` may have further keys in its messages.
SCHEMA = pyarrow.schema(
    {
        "domain": pyarrow.string(),
        "problem": pyarrow.string(),  # the content hash of the prompt
        "index": pyarrow.int64(),  # in its stream
        "prompt": pyarrow.string(),  # as the model reads it
        "messages": MESSAGES,  # that `prompt` renders; null where the source has text
        "tools": pyarrow.string(),  # that it renders too, as JSON; null without any
        "response": pyarrow.string(),
        "tokens": pyarrow.int32(),  # of the response, end token included
        "token_ids": pyarrow.list_(pyarrow.int32()),
        "reward": pyarrow.float64(),  # null where it failed
        "reward_parts": pyarrow.map_(pyarrow.string(), pyarrow.float64()),
        "finish_reason": pyarrow.string(),  # stop, or length where it was truncated
        "model": pyarrow.string(),  # the digest of the checkpoint
        "weight_version": pyarrow.int32(),
        "stage": pyarrow.string(),
        "seed": pyarrow.int64(),
        "dropped": pyarrow.string(),  # why; null where it was kept
    }
)


def prompt_columns(problem: Problem) -> Row:
    """Return the columns that identify a prompt.

    Arguments of tool calls are JSON text: a column of objects would have one type for each key of
    all rows, and give the keys back in another order.
    """
    messages = problem.messages
    return {
        "domain": problem.domain,
        "problem": problem.key,
        "index": problem.index,
        "prompt": problem.prompt,
        "messages": messages and [with_calls(message, text=True) for message in messages],
        "tools": json.dumps(problem.tools, ensure_ascii=False) if problem.tools else None,
    }


def write_part(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as one file with their digest, atomically.

    Raises:
        OSError: such as a full disk.
        UserError: chat messages that Parquet cannot hold.
    """
    messages = [(row["domain"], row["messages"]) for row in rows if row["messages"] is not None]
    place = SCHEMA.get_field_index("messages")
    schema = SCHEMA.set(place, pyarrow.field("messages", messages_type(messages)))
    table = pyarrow.Table.from_pylist(list(rows), schema)
    table = table.replace_schema_metadata({DIGEST: _digest(table.to_pylist())})
    with _written(path, table.schema) as writer:
        writer.write_table(table, ROW_GROUP)


def _digest(rows: Sequence[Row]) -> bytes:
    """Return the SHA-256 of rows as they are read, in hexadecimal."""
    return sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest().encode()


def messages_type(chats: Sequence[tuple[str, Sequence[Message]]]) -> pyarrow.DataType:
    """Return the type of chat messages, each with the name of its domain.

    Raises:
        UserError: they are of no one type.
    """
    if all(message.keys() == {"role", "content"} for _, chat in chats for message in chat):
        return MESSAGES
    try:
        values = [list(chat) for _, chat in chats]
        # Converted too: what is inferred of a text and a number holds numbers alone.
        return pyarrow.array(values, pyarrow.infer_type(values)).type
    except pyarrow.ArrowException as error:
        raise UserError(
            f"domains.{chats[-1][0]}.prompts.path: its chat messages do not fit into Parquet:"
            f" {error}; give each key of the messages values of one type"
        ) from error


def read_part(path: Path) -> list[Row] | None:
    """Return the rows of a whole file of `write_part`; None where it is damaged or missing.

    Raises:
        OSError: it is there and cannot be read, such as on a busy disk: it must not be replaced.
    """
    try:
        with naming(path), open_file(path) as file:
            content = file.read()
    except FileNotFoundError:
        return None
    try:  # pyarrow raises OSError for damaged contents too
        table = parquet.ParquetFile(pyarrow.BufferReader(content)).read(use_threads=False)
        rows = table.to_pylist()
        # Parquet notices few flipped bits; a digest of the rows notices each that changes one.
        whole = (table.schema.metadata or {}).get(DIGEST) == _digest(rows)
    except (OSError, ValueError, TypeError, OverflowError, pyarrow.ArrowException):
        return None
    # Parts of earlier versions have no tools.
    return rows if whole and rows and rows[0].keys() | {"tools"} == set(SCHEMA.names) else None


def whole_part(path: Path) -> list[Row]:
    """Return the rows of a file of `write_part`.

    Raises:
        UserError: it is damaged or gone.
    """
    if (rows := read_part(path)) is None:
        raise UserError(f"{path}: damaged; resume the stage, which draws it again")
    return rows


def write_joined(path: Path, part_paths: Sequence[Path], *, only_kept: bool) -> int:
    """Write the rows of all parts into one file, atomically; return their number.

    With `only_kept` those that were kept, without the column `dropped`. Reads one part at a time.

    Raises:
        UserError: a part is damaged or gone.
    """
    schema = pyarrow.unify_schemas(
        [parquet.read_schema(part_path) for part_path in part_paths], promote_options="permissive"
    )
    if only_kept:
        schema = schema.remove(schema.get_field_index("dropped"))
    schema = schema.remove_metadata()  # the parts' digests
    count = 0
    with _written(path, schema) as writer:
        for rows in _groups(_rows(part_paths, only_kept)):
            count += len(rows)
            writer.write_table(pyarrow.Table.from_pylist(rows, schema), ROW_GROUP)
    return count


def _rows(part_paths: Iterable[Path], only_kept: bool) -> Iterator[Row]:
    for part_path in part_paths:
        for row in whole_part(part_path):
            if not only_kept or row.pop("dropped") is None:
                yield row


def _groups(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Yield the rows in lists of ROW_GROUP, the last of which may be shorter."""
    group: list[Row] = []
    for row in rows:
        group.append(row)
        if len(group) == ROW_GROUP:
            yield group
            group = []
    if group:
        yield group


@contextmanager
def _written(path: Path, schema: pyarrow.Schema) -> Iterator[parquet.ParquetWriter]:
    """Open a file that is complete under its name once the block ends, and else not there."""
    with replacing(path) as file, parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        yield writer
