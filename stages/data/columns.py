"""The columns of rows by name: nested ones, absent ones, and which one may be meant.

Public data sets name the same things differently, and verl's rows nest them. Imports no library of
arrays, so that `braid validate` can read the first rows of a file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]

# Names of public data sets by Braid's, the likelier first: GSM8K, NuminaMath, DAPO-Math (verl),
# xlam-function-calling, ShareGPT.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "prompt": (
        *("question", "problem", "query", "instruction", "input", "messages", "conversations"),
        *("extra_info.question", "text"),
    ),
    "answer": (
        *("final_answer", "expected_answer", "ground_truth", "reward_model.ground_truth", "target"),
        *("solution", "label", "output", "response", "completion", "extra_info.answer"),
    ),
    "response": ("completion", "answer", "solution", "output", "generation"),
    "messages": ("conversations", "conversation", "chat", "dialogue"),
    "tools": ("functions", "available_tools"),
    "calls": ("answers", "tool_calls", "expected_calls", "ground_truth"),
    "tests": ("test_cases", "input_output", "public_tests", "reward_model.ground_truth"),
    "schema": ("json_schema",),
}
# The keys of settings whose columns `braid init --columns NAME.KEY=COLUMN` names, by NAME.
OF_INIT = re.compile(r"domains\.(?P<domain>.+)\.prompts|stages\.cold_start\.data\.(?P<sft>\w+)")
MOST_NESTED = 12  # keys of a mapping that are listed as columns; more are content


class RowError(Exception):
    """A row that cannot be used; the message says why."""


class MissingColumn(RowError):
    """A row without a column that is read; `columns` are those that it has."""

    def __init__(self, column: str, columns: Sequence[str]) -> None:
        listed = ", ".join(map(repr, columns)) or "none"
        nearest = nearest_column(column, columns)
        meant = "" if nearest is None else f"; the nearest: {nearest!r}"
        super().__init__(f"no column {column!r}; columns: {listed}{meant}")
        self.column, self.columns = column, list(columns)


def column_of(row: Mapping[str, Any], column: str) -> Any:
    """Return a column's value. Raises MissingColumn where the row lacks it.

    Example: a column that has the name itself comes first.
        >>> row = {"reward_model": {"ground_truth": "34", "style": "rule"}, "a.b": 1}
        >>> column_of(row, "reward_model.ground_truth"), column_of(row, "a.b")
        ('34', 1)
    """
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise MissingColumn(column, column_names(row))
        value = value[name]
    return value


def column_or_none(row: Mapping[str, Any], column: str) -> Any:
    """Return a column's value, None where the row lacks it."""
    try:
        return column_of(row, column)
    except MissingColumn:
        return None


def column_names(row: Mapping[str, Any]) -> list[str]:
    """Return the names of a row's columns; of a mapping with few keys, those of its keys.

    Example:
        >>> column_names({"prompt": "2+2?", "reward_model": {"style": "rule", "ground_truth": 4}})
        ['prompt', 'reward_model.style', 'reward_model.ground_truth']
    """
    names = []
    for name, value in row.items():
        if isinstance(value, Mapping) and 0 < len(value) <= MOST_NESTED:
            names += [f"{name}.{key}" for key in value]
        else:
            names.append(name)
    return names


def nearest_column(column: str, columns: Iterable[str]) -> str | None:
    """Return the column that may be meant by an absent one, None where none is near.

    Example:
        >>> nearest_column("prompt", ["problem", "solution"]), nearest_column("tets", ["tests"])
        ('problem', 'tests')
    """
    names = list(columns)
    for synonym in SYNONYMS.get(column, ()):
        if synonym in names:
            return synonym
    return next(iter(difflib.get_close_matches(column, names, n=1)), None)


def renaming(key: str, required: Mapping[str, str], columns: Sequence[str]) -> str:
    """Return how the settings at a key, and `braid init`, name the columns that the files have.

    `required` are the columns that are set, by their keys, and `columns` the files'. An absent one
    becomes the column that may be meant, or COLUMN where none is near.

    Example:
        >>> required = {"messages": "messages"}
        >>> renaming("domains.math.demonstrations", required, ["id", "conversations"])
        'name the columns: domains.math.demonstrations: {messages: conversations}'
        >>> renaming("domains.math.demonstrations", required, ["problem", "solution"])
        'name the columns: domains.math.demonstrations: {prompt: problem, response: solution}'
    """
    tops = {name.partition(".")[0] for name in columns}
    nearest = {
        name: nearest_column(column, columns) or nearest_column(name, columns) or "COLUMN"
        for name, column in required.items()
        if column not in columns and column not in tops
    }
    if nearest == {"messages": "COLUMN"}:  # rows of pairs instead
        pair = {name: nearest_column(name, columns) for name in ("prompt", "response")}
        nearest = {name: column for name, column in pair.items() if column} or nearest
    block = f"{key}: {{{', '.join(f'{name}: {column}' for name, column in nearest.items())}}}"
    if rows := OF_INIT.fullmatch(key):
        of = rows["domain"] or rows["sft"]
        options = (f"{of}.{name}={column}" for name, column in nearest.items())
        block = f"--columns {' '.join(options)} (braid init), or {block}"
    return f"name the columns: {block}"
