"""The runner, which runs a run's stages and records each attempt in the ledger."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from rich.console import Console

from parallel.errors import UserError
from parallel.files import read_text
from pipeline.estimate.capacity import machine_shares
from pipeline.launch.launcher import JobFailed, Launcher, Work
from pipeline.launch.placement import ForkServers, Programs, ThisMachine
from pipeline.launch.processes import POLL_SECONDS, Signals, Stopped
from pipeline.launch.progress import Screen
from pipeline.run.directory import LOCK_TIMEOUT_SECONDS
from pipeline.run.gates import check_stopped, ending, report_verdict
from pipeline.run.graph import Stage, gate_of
from pipeline.run.ledger import State, latest
from pipeline.run.lineage import write_manifest
from pipeline.run.run import KILLED, Run, missing_output
from pipeline.run.select import check_dependencies, check_stale
from pipeline.text import reason
from stages.directory import StageDirectory
from stages.settings import StageJob


def run_stages(
    run: Run, console: Console, programs: Programs, only: Iterable[str] = (), parallel: int = 1
) -> None:
    """Run every stage that is not done, or `only` some of them, at most `parallel` at a time.

    The caller holds the run's lock. A failed stage blocks only its dependents.

    Raises:
        StaleStages: before anything is started.
        UserError: `only` names no stage, or one with missing dependencies; or this machine cannot
            hold `parallel` stages: `machine_shares`.
        JobFailed: a stage failed; the stages that do not depend on it are done.
        GateStopped: a gate stopped, now or before; likewise.
        Stopped: a stop signal was received.
    """
    close_killed_attempts(run, run.stages)
    stages = run.chosen(only)
    check_stale(run, stages)
    states = run.states
    check_dependencies(stages, states)
    unfinished = [stage for stage in stages if states[stage.name].state != "done"]
    with Signals() as signals, Screen(console) as screen, ExitStack() as stack:
        servers = stack.enter_context(
            ForkServers(run.fork_servers, run.settings.launch.fork_servers)
        )
        if unfinished:  # start the servers' imports now, in parallel with the first stage
            servers.of(programs.stage(run.path))
        if any(stage.needs_engine for stage in unfinished):
            servers.of(programs.engine(run.path))
        shares = machine_shares(parallel, run.settings, unfinished)
        slots = []
        for directory, share in zip(run.engines_of_slots(parallel), shares, strict=True):
            placement = ThisMachine(run.settings.engine, share.cores, servers, share.gpus)
            launcher = Launcher(directory, run.settings, programs, placement, signals)
            slots.append(stack.enter_context(launcher))
        titles = {
            stage.name: f"[{number}/{len(run.stages)}] {stage.name}"
            for number, stage in enumerate(run.stages, start=1)
        }

        def start(stage: Stage, slot: Launcher) -> Work:
            check_stopped(run, [stage], states)
            yield from attempt(run, stage, slot, screen, titles[stage.name])

        StageScheduler(unfinished, start).run(slots)


class StageScheduler:
    """A scheduler of stages: each starts in a free slot once its dependencies have ended."""

    def __init__(self, stages: Sequence[Stage], start: Callable[[Stage, Launcher], Work]) -> None:
        self._waiting = list(stages)
        self._start = start
        self._running: dict[Launcher, tuple[Stage, Work]] = {}
        self._stopped: Stopped | None = None
        self._failures: list[Exception] = []

    def run(self, slots: Sequence[Launcher]) -> None:
        """Run all stages; raise the first error once the other stages have ended."""
        try:
            while self._running or (self._waiting and not self._stopped):
                for slot in slots:
                    self._fill(slot)
                for slot in list(self._running):
                    self._advance(slot)
                time.sleep(POLL_SECONDS)
        finally:
            for _, work in self._running.values():
                work.close()
        if self._stopped:
            raise self._stopped
        if self._failures:
            first, *others = self._failures
            for other in others:
                first.add_note(f"and {reason(other)}")
            raise first

    def _fill(self, slot: Launcher) -> None:
        if slot in self._running or self._stopped:
            return
        unfinished = {stage.name for stage, _ in self._running.values()}
        unfinished |= {stage.name for stage in self._waiting}
        for stage in self._waiting:
            if not unfinished & {*stage.waits_for}:
                self._waiting.remove(stage)
                self._running[slot] = stage, self._start(stage, slot)
                return

    def _advance(self, slot: Launcher) -> None:
        stage, work = self._running[slot]
        try:
            next(work)
            return
        except StopIteration:
            pass
        except Stopped as stopped:
            self._stopped = stopped
        except Exception as failure:  # raised when the other slots have ended
            self._failures.append(failure)
            # Its dependents will never start; the stages of other branches still run.
            lost = {stage.name}
            for waiting in self._waiting:  # dependencies come first
                if lost & {*waiting.waits_for}:
                    lost.add(waiting.name)
            self._waiting = [waiting for waiting in self._waiting if waiting.name not in lost]
        del self._running[slot]


def attempt(
    run: Run,
    stage: Stage,
    launcher: Launcher,
    screen: Screen,
    title: str,
    slurm_job: str | None = None,
    lock_timeout: float = LOCK_TIMEOUT_SECONDS,
) -> Work:
    """Run one attempt at a stage, yielding while it waits.

    Another launcher that holds the stage has `lock_timeout` seconds to end.

    Raises:
        StaleStages: the settings or inputs of its output, or of an input, changed.
        JobFailed: the attempt failed.
        Stopped: a stop signal was received.
        RunLocked: another launcher holds the stage.
    """
    with run.lock_stage(stage.name, lock_timeout, launcher.check):
        # The launcher that held the lock may have written to the stage since the states were read.
        close_killed_attempts(run, [stage])
        check_stale(run, [stage])
        if run.states[stage.name].state == "done":
            return
        with (
            screen.watching(title, stage.steps, run.stage(stage.name).metrics) as view,
            _recorded(run, stage, slurm_job) as number,
        ):
            job = stage_job(run, stage, number)
            note = partial(run.ledger.append, stage.name, "running", attempt=number, job=slurm_job)
            try:
                yield from launcher.execute(job, view, note)
            except JobFailed as failed:
                view.say(f"failed: {failed.failure.cause}")
                raise
        report_verdict(run, stage, view.say)
        if stage.declared.collects:
            report_kept(run.stage(stage.name), view.say)


def report_kept(directory: StageDirectory, say: Callable[[str], None]) -> None:
    """Report how many responses a finished stage kept; `say` takes one line."""
    counts = json.loads(read_text(directory.collection))
    dropped = sorted(counts["dropped"].items(), key=lambda pair: -pair[1])
    reasons = "; dropped: " + ", ".join(f"{count} by {why}" for why, count in dropped)
    say(f"kept {counts['rows']} of {counts['drawn']} responses{reasons if dropped else ''}")


def stage_job(run: Run, stage: Stage, attempt: int) -> StageJob:
    """Return the job of one attempt at a stage; a launcher adds the addresses of its engines."""
    directory, settings = run.stage(stage.name), run.settings
    if stage.declared.judges:
        overrides = gate_of(stage, settings).model_dump(include={"problems", "samples_per_problem"})
        evaluation = settings.evaluation.model_copy(update=overrides)
        settings = settings.model_copy(update={"evaluation": evaluation})
    return StageJob(
        stage=stage.name,
        kind=stage.kind,
        block=stage.block,
        domain=stage.domain,
        domains=list(stage.domains),
        seeded_as=stage.seeded_as,
        directory=directory.path.absolute(),
        attempt=attempt,
        parent=run.model_path(stage.parent) if stage.parent else None,
        teachers={key: run.model_path(name) for key, name in stage.teachers.items()},
        models={key: run.model_path(name) for key, name in stage.models.items()},
        data={key: run.stage(name).collected.absolute() for key, name in stage.data.items()},
        evaluated_on=stage.evaluated_on,
        output=directory.exported.absolute() if stage.declared.exports else None,
        samples=stage.needs_engine,
        settings=settings,
    )


@contextmanager
def _recorded(run: Run, stage: Stage, slurm_job: str | None) -> Iterator[int]:
    """Write a new attempt's manifest, and record its start and end in the ledger."""
    directory, ledger = run.stage(stage.name), run.ledger
    number = directory.attempts() + 1
    directory.verdict.unlink(missing_ok=True)  # it belongs to an earlier attempt
    write_manifest(directory, run.lineage(stage))
    ledger.append(stage.name, "running", start_of(directory), number, job=slurm_job)
    started = time.monotonic()
    try:
        yield number
        if missing := missing_output(stage, directory, directory.newest_checkpoint()):
            raise UserError(f"stage {stage.name} ended with exit status 0, but {missing}")
        cause = ending(run, stage)
    except BaseException as error:
        state: State = "pending" if isinstance(error, Stopped) else "failed"
        why = "its launcher was interrupted"
        if isinstance(error, Exception):
            why = error.failure.cause if isinstance(error, JobFailed) else reason(error)
        try:
            ledger.append(stage.name, state, why, number, time.monotonic() - started, slurm_job)
        except OSError as unwritten:
            error.add_note(f"the ledger does not record this: {reason(unwritten)}")
        raise
    ledger.append(stage.name, "done", cause, number, time.monotonic() - started)


def start_of(directory: StageDirectory) -> str:
    """Return where a new attempt resumes from, in words."""
    if checkpoint := directory.newest_checkpoint():
        return f"from step {checkpoint.step}"
    if drawn_parts := len(list(directory.drawn.glob("*.parquet"))):
        return f"from {drawn_parts} drawn parts"
    measured = len(list(directory.measured.glob("*.json")))
    return f"from {measured} measured models" if measured else "from the start"


def close_killed_attempts(run: Run, stages: Iterable[Stage]) -> None:
    """Record as failed each attempt whose launcher was killed before it could record the end.

    The attempt counts up to its last sign of life, which is the time of its job's file.
    """
    events = run.refresh().events
    newest = latest(events)
    for stage in stages:
        event = newest.get(stage.name)
        if event is not None and event.state == "running":
            job = run.stage(event.stage).job(event.attempt)
            # The newest event may be a notice, written long after the attempt's first event.
            first_event = event
            for earlier in reversed([past for past in events if past.stage == event.stage]):
                if (earlier.state, earlier.attempt) != ("running", event.attempt):
                    break
                first_event = earlier
            seen = job.stat().st_mtime if job.exists() else first_event.timestamp
            seconds = max(0.0, seen - first_event.timestamp)
            run.ledger.append(event.stage, "failed", KILLED, event.attempt, seconds)
    run.refresh()
