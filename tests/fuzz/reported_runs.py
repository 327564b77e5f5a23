"""The fuzzer of recorded runs: damaged copies under report, look, compare and bundle.

The run is the one of tests/browser, with samples, answers, experts and timelines of every kind. A
case damages it in a few places, often a Parquet file: its bytes, a value or a column of it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pyarrow
import pyarrow.parquet as parquet

from tests.browser.reported_run import EXPERT, write_reported

from .run_directories import damage, damage_table, damaged_cases
from .worker import Case

STAGES = [EXPERT, "merge", "evaluate", f"gates.{EXPERT}", "cold_start", "export"]
LOOKS = [
    *([], ["--worst"], ["--longest"], ["--json"], ["--experts"], ["--tokens"], ["--routes"]),
    *(["--step", "3"], ["--step", "3", "--step", "5", "--flipped"], ["--grep", "a"]),
    *(["--metric", "reward"], ["--reward", "exact=1"], ["--domain", "sums", "--finish", "stop"]),
    ["--model", "merge", "--versus", "cold_start"],
]
VALUES: list[Any] = [None, -1, 2**31 - 1, 2**63 - 1, float("nan"), float("inf"), "x", "\x1b[2J"]
VALUES += [b"\xff", [1], [], {}, True]


def cases(seed: int, folder: Path, *, keep: bool = False) -> Case:
    """Return the function from a number to its case, which has a step for each command."""
    with patch("tests.browser.reported_run.time.time", return_value=1.7e9):
        write_reported(folder / "ended" / "recorded" / "damaged", name="damaged")
        write_reported(folder / "ended" / "whole", name="whole", seed=7)
    output = folder / "output"

    def commands(random: Random, damaged: Path) -> list[list[str]]:
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir()
        return _commands(random, str(damaged), output)

    return damaged_cases(f"reports {seed}", folder, commands, _damage, keep=keep)


def _commands(random: Random, run: str, output: Path) -> list[list[str]]:
    """Return the commands of a case, which write below `output`."""
    report = random.choice([[], ["--redact"], ["whole"], ["whole", "--redact"], ["--samples", "9"]])
    overview = random.choice([[], ["--json"], ["--waits"], ["--metric", "reward"]])
    return [
        ["report", run, "--output", str(output / "report.html"), *report],
        ["look", run, *overview],
        ["look", run, random.choice(STAGES), *random.choice(LOOKS)],
        ["compare", *random.choice([[run], [run, "whole"], ["whole", run], [run, "--json"]])],
        ["bundle", run, "--to", str(output / random.choice(["bundle.tar.gz", "bundle"]))],
    ]


def _damage(random: Random, run: Path) -> str:
    """Damage a run in one place. Return a description of the damage."""
    return random.choice([damage, damage, damage_table, _column])(random, run)


def _column(random: Random, run: Path) -> str:
    """Change a value, the type or the name of a column in a Parquet file; return a description."""
    files = sorted(path for path in run.rglob("*.parquet") if path.is_file())
    try:
        path = random.choice(files)
        table = parquet.ParquetFile(path).read(use_threads=False)
        name = random.choice(table.column_names)
        values = table[name].to_pylist()
        values[0] = random.choice(VALUES)
    except (OSError, ValueError, IndexError):  # an earlier damage
        return damage(random, run)
    kind = random.choice(["value", "value", "column", "missing", "twice", "renamed"])
    parquet.write_table(_changed(table, name, values, kind), path)
    return f"{kind} {path.relative_to(run)}: {name} {values[0]!r}"


def _changed(table: pyarrow.Table, name: str, values: list[Any], kind: str) -> pyarrow.Table:
    """Return a table with other values in a column, or with other columns."""
    at = table.column_names.index(name)
    try:
        array = pyarrow.array(values, table.schema.field(name).type)
    except (ValueError, TypeError, OverflowError):  # the new value has another type
        array = pyarrow.array([repr(value) for value in values])
    if kind == "column":
        array = pyarrow.array([repr(values[0])] * len(values))
    if kind == "missing":
        return table.remove_column(at)
    if kind == "twice":
        return table.append_column(name, array)
    if kind == "renamed":
        return table.set_column(at, f"{name}x", array)
    return table.set_column(at, name, array)
