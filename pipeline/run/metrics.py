"""The numbers of a run: metrics.jsonl, one line per step of a stage, and results.json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from parallel.files import open_file, read_text
from pipeline.text import shown

LABELS = ("model", "domain")  # text; every other value is a number
NOT_METRICS = ("step", "steps", "time", *LABELS)
MOST_STEPS = 10**12  # arithmetic on larger ones might overflow a float
SCORE = ("accuracy", "low", "high", "n")
OF_SEVERAL = ("samples_per_problem", "pass_at_k")  # where a problem has several samples
Line = dict[str, Any]
Models = dict[str, dict[str, dict[str, Any]]]
UNREADABLE = (ValueError, RecursionError, OverflowError)


class MetricsTail:
    """A reader of the new lines of a growing file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read(self) -> list[Line]:
        """Return the whole lines since the last call."""
        if not self._path.exists():
            return []
        # A resumed stage may cut off the lines after its checkpoint.
        self._offset = min(self._offset, self._path.stat().st_size)
        with open_file(self._path) as file:
            file.seek(self._offset)
            whole, _, _ = file.read().rpartition(b"\n")
        if not whole:
            return []
        self._offset += len(whole) + 1
        return list(_whole(whole))


def newest_lines(path: Path, most_bytes: int) -> list[Line]:
    """Return the lines in the last `most_bytes` of a file; none if it does not exist."""
    try:
        with open_file(path) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - most_bytes))
            return list(_whole(file.read()))
    except FileNotFoundError:
        return []


def all_lines(path: Path) -> list[Line]:
    """Return all lines of a finished stage; raise UserError for a damaged one."""
    metrics = []
    with open_file(path) as file:
        lines = file.read().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            metrics.append(_read(line))
        except UNREADABLE as error:
            where = f"{shown(path)}:{number}"
            raise UserError(f"{where}: damaged, and a gate reads it: {error}") from error
    return metrics


def _whole(lines: bytes) -> Iterator[Line]:
    """Yield the readable lines: the reader may cut off the first and the writer the last."""
    for line in lines.split(b"\n"):
        try:
            yield _read(line)
        except UNREADABLE:
            continue


def _read(line: bytes) -> Line:
    """Return the values of a line; raise one of UNREADABLE where it is not a stage's metrics."""
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    for name, value in values.items():
        if type(value) in (int, float):  # a bool is neither
            wrong = name in LABELS
            float(value)  # raises OverflowError for an integer beyond a float
        else:
            wrong = name not in LABELS or not isinstance(value, str)
        if wrong:
            raise ValueError(f"{name} must be a {'string' if name in LABELS else 'number'}")
    for name in ("step", "steps"):
        step = values.get(name, 0)
        if not isinstance(step, int) or not 0 <= step <= MOST_STEPS:
            raise ValueError(f"{name} must be an integer from 0 to {MOST_STEPS}")
    if missing := {"step", "time"} - values.keys():
        raise ValueError(f"missing {' and '.join(sorted(missing))}")
    if not math.isfinite(values["time"]):
        raise ValueError("time must be finite")
    return values


def series(lines: Sequence[Line], metric: str) -> list[float]:
    """Return a metric's finite values, by step."""
    return [line[metric] for line in lines if metric in line and math.isfinite(line[metric])]


def read_models(path: Path) -> Models | None:
    """Return the accuracies of a results.json; None where it is damaged."""
    try:
        models: Models = json.loads(read_text(path))["models"]
        scores = [score for of_model in models.values() for score in of_model.values()]
        sound = all(math.isfinite(number) for score in scores for number in _of(score))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    return models if sound else None


def _of(score: dict[str, Any]) -> list[float]:
    """Return a score's numbers; raise KeyError for a missing one."""
    return [score[name] for name in (*SCORE, *(OF_SEVERAL if "pass_at_k" in score else ()))]
