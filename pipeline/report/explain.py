"""Explanations of a run: why a stage is in its state, and its logs."""

from __future__ import annotations

import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from parallel.files import open_file
from pipeline.run.graph import Stage
from pipeline.run.lineage import DIGEST_LENGTH, read_manifest
from pipeline.run.run import Run, StageState
from pipeline.slurm.queue import states_now
from pipeline.text import clock, say, shown, visible
from stages.directory import StageDirectory

LOOK_SECONDS = 0.5  # between two reads of a growing log
ASK_SECONDS = 5.0  # between two questions to Slurm's controller, which serves others too
CHUNK = 1 << 20
SRUN = "srun.log"


def why(run: Run, name: str) -> Iterator[str]:
    """Yield a stage's state and cause, its inputs and its history.

    Raises UserError if the run has no such stage.
    """
    [stage] = run.chosen([name])
    states = states_now(run)
    yield f"{name} is {_with_cause(states[name])}"
    directory = run.stage(name)
    if checkpoint := directory.newest_checkpoint():
        yield f"  newest checkpoint: step {checkpoint.step}, {checkpoint.digest[:DIGEST_LENGTH]}"
    manifest = read_manifest(directory)
    if manifest is None and states[name].state != "stale":  # else it is missing or damaged
        yield "  it never started"
    for parent in stage.inputs:
        used = manifest.parents.get(parent) if manifest else None
        checkpoint_used = f"; it used checkpoint {used[:DIGEST_LENGTH]}" if used else ""
        yield f"  from {parent}, which is {_with_cause(states[parent])}{checkpoint_used}"
    for gate in stage.after:
        yield f"  after {gate}, which is {_with_cause(states[gate])}"
    if manifest:
        yield f"  by the code of {manifest.code}"
        yield f"  with {', '.join(' '.join(package) for package in manifest.versions.items())}"
    for event in run.events:
        if event.stage == name:
            after = f" after {clock(event.seconds)}" if event.seconds is not None else ""
            yield f"  {event.time}  attempt {event.attempt}: {event.state}{after}: {event.cause}"


def why_json(run: Run, stage: Stage, states: Mapping[str, StageState]) -> dict[str, Any]:
    """Return the explanation of a stage that `braid why --json` prints."""
    manifest = read_manifest(run.stage(stage.name))
    newest = run.stage(stage.name).newest_checkpoint()
    used = manifest.parents if manifest else {}
    return {
        "stage": stage.name,
        **asdict(states[stage.name]),
        "checkpoint": {"step": newest.step, "digest": newest.digest} if newest else None,
        "inputs": {
            name: {"state": states[name].state, "digest": used.get(name)} for name in stage.inputs
        },
        "after": {name: states[name].state for name in stage.after},
        "code": manifest.code if manifest else None,
        "versions": manifest.versions if manifest else {},
        "events": [asdict(event) for event in run.events if event.stage == stage.name],
    }


def print_log(
    directory: StageDirectory,
    name: str,
    is_running: Callable[[], bool] | None,
    output: Callable[[], Path | None] = lambda: None,
) -> None:
    """Print the `output` of a Slurm job, or without one a log of the newest attempt.

    While the stage `is_running`, print what the log gains; the log of a new attempt follows.

    Raises:
        UserError: there is no such log, and none will come.
    """

    def find() -> Path:
        if slurm := output():
            return slurm
        attempt = directory.job(max(directory.attempts(), 1)).parent
        log, srun = attempt / name, attempt / SRUN  # srun's says why no rank has started
        return srun if srun.exists() and not log.exists() else log

    log = find()
    if log.name == name and log.exists() and not log.stat().st_size:
        say(
            f"{shown(log)} is empty: ranks print errors only; for progress see "
            f"{shown(directory.metrics)} and `braid status`",
            flush=True,
        )
    print_growing(find, is_running)


def print_growing(find: Callable[[], Path], is_running: Callable[[], bool] | None) -> None:
    """Print the log that `find` names; raise UserError if there is none, and none will come."""
    for text in _grown(find, is_running):
        sys.stdout.write(visible(text, keep="\n\t\r"))
        sys.stdout.flush()


def _grown(find: Callable[[], Path], is_running: Callable[[], bool] | None) -> Iterator[str]:
    log = _Growing(find())
    more, ask = is_running is not None, 0.0
    while True:
        if is_running is not None and time.monotonic() >= ask:
            more = is_running()  # before reading, so that the last lines are not missed
            ask = time.monotonic() + ASK_SECONDS
        newest = find()  # before reading, too: once there is another log, this one is complete
        yield from log.read()
        if newest != log.path and newest.exists():
            yield log.rest()
            if log.offset:
                yield f"--- {shown(newest)} ---\n"
            log = _Growing(newest)
            yield from log.read()
        if not more:
            break
        time.sleep(LOOK_SECONDS)
    if not log.path.exists():
        names = sorted(path.name for path in log.path.parent.glob("*.log"))
        there = f"; there are {', '.join(names)}" if names else ""
        raise UserError(f"there is no {shown(log.path)}{there}")
    yield log.rest()


class _Growing:
    """A log, read while it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        # A write may end within a character of several bytes.
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> Iterator[str]:
        """Yield the text written since the last call; nothing while there is no file."""
        if not self.path.exists():
            return
        with open_file(self.path) as file:
            file.seek(self.offset)
            while chunk := file.read(CHUNK):
                self.offset += len(chunk)
                yield self._decoder.decode(chunk)

    def rest(self) -> str:
        """Return the replacement of a character that was never completed."""
        return self._decoder.decode(b"", final=True)


def _with_cause(state: StageState) -> str:
    separator = ", " if state.state == "running" else ": "  # a job's place, or the first step
    return f"{state.state}{separator}{state.cause}" if state.cause else state.state
