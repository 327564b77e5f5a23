"""The position of a run, the timeline of an undisturbed run, and random moments in it."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tests.end_to_end.process_tree import KILLED, tree

LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Moment:
    """A time and a process to kill: `seconds` after `stage` has done `step` steps.

    `process` names a kind of process; `which`, from 0 to 1, chooses among several.
    """

    process: str
    stage: str
    step: int
    seconds: float
    which: float


@dataclass
class Stretch:
    """The time from a step of a stage to the next, or to its end, and the processes seen in it.

    Step 0 is the stage's start.
    """

    stage: str
    step: int
    seconds: float = 0.0
    processes: set[str] = field(default_factory=set)


Timeline = list[Stretch]


class StagePosition(NamedTuple):
    """The newest stage that started, its finished steps, and its attempt."""

    stage: str
    step: int
    attempt: int


def position(run: Path) -> StagePosition | None:
    """Return a run's position; None before its first stage starts."""
    try:
        lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return None
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    started = [event for event in events if event["state"] == "running"]
    if not started:
        return None
    stage, attempt = started[-1]["stage"], started[-1]["attempt"]
    metrics = run / "stages" / stage / "metrics.jsonl"
    return StagePosition(
        stage, metrics.read_bytes().count(b"\n") if metrics.exists() else 0, attempt
    )


def watch(run: Path, launched: subprocess.Popen[str]) -> Timeline:
    """Watch an undisturbed run to its end, and return its timeline."""
    timeline: Timeline = []
    before = time.monotonic()
    while launched.poll() is None:
        here, now = position(run), time.monotonic()
        if here and (not timeline or here[:2] != (timeline[-1].stage, timeline[-1].step)):
            timeline.append(Stretch(here.stage, here.step))
        elif timeline:
            timeline[-1].seconds += now - before
        before = now
        if timeline:
            alive = tree([launched.pid])
            timeline[-1].processes |= {name for name, find in KILLED.items() if find(alive)}
        time.sleep(LOOK_SECONDS)
    return timeline


def recorded(run: Path) -> Timeline:
    """Return the timeline of a finished run by its files, as if every process lived throughout.

    They do not say which processes a stage had; a kill of one that it had not is not made.
    """
    timeline: Timeline = []
    for event in map(json.loads, (run / "ledger.jsonl").read_text().splitlines()):
        if event["state"] != "done":
            continue
        end = datetime.fromisoformat(event["time"]).timestamp()
        metrics = run / "stages" / event["stage"] / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        steps = [json.loads(line)["time"] for line in lines]
        for step, (since, until) in enumerate(pairwise([end - event["seconds"], *steps, end])):
            timeline.append(Stretch(event["stage"], step, until - since, set(KILLED)))
    return timeline


def draw(timeline: Timeline, processes: Sequence[str], generator: random.Random) -> list[Moment]:
    """Draw a moment for each of the `processes`, and return them in the run's order.

    Every stage that has such a process is equally likely, and in it every such stretch: weighted by
    steps, most moments would fall into the longest training, and by time into imports.
    """
    drawn = []
    for process in processes:
        places = [place for place, each in enumerate(timeline) if process in each.processes]
        stage = generator.choice(list(dict.fromkeys(timeline[place].stage for place in places)))
        place = generator.choice([place for place in places if timeline[place].stage == stage])
        stretch = timeline[place]
        seconds = generator.uniform(0, stretch.seconds)
        moment = Moment(process, stretch.stage, stretch.step, seconds, generator.random())
        drawn.append((place, seconds, moment))
    return [moment for *_, moment in sorted(drawn, key=lambda each: each[:2])]
