"""Where a run stands, what it looks like in peace, and random moments in it."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.end_to_end.process_tree import KILLED, tree

LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Moment:
    """When what is killed: so many `seconds` after `stage` has done `step` steps, one of the
    processes called `process`; of several, the one at the share `which` of them."""

    process: str
    stage: str
    step: int
    seconds: float
    which: float


@dataclass
class Stretch:
    """From one step of a stage to the next, or to the stage's end; step 0 is its start. And the
    kinds of process that were seen meanwhile."""

    stage: str
    step: int
    seconds: float = 0.0
    processes: set[str] = field(default_factory=set)


Timeline = list[Stretch]


class StagePosition(NamedTuple):
    """The stage that was begun last, the lines of its metrics, each of a step, and its attempt."""

    stage: str
    step: int
    attempt: int


def position(run: Path) -> StagePosition | None:
    """Where a run stands; None where no stage was begun yet."""
    try:
        lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return None
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    begun = [event for event in events if event["state"] == "running"]
    if not begun:
        return None
    stage, attempt = begun[-1]["stage"], begun[-1]["attempt"]
    metrics = run / "stages" / stage / "metrics.jsonl"
    return StagePosition(
        stage, metrics.read_bytes().count(b"\n") if metrics.exists() else 0, attempt
    )


def watch(run: Path, launched: subprocess.Popen[str]) -> Timeline:
    """The timeline of a run that nobody disturbs, seen while it goes on."""
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


def draw(timeline: Timeline, processes: Sequence[str], generator: random.Random) -> list[Moment]:
    """A moment for each of the `processes`, in the order of the run.

    Every stretch in which there is such a process is as likely as every other, else most moments
    would fall into imports.
    """
    drawn = []
    for process in processes:
        places = [place for place, each in enumerate(timeline) if process in each.processes]
        place = generator.choice(places)
        stretch = timeline[place]
        seconds = generator.uniform(0, stretch.seconds)
        moment = Moment(process, stretch.stage, stretch.step, seconds, generator.random())
        drawn.append((place, seconds, moment))
    return [moment for *_, moment in sorted(drawn, key=lambda each: each[:2])]
