"""Engines stay up from stage to stage, and are restarted when they fail, but not for ever."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from parallel.errors import UserError
from parallel.machine.slots import Cores, MachineGpus, share_cores
from parallel.settings import EngineSettings
from pipeline.config.validate import load
from pipeline.launch.launcher import JobFailed, Launcher, SupervisedEngine, run_to_the_end
from pipeline.launch.placement import ThisMachine
from pipeline.launch.processes import Process, Signals
from pipeline.launch.progress import Screen
from pipeline.run.directory import RunDirectory
from stages.directory import StageDirectory
from stages.settings import RunSettings, StageJob
from tests.awaiting import is_alive, wait_until
from tests.pipeline.fake_launcher import fake_programs

Execute = Callable[..., list[str]]
HERE = ThisMachine(EngineSettings())
KILLED = "was killed by SIGKILL (out of memory?)"


def with_engine(config: Path, **engine: Any) -> RunSettings:
    """Return the settings of stages of one rank beside such engines."""
    settings = load(config, ["layout={ranks: 1, expert: 1}"])
    return settings.model_copy(update={"engine": settings.engine.model_copy(update=engine)})


@contextmanager
def launched(
    run: RunDirectory,
    settings: RunSettings,
    actions: dict[str, str],
    engine: str = "wait",
    gpus: MachineGpus | None = None,
) -> Iterator[Execute]:
    """Yield a function that executes a stage in a launcher and returns the launcher's messages."""
    programs = fake_programs({stage: {"0": action} for stage, action in actions.items()}, engine)
    placement = ThisMachine(settings.engine, gpus=gpus)
    with (
        Signals() as signals,
        Launcher(run.engines, settings, programs, placement, signals) as launcher,
    ):

        def execute(stage: str, *, samples: bool = True) -> list[str]:
            messages: list[str] = []
            directory = run.stage(stage)
            job = StageJob(
                stage=stage,
                kind="grpo",
                directory=directory.path.absolute(),
                attempt=1,
                samples=samples,
                settings=settings,
            )
            with (
                Screen(Console(quiet=True)) as screen,
                screen.watching(stage, 2, directory.metrics) as view,
            ):
                run_to_the_end(launcher.execute(job, view, messages.append))
            return messages

        yield execute


def starts(run: RunDirectory, index: int | str) -> list[int]:
    """Return the processes that an engine has been so far."""
    return [int(pid) for pid in (run.engine(index).path / "starts").read_text().split()]


def kill_and_bury(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid))


def test_an_engine_that_is_killed_is_restarted_and_the_others_stay(
    run: RunDirectory, config: Path
) -> None:
    settings = with_engine(config, count=2)
    with launched(run, settings, {"sums": "kill_the_last_engine"}) as execute:
        assert execute("sums") == [f"engine 1 {KILLED}; restarting it (1 of at most 3)"]
        assert execute("words") == []
    assert (len(starts(run, 0)), len(starts(run, 1))) == (1, 2)
    assert not any(map(is_alive, starts(run, 0) + starts(run, 1)))
    jobs = [json.loads(run.engine(index).job.read_text()) for index in (0, 1)]
    assert [job["index"] for job in jobs] == [0, 1]
    assert [job["address"] for job in jobs] == [
        str(run.engine(index).address.absolute()) for index in (0, 1)
    ]


def test_members_of_an_engine_are_restarted_together_and_other_engines_stay(
    run: RunDirectory, config: Path
) -> None:
    settings = with_engine(config, count=2, data=2)
    with launched(run, settings, {"sums": "kill_the_last_engine"}) as execute:
        run.engine("1.0").path.mkdir(parents=True)
        run.engine("1.0").meeting.write_text("of the members before")
        assert execute("sums") == [f"engine 1.1 {KILLED}; restarting it (1 of at most 3)"]
        assert not run.engine("1.0").meeting.exists()
    names = ["0.0", "0.1", "1.0", "1.1"]
    assert [len(starts(run, name)) for name in names] == [1, 1, 2, 2]
    assert not any(is_alive(pid) for name in names for pid in starts(run, name))
    jobs = [json.loads(run.engine(name).job.read_text()) for name in names]
    assert [(job["index"], job["member"]) for job in jobs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [Path(job["meeting"]).parent.name for job in jobs] == ["0.0", "0.0", "1.0", "1.0"]


def test_a_stage_without_engines_learns_which_must_sleep(run: RunDirectory, config: Path) -> None:
    settings = with_engine(config, count=2)
    with launched(run, settings, {}) as execute:
        execute("export", samples=False)
        execute("sums")
    addresses = [str(run.engine(index).address) for index in (0, 1)]
    jobs = [
        json.loads(StageDirectory(run.stage(stage).path).job(1).read_text())
        for stage in ("export", "sums")
    ]
    found = [(job["engine_addresses"], job["idle_engines"]) for job in jobs]
    assert [tuple(map(len, each)) for each in found] == [(0, 2), (2, 0)]
    assert {Path(each).resolve() for each in found[0][1]} == {
        Path(each).resolve() for each in addresses
    }


def test_an_engine_that_is_killed_before_it_is_ready_is_restarted(
    run: RunDirectory, config: Path
) -> None:
    settings = with_engine(config, max_restarts=1)
    with (
        launched(run, settings, {"sums": "hang"}, "fall") as execute,
        pytest.raises(JobFailed, match=r"SIGKILL .*; it was restarted once, the most"),
    ):
        execute("sums")
    assert len(starts(run, 0)) == 2


def test_an_engine_on_gpus_that_was_never_ready_gets_one_further_start(
    run: RunDirectory, config: Path
) -> None:
    with (
        launched(
            run, with_engine(config), {"sums": "hang"}, "die", MachineGpus([0], [[0]])
        ) as execute,
        pytest.raises(JobFailed, match="engine 0 ended with exit status 1"),
    ):
        execute("sums")
    assert len(starts(run, 0)) == 2
    job = json.loads(run.engine(0).job.read_text())
    assert (job["nodes"], job["engine"]["start_timeout_seconds"]) == (1, 1800)


@pytest.mark.parametrize(
    ("action", "start_timeout", "message"),
    [
        ("refuse", 600, "it does not fit"),
        ("hang", 1, r"engine 0 was not ready after 1 s \(engine\.start_timeout_seconds\)"),
    ],
)
def test_an_engine_on_gpus_that_would_fail_alike_is_not_started_again(
    action: str, start_timeout: int, message: str, run: RunDirectory, config: Path
) -> None:
    settings = with_engine(config, start_timeout_seconds=start_timeout, max_restarts=0)
    gpus = MachineGpus([0], [[0]])
    with (
        launched(run, settings, {"sums": "hang"}, action, gpus) as execute,
        pytest.raises(JobFailed, match=rf"{message}\n  log: "),  # no word of restarts
    ):
        execute("sums")


def test_the_start_timeout_is_the_device_s_or_the_one_that_is_set() -> None:
    unset, chosen = EngineSettings(), EngineSettings(start_timeout_seconds=7)
    for gpus, seconds in ((False, 300), (True, 1800)):
        assert unset.started_on(gpus).start_seconds == seconds
        assert chosen.started_on(gpus).start_seconds == 7
    assert unset.start_seconds == 300


def test_an_engine_that_a_rank_gives_up_is_restarted(run: RunDirectory, config: Path) -> None:
    with launched(run, with_engine(config), {"sums": "give_an_engine_up"}) as execute:
        assert execute("sums") == [
            "engine 0: no answer for 120 s; restarting it (1 of at most 3)",
        ]
        silent, _ = starts(run, 0)
        assert not is_alive(silent)
        assert not run.engine(0).restart.exists()


def test_each_stage_counts_its_own_restarts(run: RunDirectory, config: Path) -> None:
    actions = dict.fromkeys(("sums", "words"), "kill_the_last_engine")
    with launched(run, with_engine(config, max_restarts=1), actions) as execute:
        for stage in actions:
            assert execute(stage) == [f"engine 0 {KILLED}; restarting it (1 of at most 1)"]


def test_an_engine_is_not_restarted_for_ever(run: RunDirectory, config: Path) -> None:
    settings = with_engine(config, count=2, max_restarts=2)
    with launched(run, settings, {"sums": "hang"}, "forget") as execute:
        with pytest.raises(JobFailed) as caught:
            execute("sums")
        assert caught.value.failure.cause == (
            "engine 1: it lost its mind; it was restarted 2 times, the most that "
            "engine.max_restarts = 2 allows"
        )
    assert (len(starts(run, 0)), len(starts(run, 1))) == (1, 3)


def test_no_restart_is_a_bound_too(run: RunDirectory, config: Path) -> None:
    settings = with_engine(config, max_restarts=0)
    with (
        launched(run, settings, {"sums": "kill_every_engine"}) as execute,
        pytest.raises(JobFailed, match=r"SIGKILL .*; engine\.max_restarts = 0 allows no restart"),
    ):
        execute("sums")


def test_an_engine_that_dies_between_stages_is_replaced_for_the_next_that_samples(
    run: RunDirectory, config: Path
) -> None:
    with launched(run, with_engine(config, max_restarts=0), {"first": "await_engines"}) as execute:
        execute("first")
        kill_and_bury(starts(run, 0)[0])
        assert execute("second", samples=False) == []
        assert execute("third") == [f"engine 0 {KILLED}; restarting it"]


def test_engines_that_could_not_start_are_started_for_the_next_stage(
    run: RunDirectory, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = ThisMachine.start_engine, list[int]()

    def second_fails(here: ThisMachine, name: str, index: int, *others: Any) -> Process:
        started.append(index)
        if started == [0, 1]:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start(here, name, index, *others)

    monkeypatch.setattr(ThisMachine, "start_engine", second_fails)
    with launched(run, with_engine(config, count=2), {"second": "await_engines"}) as execute:
        with pytest.raises(BlockingIOError):
            execute("first")
        assert execute("second") == []
    assert started == [0, 1, 1]


def test_an_engine_that_does_not_get_ready_in_time_has_failed(run: RunDirectory) -> None:
    engine = SupervisedEngine(run.engine(0), 0, ["sleep", "600"], HERE, start_seconds=0.05)
    try:
        wait_until(lambda: engine.failure() is not None)
        failure = engine.failure()
        assert failure
        assert failure.cause == "engine 0 was not ready after 0.05 s (engine.start_timeout_seconds)"
        assert not engine.was_ready
        run.engine(0).address.write_text("{}")
        assert engine.failure() is None
    finally:
        engine.stop()


def test_an_engine_that_was_ready_before_a_restart_counts_as_ready_after_it(
    run: RunDirectory,
) -> None:
    engine = SupervisedEngine(run.engine(0), 0, ["false"], HERE, 60)
    try:
        run.engine(0).address.write_text("{}")
        wait_until(lambda: engine.failure() is not None)
        engine.start()
        wait_until(lambda: engine.failure() is not None)
        assert engine.was_ready  # so the launcher restarts it again
    finally:
        engine.stop()


def test_nothing_of_an_engine_outlives_its_restart(run: RunDirectory, tmp_path: Path) -> None:
    worker = tmp_path / "worker"
    program = f"sleep 600 & echo $! >{worker}; exec sleep 600"
    engine = SupervisedEngine(run.engine(0), 0, ["sh", "-c", program], HERE, 60)
    try:
        wait_until(lambda: worker.exists() and worker.read_text().endswith("\n"))
        first = int(worker.read_text())
        run.engine(0).address.write_text("{}")
        engine.start()
        wait_until(lambda: not is_alive(first))
        assert not run.engine(0).address.exists()
    finally:
        engine.stop()


def test_a_complaint_of_the_engine_before_is_not_taken_for_one_of_this(run: RunDirectory) -> None:
    engine = SupervisedEngine(run.engine(0), 0, ["sleep", "600"], HERE, 60)
    try:
        run.engine(0).restart.write_text("no answer for 120 s\n")
        assert engine.failure() is None
        run.engine(0).address.write_text("{}")
        assert engine.failure() is None
    finally:
        engine.stop()


@pytest.mark.parametrize(
    ("engine", "shared"),
    [
        ({}, Cores(None, [None])),
        ({"count": 3}, Cores(None, [[1, 2], [4, 5], [7, 8]])),
        ({"count": 4}, Cores(None, [[1], [2], [4], [5]])),
        ({"count": 2, "tensor": 4}, Cores(None, [None, None])),
        ({"placement": "own"}, Cores([1, 2, 4, 5, 7], [[8]])),
        ({"placement": "own", "count": 2, "tensor": 2}, Cores([1, 2], [[4, 5], [7, 8]])),
        ({"placement": "own", "tensor": 5}, Cores([1], [[2, 4, 5, 7, 8]])),
    ],
)
def test_engines_get_their_cores(engine: dict[str, Any], shared: Cores) -> None:
    assert share_cores(EngineSettings(**engine), {8, 7, 1, 2, 4, 5}) == shared


def test_the_ranks_need_a_core_too() -> None:
    engine = EngineSettings(placement="own", count=2)
    with pytest.raises(UserError, match=r"placement: own needs 3 CPU cores, .* 2 available;"):
        share_cores(engine, [0, 1])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_processes_run_on_the_cores_they_are_given(run: RunDirectory, config: Path) -> None:
    def cores(path: Path, key: str | None = None) -> list[int]:
        found = json.loads(path.read_text())
        return found[key] if key else found

    settings = with_engine(config, placement="own")
    wanted = share_cores(settings.engine)
    with launched(run, settings, {"sums": "await_engines"}) as execute:
        execute("sums")
    assert cores(run.stage("sums").path / "cores") == wanted.ranks
    assert cores(run.engine(0).address, "cores") == wanted.engines[0]
