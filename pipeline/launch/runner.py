"""Takes a run from where it stands to its end, and keeps the ledger of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from pipeline.errors import BraidError, reason
from pipeline.launch.attempt import attempt, close_abandoned
from pipeline.launch.forkserver import ForkServers
from pipeline.launch.launcher import Launcher, Programs, Work
from pipeline.launch.placement import ThisMachine
from pipeline.launch.processes import POLL_SECONDS
from pipeline.launch.progress import Screen
from pipeline.launch.signals import Signals, Stopped
from pipeline.run.directory import RunDirectory
from pipeline.run.gates import refuse_stopped
from pipeline.run.graph import Stage, compile_graph
from pipeline.run.ledger import Ledger
from pipeline.run.selection import chosen, refuse_missing_inputs
from pipeline.run.stale import refuse_stale
from stages.settings import RunSettings


def run_stages(
    run: RunDirectory,
    settings: RunSettings,
    console: Console,
    programs: Programs,
    only: Iterable[str] = (),
    side_by_side: int = 1,
) -> None:
    """Run every stage that is not done, or `only` some of them, so many at once at most. The caller
    holds the run's lock.

    A stage that fails takes those with it that are made from it, and no others.

    Raises:
        StaleStages: before anything is started.
        BraidError: `only` names no stage, or one that lacks what it is made from; or there are too
            few cores for so many stages at once.
        JobFailed: a stage failed; the others that do not need it are done.
        GateStopped: the same of a gate, which stopped now or before.
        Stopped: a signal asked for it.
    """
    stages = compile_graph(settings)
    close_abandoned(run, Ledger(run.ledger), stages)
    wanted = chosen(run, stages, only)
    states = refuse_stale(run, settings, wanted)
    refuse_missing_inputs(wanted, states)
    unfinished = [stage for stage in wanted if states[stage.name].state != "done"]
    with Signals() as signals, Screen(console) as screen, ExitStack() as stack:
        servers = stack.enter_context(ForkServers(run.fork_servers, settings.launch.fork_servers))
        if unfinished:  # their imports begin now, beside the first stage
            servers.of(programs.stage(run.path))
        if any(stage.needs_engine for stage in unfinished):
            servers.of(programs.engine(run.path))
        lanes = [
            stack.enter_context(Launcher(folder, settings, programs, placement, signals))
            for folder, placement in _lanes(run, settings, side_by_side, servers)
        ]
        titles = {
            stage.name: f"[{number}/{len(stages)}] {stage.name}"
            for number, stage in enumerate(stages, start=1)
        }

        def begin(stage: Stage, lane: Launcher) -> Work:
            refuse_stopped(run, [stage], states)
            yield from attempt(run, settings, stage, lane, screen, titles[stage.name])

        _Course(unfinished, begin).go(lanes)


class _Course:
    """Takes stages to their ends, each in a launcher that is free, after those it is made from."""

    def __init__(self, stages: Sequence[Stage], begin: Callable[[Stage, Launcher], Work]) -> None:
        self._waiting = list(stages)
        self._begin = begin
        self._going: dict[Launcher, tuple[Stage, Work]] = {}
        self._stopped: Stopped | None = None
        self._failures: list[Exception] = []

    def go(self, lanes: Sequence[Launcher]) -> None:
        """Raises what the first stage did that failed, when the others have ended."""
        try:
            while self._going or (self._waiting and not self._stopped):
                for lane in lanes:
                    self._fill(lane)
                for lane in list(self._going):
                    self._advance(lane)
                time.sleep(POLL_SECONDS)
        finally:
            for _, work in self._going.values():
                work.close()
        if self._stopped:
            raise self._stopped
        if self._failures:
            first, *others = self._failures
            for other in others:
                first.add_note(f"and {reason(other)}")
            raise first

    def _fill(self, lane: Launcher) -> None:
        unfinished = {stage.name for stage, _ in self._going.values()}
        unfinished |= {stage.name for stage in self._waiting}
        for stage in self._waiting:
            if (
                lane not in self._going
                and not self._stopped
                and not unfinished & {*stage.waits_for}
            ):
                self._waiting.remove(stage)
                self._going[lane] = stage, self._begin(stage, lane)
                return

    def _advance(self, lane: Launcher) -> None:
        stage, work = self._going[lane]
        try:
            next(work)
            return
        except StopIteration:
            pass
        except Stopped as stopped:
            self._stopped = stopped
        except Exception as failure:  # it is raised when the other lanes have ended
            self._failures.append(failure)
            self._leave_out_what_waits_for(stage)
        del self._going[lane]

    def _leave_out_what_waits_for(self, failed: Stage) -> None:
        lost = {failed.name}
        for stage in self._waiting:  # those before it come first
            if lost & {*stage.waits_for}:
                lost.add(stage.name)
        self._waiting = [stage for stage in self._waiting if stage.name not in lost]


def _lanes(
    run: RunDirectory, settings: RunSettings, count: int, servers: ForkServers
) -> Iterator[tuple[Path, ThisMachine]]:
    """The folder of its engines, and the cores, of each of so many launchers."""
    folders = engine_folders(run, count)
    if count == 1:
        yield folders[0], ThisMachine(settings.engine, servers=servers)
        return
    for folder, own in zip(folders, cores_side_by_side(count), strict=True):
        yield folder, ThisMachine(settings.engine, own, servers)


def engine_folders(run: RunDirectory, count: int) -> list[Path]:
    """The folder of the engines of each of so many launchers."""
    if count == 1:
        return [run.engines]
    return [run.engines / f"lane_{lane}" for lane in range(count)]


def cores_side_by_side(count: int) -> list[list[int]]:
    """The cores of each of so many stages at once. Raises BraidError where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    if (part := len(cores) // count) == 0:
        raise BraidError(
            f"--side-by-side {count} needs as many cores, and here are {len(cores)}; use fewer"
        )
    return [cores[lane * part : (lane + 1) * part] for lane in range(count)]
