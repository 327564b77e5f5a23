"""The files of recorded samples: Parquet, one for each training step or call of an evaluation.

`pandas.read_parquet` reads a file, or a directory of them. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet as parquet

from parallel.errors import UserError
from parallel.files import replacing
from parallel.parquet_files import UNREADABLE, read_parquet

Row = dict[str, Any]

TEXT, INTEGER, NUMBER = pyarrow.string(), pyarrow.int32(), pyarrow.float64()
IDS, VALUES = pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.float32())


class Column(NamedTuple):
    """A column of the files, and what it means."""

    type: pyarrow.DataType
    meaning: str


COLUMNS = {
    "step": Column(INTEGER, "the training step; in an evaluation, the number of its first problem"),
    "update": Column(INTEGER, "the update within the step"),
    "group": Column(INTEGER, "the prompt's number within the step"),
    "domain": Column(TEXT, "its domain"),
    "problem": Column(
        TEXT,
        "content hash of the prompt, 64 hexadecimal digits: the same in every step, stage and run",
    ),
    "prompt": Column(TEXT, "as the model reads it"),
    "answer": Column(TEXT, "the reference answer of its problem; null where it has none"),
    "response": Column(TEXT, "without the end token"),
    "prompt_tokens": Column(IDS, "token ids"),
    "response_tokens": Column(IDS, "token ids, end token included"),
    "tokens": Column(INTEGER, "number of the response's tokens"),
    "finish_reason": Column(TEXT, "`stop`, or `length` where it was truncated"),
    "reward": Column(NUMBER, "null where a reward failed"),
    "reward_parts": Column(
        pyarrow.map_(TEXT, NUMBER), "every reward by name, before its weight multiplies it"
    ),
    "reward_messages": Column(pyarrow.map_(TEXT, TEXT), "what rewards said of their score"),
    "reward_failure": Column(TEXT, "why it has no reward; null where it has one"),
    "solved": Column(
        pyarrow.bool_(), "whether it solves its problem, as evaluation counts; null without reward"
    ),
    "step_rewards": Column(
        pyarrow.list_(pyarrow.struct({"end": INTEGER, "reward": NUMBER})),
        "weighted rewards of its steps, each with the index of the step's last token",
    ),
    "advantage": Column(NUMBER, "its advantage, the mean of its tokens'"),
    "weight_version": Column(
        INTEGER, "the oldest weights that any of its tokens was sampled with, as a training step"
    ),
    "staleness": Column(INTEGER, "training steps from these weights to the step's own"),
    "demonstrated": Column(pyarrow.bool_(), "given by data and not sampled"),
    "row": Column(pyarrow.int64(), "its row in its source of data, where it has one"),
    "logprobs": Column(
        VALUES, "of the response's tokens by the engine (mu), in nats; null where demonstrated"
    ),
    "trainer_logprobs": Column(
        VALUES,
        "the same by the trainer (pi_old); this and the next two are 0 where not learned, and null"
        " but for the share `logging.tokens` of the prompts",
    ),
    "entropies": Column(VALUES, "of the policy over the ids a token is sampled from, in nats"),
    "teacher_kl": Column(VALUES, "the loss of a merge at each token, in nats where it is a KL"),
    "advantages": Column(VALUES, "of each token; null where all have `advantage`"),
    "learned": Column(IDS, "indices of the tokens trained on; null where all are"),
}
SCHEMA = pyarrow.schema({name: column.type for name, column in COLUMNS.items()})

# Nothing reads statistics, and zstd alone makes a smaller file than with dictionaries before it;
# both would take half of the time again.
PARQUET = {"compression": "zstd", "use_dictionary": False, "write_statistics": False}


def samples_file(directory: Path, step: int) -> Path:
    """Return the file of a step's samples in a directory."""
    return directory / f"step_{step:06d}.parquet"


def write_samples(path: Path, rows: Sequence[Row]) -> None:
    """Write samples as one file, atomically; a column that a row lacks is null.

    Raises:
        OSError: such as a full disk.
    """
    write_table(path, rows, SCHEMA)


def write_table(path: Path, rows: Sequence[Row], schema: pyarrow.Schema) -> None:
    """Write rows as one file of a schema, as `write_samples` does."""
    present = set().union(*rows)
    arrays = [
        pyarrow.array([row.get(column.name) for row in rows], column.type)
        if column.name in present
        else pyarrow.nulls(len(rows), column.type)
        for column in schema
    ]
    table = pyarrow.table(arrays, schema)
    with replacing(path, sync=False) as file:
        parquet.write_table(table, file, **PARQUET)


def read_samples(path: Path, columns: Sequence[str] | None = None) -> list[Row]:
    """Return the samples of a file, or some of their columns, as rows.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: it is damaged, or cannot be read.
    """
    try:
        return [mapped(row) for row in read_parquet(path, columns).to_pylist()]
    except FileNotFoundError:
        raise
    except UNREADABLE as error:  # pyarrow raises OSError for damaged contents too
        why = getattr(error, "strerror", None) or f"damaged: {error}"
        raise UserError(f"{path}: {why}") from error


def mapped(row: Row) -> Row:
    """Return a file's row whose maps are dictionaries; pyarrow makes them lists of pairs."""
    for name in ("reward_parts", "reward_messages"):
        if row.get(name) is not None:
            row[name] = dict(row[name])
    return row
