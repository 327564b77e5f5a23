"""The recorded samples of a stage: which there are, and the ones that a person asks for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote
from zipfile import BadZipFile

import pyarrow
import pyarrow.compute as compute

from parallel.errors import UserError, hint
from parallel.files import naming, open_file
from parallel.parquet_files import UNREADABLE, open_parquet, read_parquet
from pipeline.text import shown
from stages.directory import StageDirectory
from stages.sampling.sample_files import COLUMNS, Row, mapped

Order = Literal["first", "worst", "longest", "flipped", "newest"]

# What an overview needs of every sample; the others are read of the samples that are shown.
LIGHT = ("step", "group", "domain", "problem", "reward", "solved", "tokens", "finish_reason")
PLACE = ("file", "number")  # where a sample is: its file, and its row there
RIGHT = 0.5  # share of a prompt's samples that must solve it


@dataclass(frozen=True)
class Query:
    """The samples that a person asks for, and their order.

    `reward` is a reward's name and the score it gave; "" is the sum. `grep` is searched in prompts
    and responses. `flipped` pairs the samples of a prompt in the first and the last step that had
    it, where it was solved in one of them only.
    """

    steps: tuple[int, ...] = ()
    domain: str | None = None
    problem: str | None = None
    model: str | None = None
    reward: tuple[str, float] | None = None
    finish: str | None = None
    grep: re.Pattern[str] | None = None
    order: Order = "first"


class StageSamples:
    """The samples that a stage has recorded, of training steps or of an evaluation's answers."""

    def __init__(self, directory: StageDirectory) -> None:
        """Find the files; raise UserError where a directory cannot be read."""
        self._directory = directory
        for recorded in (directory.rollouts, directory.samples):
            _check_readable(recorded)
        self.files = sorted(directory.rollouts.glob("step_*.parquet"))
        self.files += sorted(directory.samples.rglob("*.parquet"))
        # A file that a running stage writes or a person deletes must not hide the samples of all
        # others.
        self._damaged: dict[int, str] = {}

    @property
    def steps(self) -> list[int]:
        """The steps that have samples, in order."""
        return sorted(set(self._light["step"].to_pylist()))

    @property
    def count(self) -> int:
        """The number of samples."""
        return len(self._light)

    @property
    def problems(self) -> Counter[str | None]:
        """The problems' keys, each with the number of its samples; None for those without one."""
        return Counter(self._light["problem"].to_pylist())

    def rows(self, problems: Collection[str] | None = None) -> Iterator[Row]:
        """Yield the samples, all or those of some problems, with the `model` that gave each.

        Those of damaged files are left out.
        """
        keys = None if problems is None else pyarrow.array(problems, pyarrow.string())
        for table in self._tables([*COLUMNS]):
            if keys is not None:
                table = table.filter(compute.is_in(table["problem"], keys))
            yield from map(mapped, table.drop_columns([*PLACE]).to_pylist())

    @cached_property
    def _light(self) -> pyarrow.Table:
        return self._table(LIGHT)

    def _table(self, columns: Sequence[str]) -> pyarrow.Table:
        """Return columns of all samples, with the `model` that gave them and their `PLACE`."""
        tables = [*self._tables(columns)]
        if not tables:
            none = "has no recorded samples: the stage has not finished a step, or records none"
            raise UserError(next(iter(self.damaged), f"{shown(self._directory.path)} {none}"))
        return pyarrow.concat_tables(tables)

    @property
    def damaged(self) -> list[str]:
        """The reasons for which files' samples are left out: damaged, or taken away since."""
        return [*self._damaged.values()]

    def _tables(self, columns: Sequence[str]) -> Iterator[pyarrow.Table]:
        """Yield columns of every file's samples, but of damaged files, which it notes."""
        for number, path in enumerate(self.files):
            if number not in self._damaged:
                try:
                    table = self._read(number, path, columns)
                except UserError as error:
                    self._damaged[number] = str(error)
                else:
                    yield table

    def _read(self, number: int, path: Path, columns: Sequence[str]) -> pyarrow.Table:
        try:
            table = _checked(_stored(path, columns), columns)
        except UNREADABLE as error:
            why = getattr(error, "strerror", None) or f"damaged: {error}"
            raise UserError(f"{shown(path)}: {why}") from error
        count = len(table)
        for name, values in (
            ("model", pyarrow.array([self._model(path)] * count, pyarrow.string())),
            ("file", pyarrow.array([number] * count, pyarrow.int32())),
            ("number", pyarrow.array(range(count), pyarrow.int32())),
        ):
            table = table.append_column(name, values)
        return table

    def _model(self, path: Path) -> str | None:
        """Return the model whose answers a file has; None in training."""
        below = path.parent
        training = below in (self._directory.rollouts, self._directory.samples)
        return None if training else unquote(below.name)

    def find(self, query: Query) -> list[Row]:
        """Return the samples that a query asks for, light columns only, in its order.

        Raises:
            UserError: there are no samples, or none has a step, domain, model or reward of the
                query's.
        """
        table = self._light
        for name, label in (
            ("domain", query.domain),
            ("model", query.model),
            ("finish_reason", query.finish),
        ):
            if label is not None:
                table = self._equal(table, name, label)
        if query.steps:
            steps = set(query.steps).intersection(table["step"].unique().to_pylist())
            if not steps:
                earliest, *_, last = [self.steps[0], *self.steps]
                raise UserError(
                    f"no samples of step {query.steps[0]}; there are some from {earliest} to {last}"
                )
            numbers = pyarrow.array(steps, pyarrow.int32())
            table = table.filter(compute.is_in(table["step"], numbers))
        if query.problem is not None:
            table = table.filter(compute.starts_with(table["problem"], query.problem))
        if query.reward is not None:
            table = self._scored(table, *query.reward)
        if query.grep is not None:
            table = self._grepped(table, query.grep)
        return _ordered(table, query.order)

    def _equal(self, table: pyarrow.Table, column: str, label: str) -> pyarrow.Table:
        labels = [text for text in table[column].unique().to_pylist() if text is not None]
        if label not in labels:
            raise UserError(f"no samples of {column} {label}; {hint(label, labels)}")
        return table.filter(compute.equal(table[column], label))

    def _scored(self, table: pyarrow.Table, name: str, score: float) -> pyarrow.Table:
        if not name:
            return table.filter(compute.equal(table["reward"], score))
        by_sample = self._beside(table, ["reward_parts"])["reward_parts"].to_pylist()
        reward_names = {key for rewards in by_sample for key, _ in rewards or ()}
        if name not in reward_names:
            raise UserError(f"no sample has a reward {name}; {hint(name, sorted(reward_names))}")
        return table.filter(
            pyarrow.array([dict(rewards or ()).get(name) == score for rewards in by_sample])
        )

    def _grepped(self, table: pyarrow.Table, pattern: re.Pattern[str]) -> pyarrow.Table:
        texts = self._beside(table, ["prompt", "response"])
        pairs = zip(texts["prompt"].to_pylist(), texts["response"].to_pylist(), strict=True)
        matches = [any(text and pattern.search(text) for text in pair) for pair in pairs]
        return table.filter(pyarrow.array(matches, pyarrow.bool_()))

    def _beside(self, table: pyarrow.Table, columns: Sequence[str]) -> pyarrow.Table:
        """Return further columns of the samples of a table, in its order."""
        places = zip(*(table[column].to_pylist() for column in PLACE), strict=True)
        return self._at([*places], columns)

    def _at(self, places: Sequence[tuple[int, int]], columns: Sequence[str]) -> pyarrow.Table:
        """Return columns of the samples at some `PLACE`s, in their order."""
        # By file, so that each is opened once.
        ranks = sorted(range(len(places)), key=places.__getitem__)
        tables = []
        for file, of_file in groupby((places[rank] for rank in ranks), key=itemgetter(0)):
            table = self._read(file, self.files[file], columns)
            rows = [number for _, number in of_file]
            if max(rows) >= len(table):
                raise UserError(f"{shown(self.files[file])}: it has other samples now; look again")
            tables.append(table.take(rows))
        if not tables:
            return self._read(0, self.files[0], columns).slice(0, 0)
        # Back to the order that was asked for.
        order = [0] * len(ranks)
        for at, rank in enumerate(ranks):
            order[rank] = at
        return pyarrow.concat_tables(tables).take(order)

    def whole(self, light_rows: Sequence[Row]) -> list[Row]:
        """Return all columns of samples that were found, each with its `model` and `file`."""
        places = [(row["file"], row["number"]) for row in light_rows]
        table = self._at(places, [*COLUMNS]).drop_columns([*PLACE])
        files = (str(self.files[file]) for file, _ in places)
        rows = map(mapped, table.to_pylist())
        return [{**row, "file": file} for row, file in zip(rows, files, strict=True)]

    def routes(self, row: Row) -> list[list[list[int]]] | None:
        """Return the experts of each token of a sample's response, by routed layer.

        Those of the position that predicts the token. None where they are not recorded.
        """
        import numpy as np  # torch-free, and yet a tenth of a second that no other look waits for

        path = self.files[row["file"]]
        arrays = path.with_suffix(".npz")
        if not arrays.exists():
            return None
        lengths = ("prompt_tokens", "response_tokens")
        columns = [self._read(row["file"], path, [name])[name].to_pylist() for name in lengths]
        counts = [len(one) + len(other) - 1 for one, other in zip(*columns, strict=True)]
        try:
            with naming(arrays), open_file(arrays) as file, np.load(file) as held:
                all_routes = held["routes"]
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            raise UserError(f"{shown(arrays)}: damaged: {error}") from error
        if len(all_routes) != sum(counts):
            return None
        number = row["number"]
        end = sum(counts[: number + 1])
        routes: list[list[list[int]]] = all_routes[end - len(columns[1][number]) : end].tolist()
        return routes


def _check_readable(directory: Path) -> None:
    """Raise UserError for a directory that cannot be read, which `glob` takes for an empty one."""
    try:
        if directory.exists():
            next(directory.iterdir(), None)
    except OSError as error:
        raise UserError(f"{shown(directory)}: {error.strerror}") from error


def _stored(path: Path, columns: Sequence[str]) -> pyarrow.Table:
    """Return those of some columns that a file has; raise ValueError where two have one name."""
    with open_parquet(path) as file:
        names = file.schema_arrow.names
    if len(set(names)) < len(names):
        raise ValueError("two columns have one name")
    return read_parquet(path, [name for name in columns if name in names])


def _checked(table: pyarrow.Table, columns: Sequence[str]) -> pyarrow.Table:
    """Return a file's samples with all `columns` in their types.

    Raises:
        ValueError, ArrowException: a column has another type, or values that are none of its type,
            or a sample has no step or domain.
    """
    for name in columns:
        expected = COLUMNS[name].type
        if name not in table.column_names:  # an earlier version recorded fewer
            table = table.append_column(name, pyarrow.nulls(len(table), expected))
        elif table.schema.field(name).type != expected:
            at = table.column_names.index(name)
            table = table.set_column(at, name, table[name].cast(expected))
    table = table.select([*columns])  # in one order in all files, for those of several are joined
    table.validate(full=True)
    if any(name in columns and table[name].null_count for name in ("step", "domain")):
        raise ValueError("a sample has no step or no domain")
    return table


def _ordered(table: pyarrow.Table, order: Order) -> list[Row]:
    rows: list[Row] = table.to_pylist()
    if order == "worst":
        graded = [row for row in rows if row["reward"] is not None]
        return sorted(graded, key=lambda row: (row["reward"], _age(row)))
    if order == "longest":
        return sorted(rows, key=lambda row: (-(row["tokens"] or 0), _age(row)))
    if order == "newest":
        return _newest(rows)
    return [*_flipped(rows)] if order == "flipped" else rows


def _age(row: Row) -> int:
    """Return a number that is lower for newer samples; an evaluation's answers are of one age."""
    return 0 if row["model"] is not None else -row["step"]


def _newest(rows: Sequence[Row]) -> list[Row]:
    """Return the newest samples first, and of every group of a step one before a second."""
    seen = Counter[tuple[str | None, str, int, int]]()
    ranks = []
    for row in rows:
        group = row["model"], row["domain"], row["step"], row["group"]
        ranks.append((_age(row), seen[group]))
        seen[group] += 1
    order = sorted(range(len(rows)), key=ranks.__getitem__)
    return [rows[place] for place in order]


def _flipped(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield, of each prompt that became right or wrong, a sample of its first and last step."""
    seen: dict[tuple[str, str], dict[int, list[Row]]] = {}
    for row in rows:
        if row["problem"] is not None and row["solved"] is not None:
            of_problem = seen.setdefault((row["domain"], row["problem"]), {})
            of_problem.setdefault(row["step"], []).append(row)
    for steps in seen.values():
        earliest, last = (steps[step] for step in (min(steps), max(steps)))
        before, after = (_share(rows) >= RIGHT for rows in (earliest, last))
        if before != after:
            yield next(row for row in earliest if row["solved"] == before)
            yield next(row for row in last if row["solved"] == after)


def _share(rows: Sequence[Row]) -> float:
    return sum(row["solved"] for row in rows) / len(rows)


def columns_of(row: Row) -> dict[str, Any]:
    """Return a sample's columns that have a value, in the order of the files."""
    return {name: row[name] for name in COLUMNS if row.get(name) is not None}
