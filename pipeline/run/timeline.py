"""The timelines of a run's processes: the phases of each rank and engine, done and present."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from parallel.files import read_text
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage
from pipeline.run.metrics import MOST_STEPS
from pipeline.text import shown
from stages.directory import EngineDirectory

MOST_SECONDS = 1e12  # since the epoch: the year 33,658


@dataclass(frozen=True)
class Phase:
    """A phase of a process, in seconds since the epoch; `end` is None while it lasts."""

    process: str
    name: str
    begin: float
    end: float | None = None
    waits_for: str | None = None
    step: int | None = None


def phases(path: Path, process: str) -> list[Phase]:
    """Return the phases in a file, by their beginnings; a phase of a process that died is cut.

    A line that a crash has cut short is ignored.
    """
    by_key: dict[tuple[int, int], Phase] = {}
    open_: set[tuple[int, int]] = set()
    # A process counts its phases from 0, and a restarted one writes to the same file.
    life = 0
    for line in _lines(path):
        if "process" in line:  # a new one: what the last one did has ended
            life += 1
            for key in open_:
                by_key[key] = replace(by_key[key], end=line["time"])
            open_ = set()
        elif "name" in line:
            key = (life, line["phase"])
            about = {name: line.get(name) for name in ("waits_for", "step")}
            by_key[key] = Phase(process, line["name"], line["time"], None, **about)
            open_.add(key)
        elif (key := (life, line["phase"])) in open_:
            open_.remove(key)
            by_key[key] = replace(by_key[key], end=line["time"])
    return list(by_key.values())


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the lines that `parallel.timeline` writes; raise UserError for an unreadable file."""
    try:
        text = read_text(path, errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{shown(path)}: {error.strerror}") from error
    for line in text.split("\n"):
        with suppress(ValueError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry, dict) and _is_sound(entry):
                yield entry


def _is_sound(entry: Mapping[str, Any]) -> bool:
    """Return whether a line has a time, and the phase or the process that it is of."""
    moment, phase, name = (entry.get(key) for key in ("time", "phase", "name"))
    if not isinstance(moment, int | float) or not 0 <= moment <= MOST_SECONDS:
        return False
    waits_for, step = entry.get("waits_for"), entry.get("step")
    if not isinstance(waits_for, str | None):
        return False
    if step is not None and (type(step) is not int or not 0 <= step <= MOST_STEPS):
        return False
    if "process" in entry:
        return True
    return type(phase) is int and ("name" not in entry or isinstance(name, str))


def rank_phases(run: RunDirectory, stage: Stage) -> dict[str, list[Phase]]:
    """Return the phases of the ranks of a stage's newest attempt."""
    directory = run.stage(stage.name)
    files = directory.job(directory.attempts()).parent.glob("timeline_*.jsonl")
    numbered = ((path.stem.removeprefix("timeline_"), path) for path in files)
    ranks = sorted((int(n), path) for n, path in numbered if n.isdecimal() and len(n) < 10)
    return {f"rank {n}": phases(path, f"rank {n}") for n, path in ranks}


def engine_phases(run: RunDirectory, stage: Stage) -> dict[str, list[Phase]]:
    """Return the phases of the engines that serve a stage: its own, or the run's."""
    stage_files = sorted(run.stage(stage.name).engines.glob("*/timeline.jsonl"))
    files = stage_files or sorted(run.engines.rglob("timeline.jsonl"))
    by_engine = {}
    for path in files:
        name = f"engine {EngineDirectory(path.parent).path.name}"
        by_engine[name] = phases(path, name)
    return by_engine


def innermost(of_process: list[Phase]) -> Phase | None:
    """Return the present phase of a process that began last; None where it is in none."""
    present = [phase for phase in of_process if phase.end is None]
    return present[-1] if present else None
