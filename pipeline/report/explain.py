"""Explanations of a run.

Why a stage is in its state, how two runs differ, the graph as a drawing, a dry run, and the logs.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel.files import open_file
from pipeline.config.validate import differing_keys
from pipeline.errors import BraidError
from pipeline.launch.launcher import Programs
from pipeline.launch.runner import engine_directories
from pipeline.report.estimate import blocked, estimate, next_action
from pipeline.report.memory import largest_memory
from pipeline.report.tables import left_line, plan_table
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage
from pipeline.run.ledger import took
from pipeline.run.lineage import Manifest, read_manifest
from pipeline.run.run import Run, StageState
from pipeline.run.select import StaleStages, planned_states, stale_among
from pipeline.slurm.queue import queue_of
from pipeline.text import clock, say, shown, visible
from stages.directory import EngineDirectory, StageDirectory

LOOK_SECONDS = 0.5  # between two reads of a growing log
ASK_SECONDS = 5.0  # between two questions to Slurm's controller, which serves others too
CHUNK = 1 << 20
SRUN = "srun.log"
Differences = dict[str, tuple[Any, Any]]  # by name: here, there
DIGEST_LENGTH = 12  # characters of a digest in a message
COLOURS = {
    "done": "palegreen",
    "running": "lightblue",
    "submitted": "lightcyan",
    "failed": "lightcoral",
    "stale": "khaki",
    "pending": "white",
}


def why(run: Run, name: str) -> Iterator[str]:
    """Yield a stage's state and cause, its inputs and its history.

    Raises BraidError if the run has no such stage.
    """
    [stage] = run.chosen([name])
    states = run.states_with(queue_of(run)[0])
    yield f"{name} is {_with_cause(states[name])}"
    directory = run.stage(name)
    if checkpoint := directory.newest_checkpoint():
        yield f"  newest checkpoint: step {checkpoint.step}, {checkpoint.digest[:DIGEST_LENGTH]}"
    manifest = read_manifest(directory)
    if manifest is None:
        yield "  it never started"
    for parent in stage.inputs:
        used = manifest.parents.get(parent) if manifest else None
        checkpoint_used = f"; it used checkpoint {used[:DIGEST_LENGTH]}" if used else ""
        yield f"  from {parent}, which is {_with_cause(states[parent])}{checkpoint_used}"
    for gate in stage.after:
        yield f"  after {gate}, which is {_with_cause(states[gate])}"
    if manifest:
        yield f"  by the code of {manifest.code}"
        yield f"  with {', '.join(' '.join(each) for each in manifest.versions.items())}"
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


def difference(run: Run, other: Run) -> dict[str, Any]:
    """Return the differences of two runs: `settings`, and by stage the lineage and the output."""
    settings = differing_keys(run.settings, other.settings)
    settings.pop("name", None)
    names = dict.fromkeys(stage.name for stage in (*run.stages, *other.stages))
    stages = {name: _lineage_difference(run, other, name) for name in names}
    return {"settings": settings, "stages": {name: each for name, each in stages.items() if each}}


def difference_lines(found: dict[str, Any]) -> list[str]:
    """Return the lines of `braid diff`; none where nothing differs."""
    lines = []
    for title, block in {"settings": found["settings"], **found["stages"]}.items():
        if block:
            lines += [title, *(f"  {k}: {_text(a)} | {_text(b)}" for k, (a, b) in block.items())]
    return lines


def dot(run: Run, states: dict[str, StageState]) -> Iterator[str]:
    """Yield the graph in Graphviz's language.

    An arrow is a checkpoint that a stage loads; a bold one leads from a gate to what waits for it.
    """
    yield f"digraph {json.dumps(run.settings.name)} {{"
    yield "  rankdir=LR; node [shape=box, style=filled];"
    for stage in run.stages:
        label = f"{stage.name}\n{stage.kind}, {states[stage.name].state}"
        look = f"fillcolor={COLOURS[states[stage.name].state]}"
        if stage.kind == "gate":
            look += ", shape=diamond"
        yield f"  {json.dumps(stage.name)} [label={json.dumps(label)}, {look}];"
    for stage in run.stages:
        for name in stage.inputs:
            yield f"  {json.dumps(name)} -> {json.dumps(stage.name)}{_arrow(stage, name)};"
        for name in stage.after:
            yield f"  {json.dumps(name)} -> {json.dumps(stage.name)} [style=bold, label=gate];"
    yield "}"


class DryRun:
    """A `braid run` that changes nothing: its plan and its commands.

    Stages `reused` from another run count as done, with their ledger's cause; those of `rerun` and
    everything downstream as moved to replaced/; with `only`, other stages are left out.

    Raises:
        StaleStages: the command would refuse a stale input of a wanted stage.
    """

    def __init__(
        self,
        run: Run,
        states: Mapping[str, StageState],
        reused: Mapping[str, str],
        only: Collection[str],
        rerun: Collection[str],
    ) -> None:
        self._run = run
        self._rerun = {stage.name for stage in run.downstream(rerun)}
        self._reused = {name: cause for name, cause in reused.items() if name not in self._rerun}
        self._states = planned_states(run, states, reused, rerun)
        wanted = run.chosen(only)
        self._wanted = {stage.name for stage in wanted}
        if stale := stale_among(self._states, wanted):
            raise StaleStages(run, stale)

    def plan(self) -> str:
        """Return the plan: every stage's next action, and the time and memory that it needs."""
        run, states = self._run, self._states
        left = estimate(run, states, took(run.events), self._wanted)
        actions = next_action(run.stages, states)
        follows = {name: self._action(name, text) for name, text in actions.items()}
        table = plan_table(run, states, follows, left)
        return f"{table}\n{left_line(left)}; {largest_memory(run.settings, run.stages)}"

    def commands(self, programs: Programs, parallel: int) -> Iterator[str]:
        """Yield the command of every process that would start."""
        starting = self._starting()
        if not starting:
            yield "no command: nothing would start"
            return
        samples = any(stage.needs_engine for stage in starting)
        for directory in engine_directories(self._run, parallel):
            for index in range(self._run.settings.engine.count if samples else 0):
                job = EngineDirectory(directory / str(index)).job
                yield f"engine {index}: {shlex.join(programs.engine(job))}"
        yield f"every stage, as ranks 0 to {self._run.settings.layout.ranks - 1}:"
        for stage in starting:
            of_stage = self._run.stage(stage.name)
            attempts = 0 if stage.name in self._rerun else of_stage.attempts()
            yield f"  {shlex.join(programs.stage(of_stage.job(attempts + 1)))}"

    def _action(self, name: str, text: str) -> str:
        """Return a stage's next action under this command's options."""
        if name in self._reused:
            return f"is {self._reused[name]}"
        aside = name in self._rerun and self._run.stage(name).path.exists()
        if name not in self._wanted and self._states[name].state != "done":
            return "is put aside, and left out by --only" if aside else "is left out by --only"
        return f"is put aside, and {text}" if aside else text

    def _starting(self) -> list[Stage]:
        cannot = blocked(self._run.stages, self._states)
        return [
            stage
            for stage in self._run.stages
            if stage.name in self._wanted
            and stage.name not in cannot
            and self._states[stage.name].state in ("pending", "failed")
        ]


def print_log(
    directory: StageDirectory,
    name: str,
    goes_on: Callable[[], bool] | None,
    output: Callable[[], Path | None] = lambda: None,
) -> None:
    """Print the `output` of a Slurm job, or without one a log of the newest attempt.

    While the stage `goes_on`, print what the log gains; a new attempt's log follows the last one's.

    Raises:
        BraidError: there is no such log, and none will come.
    """

    def find() -> Path:
        return output() or _log(directory, name)

    log = find()
    if log.name == name and log.exists() and not log.stat().st_size:
        say(
            f"{shown(log)} is empty: ranks print errors only; for progress see "
            f"{shown(directory.metrics)} and `braid status`",
            flush=True,
        )
    _print(_grown(find, goes_on))


def print_file(log: Path, goes_on: Callable[[], bool] | None) -> None:
    """Print a log that no attempt owns, such as an engine's; raise BraidError if there is none."""
    _print(_grown(lambda: log, goes_on))


def _print(texts: Iterator[str]) -> None:
    for text in texts:
        sys.stdout.write(visible(text, keep="\n\t\r"))
        sys.stdout.flush()


def _grown(find: Callable[[], Path], goes_on: Callable[[], bool] | None) -> Iterator[str]:
    log = _Growing(find())
    more, ask = goes_on is not None, 0.0
    while True:
        if goes_on is not None and time.monotonic() >= ask:
            more = goes_on()  # before reading, so that the last lines are not missed
            ask = time.monotonic() + ASK_SECONDS
        newest = find()  # before reading, too: once there is another log, this one is complete
        yield from log.read()
        if newest != log.path and newest.exists():
            yield from log.rest()
            if log.offset:
                yield f"--- {shown(newest)} ---\n"
            log = _Growing(newest)
            yield from log.read()
        if not more:
            break
        time.sleep(LOOK_SECONDS)
    if not log.path.exists():
        known = sorted(path.name for path in log.path.parent.glob("*.log"))
        there = f"; there are {', '.join(known)}" if known else ""
        raise BraidError(f"there is no {shown(log.path)}{there}")
    yield from log.rest()


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

    def rest(self) -> Iterator[str]:
        """Yield the replacement of a character that was never completed."""
        yield self._decoder.decode(b"", final=True)


def _log(directory: StageDirectory, name: str) -> Path:
    """Return a log of the newest attempt, or srun's, which says why no rank has started."""
    attempt = directory.job(max(directory.attempts(), 1)).parent
    log, srun = attempt / name, attempt / SRUN
    return srun if srun.exists() and not log.exists() else log


def _arrow(stage: Stage, name: str) -> str:
    if name == stage.parent:
        return ""
    return (
        " [style=dashed, label=teaches]" if name in stage.teachers.values() else " [style=dotted]"
    )


def _with_cause(state: StageState) -> str:
    return f"{state.state}: {state.cause}" if state.cause else state.state


def _lineage_difference(run: RunDirectory, other: RunDirectory, name: str) -> Differences:
    """Return the differences of a stage other than its settings."""
    ours, theirs = (read_manifest(each.stage(name)) for each in (run, other))
    if ours is None or theirs is None:
        return {"started": (ours is not None, theirs is not None)} if ours is not theirs else {}
    newest = "newest checkpoint", _newest(run, name), _newest(other, name)
    found = [*_pairs(ours, theirs), newest]
    return {what: (here, there) for what, here, there in found if here != there}


def _newest(run: RunDirectory, name: str) -> str | None:
    found = run.stage(name).newest_checkpoint()
    return f"step {found.step}, {found.digest[:DIGEST_LENGTH]}" if found else None


def _pairs(ours: Manifest, theirs: Manifest) -> Iterator[tuple[str, Any, Any]]:
    yield "code", ours.code, theirs.code
    yield "layout", ours.layout, theirs.layout
    for title, here, there in (
        ("version of", ours.versions, theirs.versions),
        ("checkpoint of", _short(ours.parents), _short(theirs.parents)),
        ("files of", _short(ours.files), _short(theirs.files)),
    ):
        for key in dict.fromkeys([*here, *there]):
            yield f"{title} {key}", here.get(key), there.get(key)


def _short(digests: dict[str, str | None]) -> dict[str, str]:
    return {name: digest[:DIGEST_LENGTH] for name, digest in digests.items() if digest}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
