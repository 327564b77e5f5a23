"""A run's processes: what fails, what is said of it, and that nothing is left behind."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich.console import Console

from parallel.errors import ERROR_MARK, UserError
from pipeline.launch import heartbeats
from pipeline.launch.launcher import JobFailed, first_cause
from pipeline.launch.processes import Child, wait_for_all
from pipeline.launch.runner import run_stages, stage_job
from pipeline.run.directory import RunDirectory, RunLocked
from pipeline.run.graph import compile_graph
from pipeline.run.ledger import Ledger, State
from pipeline.run.run import Run
from pipeline.run.select import StaleStages
from stages.settings import RunSettings
from tests.awaiting import PATIENCE_SECONDS, is_alive, wait_until
from tests.pipeline.fake_launcher import fake_programs, launch

STAGES = ["cold_start", "experts.sums", "experts.words", "merge", "evaluate", "export"]


def go(
    run: RunDirectory,
    settings: RunSettings,
    actions: dict[str, dict[str, str]] | None = None,
    engine: str = "wait",
    console: Console | None = None,
) -> None:
    with run.lock():
        programs = fake_programs(actions or {}, engine)
        run_stages(Run(run.path, settings), console or Console(quiet=True), programs)


def states(run: RunDirectory, settings: RunSettings) -> list[str]:
    return [state.state for state in Run(run.path, settings).states.values()]


def started(run: RunDirectory) -> list[str]:
    return [event.stage for event in run.ledger.events() if event.state == "running"]


def hanging_pids(run: RunDirectory, stage: str, ranks: int = 2) -> list[int]:
    """Return the processes of a hanging stage and of the engine, once all are up."""
    files = [run.stage(stage).path / f"pid_{rank}" for rank in range(ranks)]
    files.append(run.engine(0).path / "starts")
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def test_a_run_goes_through_every_stage_once(run: RunDirectory, settings: RunSettings) -> None:
    go(run, settings)
    assert states(run, settings) == ["done"] * 6
    assert started(run) == STAGES
    assert len((run.engine(0).path / "starts").read_text().split()) == 1
    go(run, settings)
    assert started(run) == STAGES

    Run(run.path, settings).write_results()
    results = json.loads(run.results.read_text())
    assert list(results["models"]) == ["cold_start", "experts.sums", "experts.words", "merge"]
    assert results["models"]["merge"]["sums"]["n"] == 400
    assert list(results["minutes"]) == STAGES


def test_a_rank_that_dies_ends_the_ranks_that_hang(
    run: RunDirectory, settings: RunSettings
) -> None:
    with pytest.raises(JobFailed) as caught:
        go(run, settings, {"experts.sums": {"0": "hang_deaf", "1": "break_down"}})
    assert "stage experts.sums failed: rank 1 ended with exit status 3" in str(caught.value)
    assert "attempt_1/rank_1.log" in str(caught.value)
    assert "    | ValueError: broken" in str(caught.value)
    assert not is_alive(int((run.stage("experts.sums").path / "pid_0").read_text()))
    assert states(run, settings) == ["done", "failed", "done", *["pending"] * 3]

    go(run, settings)
    assert started(run) == [
        "cold_start",
        "experts.sums",
        "experts.words",
        "experts.sums",
        *STAGES[3:],
    ]


def with_hang_timeout(settings: RunSettings, seconds: int) -> RunSettings:
    launch = settings.launch.model_copy(update={"hang_timeout_seconds": seconds})
    return settings.model_copy(update={"launch": launch})


def test_a_stopped_rank_is_named_and_counts_as_lost(
    run: RunDirectory, settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that computes for as long, and waits for the other, is neither named nor blamed."""
    monkeypatch.setattr(heartbeats, "LOOK_SECONDS", 0.1)
    started = time.monotonic()
    with pytest.raises(JobFailed) as caught:
        actions = {"cold_start": {"0": "compute_long", "1": "be_stopped"}}
        go(run, with_hang_timeout(settings, 8), actions)
    failure = caught.value.failure
    assert failure.cause == (
        "rank 1 gave no sign of life for 8 s (launch.hang_timeout_seconds): stopped, or on a "
        "machine that hangs"
    )
    assert failure.lost  # so a job of Slurm starts again
    assert failure.log.name == "rank_1.log"
    assert time.monotonic() - started >= 8
    assert not is_alive(int((run.stage("cold_start").path / "pid_0").read_text()))
    assert not [*run.stage("cold_start").job(1).parent.glob("alive_*")]


class SilentRank:
    """A clock that a test sets; one `file` of a heartbeat beats or is silent with it."""

    def __init__(self, watched: heartbeats.Heartbeats, file: Path) -> None:
        self.watched, self.file, self.now = watched, file, 1000.0
        self.watched._looked = self.now

    def passes(self, seconds: float, *, beating: bool, every: float = 10.0) -> bool:
        """Return whether a rank is found silent, at looks `every` N seconds."""
        end = self.now + seconds
        while self.now < end:
            self.now += every
            if beating:
                self.file.touch()
                os.utime(self.file, (self.now, self.now))
            if self.watched.failure() is not None:
                return True
        return False


@pytest.fixture
def clock(run: RunDirectory, settings: RunSettings, monkeypatch: pytest.MonkeyPatch) -> SilentRank:
    job = stage_job(Run(run.path, settings), compile_graph(settings)[0], 1)
    file = job.files.heartbeat(1, 0)
    file.parent.mkdir(parents=True)
    found = SilentRank(heartbeats.Heartbeats(job), file)
    monkeypatch.setattr(heartbeats.time, "monotonic", lambda: found.now)
    return found


def test_a_rank_counts_from_its_first_heartbeat_until_it_ends(clock: SilentRank) -> None:
    assert not clock.passes(3600, beating=False)  # imports, from a slow disk
    assert not clock.passes(3600, beating=True)
    assert not clock.passes(290, beating=False)
    assert clock.passes(30, beating=False)
    clock.file.unlink()
    assert not clock.passes(3600, beating=False)


def test_a_launcher_that_was_stopped_itself_blames_nobody(clock: SilentRank) -> None:
    assert not clock.passes(60, beating=True)
    assert not clock.passes(3600, beating=False, every=3600)  # Ctrl-Z, or a disk that was away
    assert not clock.passes(290, beating=False)
    assert clock.passes(30, beating=False)


def test_a_disk_that_does_not_answer_silences_nobody(clock: SilentRank) -> None:
    assert not clock.passes(60, beating=True)
    clock.file.unlink()
    clock.file.mkdir()  # its reader gets an OSError
    assert not clock.passes(3600, beating=False)


def test_a_disk_may_fail_to_answer_before_the_first_heartbeat(clock: SilentRank) -> None:
    clock.file.mkdir()
    assert not clock.passes(60, beating=False)
    clock.file.rmdir()
    assert not clock.passes(60, beating=True)
    assert clock.passes(320, beating=False)


def test_every_stage_that_fails_is_told(run: RunDirectory, settings: RunSettings) -> None:
    fail = {"1": "break_down"}
    with pytest.raises(JobFailed, match=r"stage experts\.sums failed: rank 1 ended") as caught:
        go(run, settings, {"experts.sums": fail, "experts.words": fail})
    [note] = caught.value.__notes__
    assert note.startswith("and stage experts.words failed: rank 1 ended with exit status 3")


def test_stages_run_side_by_side_on_cores_of_their_own(
    run: RunDirectory, settings: RunSettings
) -> None:
    together = {"0": "meet_the_other_expert"}
    actions = {"experts.sums": together, "experts.words": together}
    with run.lock():
        programs = fake_programs(actions)
        run_stages(Run(run.path, settings), Console(quiet=True), programs, parallel=2)
    assert states(run, settings) == ["done"] * 6
    where = [
        json.loads((run.stage(f"experts.{each}").path / "cores").read_text())
        for each in ("sums", "words")
    ]
    assert all(where)
    assert not {*where[0]} & {*where[1]}
    engines = [(run.engines / f"slot_{slot}" / "0" / "starts").exists() for slot in (0, 1)]
    assert engines == [True, True]


def test_more_stages_at_once_than_cores_are_refused(
    run: RunDirectory, settings: RunSettings
) -> None:
    with run.lock(), pytest.raises(UserError, match="--parallel 1000 needs 1000 CPU cores"):
        run_stages(Run(run.path, settings), Console(quiet=True), fake_programs({}), parallel=1000)


def test_a_rank_that_lost_the_other_is_not_blamed(run: RunDirectory, settings: RunSettings) -> None:
    with pytest.raises(JobFailed, match="rank 1 ended with exit status 3"):
        go(run, settings, {"cold_start": {"0": "lose_the_other", "1": "break_down"}})


@pytest.mark.parametrize(
    ("earlier", "later", "explained_by"),
    [
        ("exit(3)", "exit(4)", "earlier"),
        ("exit(3)", f"exit({ERROR_MARK + 'how to fix it'!r})", "later"),
        ("exit(3)", "os.kill(os.getpid(), 9)", "later"),
        ("exit('RuntimeError: Connection closed by peer')", "exit(4)", "later"),
        ("exit('RuntimeError: Connection reset by peer')", "exit(4)", "later"),
    ],
)
def test_one_failure_explains_the_others(
    tmp_path: Path, earlier: str, later: str, explained_by: str
) -> None:
    ranks = {
        name: Child(
            name, [sys.executable, "-c", f"import os; {program}"], tmp_path / f"{name}.log", {}
        )
        for name, program in {"later": later, "earlier": earlier}.items()
    }
    failed = list(ranks.values())
    wait_for_all(failed, seconds=PATIENCE_SECONDS)
    assert first_cause(failed, failed_first=[ranks["earlier"]]) == ranks[explained_by].failure()


def test_a_rank_that_is_killed_is_named(run: RunDirectory, settings: RunSettings) -> None:
    with pytest.raises(JobFailed, match="rank 0 was killed by SIGKILL"):
        go(run, settings, {"cold_start": {"0": "be_killed", "1": "break_down"}})


def test_the_stage_s_own_reason_is_shown_alone(run: RunDirectory, settings: RunSettings) -> None:
    with pytest.raises(JobFailed) as caught:
        go(run, settings, {"cold_start": {"0": "break_down", "1": "say_why"}})
    assert "cold_start failed: domain chain_sum has no prompts\n" in str(caught.value)
    assert "|" not in str(caught.value)
    assert run.ledger.events()[-1].cause == "domain chain_sum has no prompts"


def test_what_a_stage_wants_known_is_shown_and_kept(
    run: RunDirectory, settings: RunSettings
) -> None:
    console = Console(file=io.StringIO(), width=200)
    go(run, settings, {"merge": {"1": "warn_and_work"}}, console=console)
    said = [line for line in console.file.getvalue().splitlines() if "step_" in line]
    assert said == ["[4/6] merge  step_5 is damaged", "[4/6] merge  it took step_4"]
    kept = [event for event in run.ledger.events() if event.stage == "merge"]
    assert [(event.state, event.cause) for event in kept] == [
        ("running", "from the start"),
        ("running", "step_5 is damaged"),
        ("running", "it took step_4"),
        ("done", "finished"),
    ]


def test_a_stage_that_is_done_early_says_why_and_is_not_repeated(
    run: RunDirectory, settings: RunSettings
) -> None:
    go(run, settings, {"experts.sums": {"0": "end_early"}})
    assert states(run, settings) == ["done"] * 6
    kept = [event for event in run.ledger.events() if event.stage == "experts.sums"]
    assert (kept[-1].state, kept[-1].cause) == ("done", "good enough at step 1")
    before = started(run)
    go(run, settings)
    assert started(run) == before


def full_disk(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/full")


def test_what_keeps_a_stage_from_starting_is_its_cause(
    run: RunDirectory, settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.launch.launcher.write_stage_job", full_disk)
    with pytest.raises(OSError, match="No space left"):
        go(run, settings)
    event = run.ledger.events()[-1]
    assert (event.state, event.cause) == ("failed", "/runs/full: No space left on device")


def test_a_ledger_that_cannot_be_written_hides_no_failure(
    run: RunDirectory, settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Ledger.append

    def fail_at_the_end(ledger: Ledger, stage: str, state: State, *rest: Any, **more: Any) -> None:
        if state == "failed":
            full_disk()
        append(ledger, stage, state, *rest, **more)

    monkeypatch.setattr(Ledger, "append", fail_at_the_end)
    with pytest.raises(JobFailed, match="rank 1 ended with exit status 3") as caught:
        go(run, settings, {"cold_start": {"1": "break_down"}})
    assert caught.value.__notes__ == [
        "the ledger does not record this: /runs/full: No space left on device"
    ]


def test_an_engine_that_dies_at_start_fails_the_stage(
    run: RunDirectory, settings: RunSettings
) -> None:
    with pytest.raises(JobFailed) as caught:
        go(run, settings, {"experts.sums": {"0": "hang", "1": "hang"}}, engine="die")
    assert "stage experts.sums failed: engine 0 ended with exit status 1" in str(caught.value)
    assert "engine/0/engine.log" in str(caught.value)
    assert "    | RuntimeError: not enough memory for the cache" in str(caught.value)
    # Once for each of the two experts, and never twice for one.
    assert len((run.engine(0).path / "starts").read_text().split()) == 2


def test_killing_the_launcher_leaves_no_process(
    run: RunDirectory, config: Path, settings: RunSettings
) -> None:
    launcher = launch(run, config, {"merge": {"0": "save_then_hang", "1": "hang"}})
    pids = hanging_pids(run, "merge")
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: not any(map(is_alive, pids)))
    assert states(run, settings) == [*["done"] * 3, "failed", *["pending"] * 2]

    go(run, settings)
    assert started(run) == [*STAGES[:4], *STAGES[3:]]
    again = [event for event in run.ledger.events() if event.stage == "merge"]
    assert [event.cause for event in again] == [
        "from the start",
        "its launcher was killed",
        "from step 2",
        "finished",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_stage_and_keeps_the_run(
    run: RunDirectory, config: Path, settings: RunSettings, number: signal.Signals
) -> None:
    launcher = launch(run, config, {"experts.sums": {"0": "hang", "1": "hang"}})
    pids = hanging_pids(run, "experts.sums")
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 128 + number
    assert errors == f"stopped by {number.name}\n"
    assert not any(map(is_alive, pids))
    assert states(run, settings) == ["done", *["pending"] * 5]
    assert run.ledger.events()[-1].cause == f"stopped by {number.name}"


def test_a_second_signal_does_not_wait_for_the_stage_to_save(
    run: RunDirectory, config: Path
) -> None:
    launcher = launch(run, config, {"cold_start": {"0": "hang_deaf", "1": "hang_deaf"}})
    wait_until(lambda: (run.stage("cold_start").path / "pid_1").exists())
    launcher.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.communicate(timeout=0.5)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=25)
    assert launcher.returncode == 130


def test_a_run_has_one_launcher(run: RunDirectory, settings: RunSettings) -> None:
    with run.lock(), pytest.raises(RunLocked, match=f"process {os.getpid()} on "):
        go(run, settings)
    assert not run.is_running()


def test_a_changed_setting_makes_finished_stages_stale(
    run: RunDirectory, settings: RunSettings
) -> None:
    go(run, settings)
    sums = settings.domains["sums"].model_copy(update={"updates_per_rollout": 2})
    changed = settings.model_copy(update={"domains": {**settings.domains, "sums": sums}})
    assert states(run, changed) == ["done", "stale", "done", *["stale"] * 3]
    with pytest.raises(StaleStages) as caught:
        go(run, changed)
    assert "experts.sums: updates_per_rollout was 1 and is now 2" in str(caught.value)
    assert states(run, settings) == ["done"] * 6


def test_a_stage_that_leaves_nothing_is_not_done(run: RunDirectory, settings: RunSettings) -> None:
    early = {"experts.sums": {"0": "leave_early", "1": "leave_early"}}
    with pytest.raises(UserError, match="ended with exit status 0, but it has no checkpoint"):
        go(run, settings, early)
    assert states(run, settings)[:2] == ["done", "failed"]
    go(run, settings)
    assert states(run, settings) == ["done"] * 6


def test_a_last_word_is_heard_where_no_log_can_be_written(
    run: RunDirectory, settings: RunSettings
) -> None:
    with pytest.raises(JobFailed, match="stage cold_start failed: the disk is full"):
        go(run, settings, {"cold_start": {"1": "speak_without_a_log"}})
