"""An attempt that had to wait, a terminal that is gone, and signals that come in any order."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.launch.launcher import Launcher, run_to_the_end
from pipeline.launch.placement import ForkServers, ThisMachine
from pipeline.launch.processes import TIME_IS_UP, Signals, Stopped
from pipeline.launch.progress import Screen
from pipeline.launch.runner import attempt, run_stages
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import compile_graph
from pipeline.run.run import Run
from pipeline.run.select import StaleStages
from pipeline.slurm.queue import SEPARATOR
from pipeline.tables import Terminal
from stages.settings import LaunchSettings, RunSettings
from tests.pipeline.fake_launcher import fake_programs


def try_again(run: RunDirectory, settings: RunSettings, stage: int = 0) -> None:
    """Run one more attempt, by a job that saw the stage unfinished before it got the lock."""
    place = ThisMachine(settings.engine)
    with (
        Signals() as signals,
        Screen(Console(quiet=True)) as screen,
        Launcher(run.engines, settings, fake_programs({}), place, signals) as launcher,
    ):
        run_to_the_end(
            attempt(Run(run.path, settings), compile_graph(settings)[stage], launcher, screen, "it")
        )


@pytest.fixture
def finished(run: RunDirectory, settings: RunSettings) -> RunDirectory:
    with run.lock():
        run_stages(Run(run.path, settings), Console(quiet=True), fake_programs({}))
    return run


def test_a_stage_that_another_launcher_finished_meanwhile_is_left(
    finished: RunDirectory, settings: RunSettings
) -> None:
    before = finished.ledger.path.read_text()
    try_again(finished, settings)
    assert finished.ledger.path.read_text() == before


def test_other_settings_do_not_continue_what_another_launcher_left(
    finished: RunDirectory, settings: RunSettings
) -> None:
    with pytest.raises(StaleStages, match="seed was 0 and is now 1"):
        try_again(finished, settings.model_copy(update={"seed": 1}))
    assert not finished.stage("cold_start").job(2).exists()


def test_a_job_that_waits_for_the_lock_ends_when_it_is_asked_to(run: RunDirectory) -> None:
    def asked() -> None:
        raise Stopped(signal.SIGTERM)

    with (
        run.lock_stage("merge"),
        pytest.raises(Stopped),
        run.lock_stage("merge", lock_timeout=60, check=asked),
    ):
        pytest.fail("it has the lock that another one holds")


class Gone:
    """A stream whose terminal, or whose pipe's reader, is closed."""

    encoding = "utf-8"

    def __init__(self, number: int) -> None:
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))

    def flush(self) -> None:
        self.write("")

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EPIPE])
def test_a_terminal_that_is_gone_ends_no_stage(
    run: RunDirectory, settings: RunSettings, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    console = Terminal(file=Gone(number))  # type: ignore[arg-type]
    with run.lock():
        run_stages(Run(run.path, settings), console, fake_programs({}))
    assert [event.state for event in run.ledger.events()].count("done") == 6


@pytest.mark.parametrize(
    ("sent", "decisive"),
    [
        ([TIME_IS_UP], TIME_IS_UP),
        ([TIME_IS_UP, signal.SIGTERM], signal.SIGTERM),
        ([signal.SIGINT, TIME_IS_UP, signal.SIGTERM], signal.SIGINT),
    ],
)
def test_who_asks_to_stop_goes_before_time_that_is_up(sent: list[int], decisive: int) -> None:
    with Signals((signal.SIGINT, signal.SIGTERM, TIME_IS_UP)) as signals:
        signals.check()
        for number in sent:
            os.kill(os.getpid(), number)
        with pytest.raises(Stopped) as caught:
            signals.check()
    assert caught.value.number == decisive


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Commands of Slurm's that say what a test wants."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def say(command: str, program: str) -> None:
        (folder / command).write_text(f"#!/bin/bash\n{program}\n")
        (folder / command).chmod(0o755)

    return say


def queue_line(fields: str) -> str:
    """Return a program that prints the fields as squeue does."""
    return f"echo '{fields.replace('|', SEPARATOR)}'"


def test_a_run_with_jobs_in_the_queue_is_not_run_here(
    braid: Callable[..., tuple[int, str, str]],
    config: Path,
    run: RunDirectory,
    slurm: Callable[[str, str], None],
) -> None:
    slurm("squeue", queue_line("7|PENDING|Priority|0:00|4:00|n1|(null)"))
    run.path.mkdir(parents=True)
    run.ledger.append("cold_start", "submitted", "as job 7", 0, job="7")
    code, _, err = braid("run", config)
    assert code == 1
    assert "has jobs in Slurm's queue: 7; wait for them, or cancel them with: braid cancel" in err
    # Slurm gave the number to another run's job.
    slurm("squeue", queue_line("7|RUNNING|None|0:10|4:00|n1|/runs/other/cold_start"))
    assert braid("run", config)[0] == 0


def test_what_slurm_says_need_not_be_text(
    braid: Callable[..., tuple[int, str, str]],
    config: Path,
    run: RunDirectory,
    slurm: Callable[[str, str], None],
) -> None:
    braid("run", config)
    run.ledger.append("merge", "submitted", "as job 7", 1, job="7")
    slurm("squeue", r"printf '\xff\xfe\x1f\n7\x1fRUNNING'")
    assert braid("status", "small")[0] == 0
    slurm("squeue", "echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1")
    assert "warning: Slurm was not asked about this run's jobs" in braid("status", "small")[2]


@pytest.mark.parametrize("said", ["", "echo Welcome", "echo 7x"])
def test_an_sbatch_that_prints_no_number_is_an_error(
    braid: Callable[..., tuple[int, str, str]],
    config: Path,
    tmp_path: Path,
    slurm: Callable[[str, str], None],
    said: str,
) -> None:
    (tmp_path / "cluster.yaml").write_text("ranks_per_node: 2\n")
    slurm("squeue", "true")
    slurm("sbatch", said or "true")
    code, _, err = braid("submit", config, "--cluster", tmp_path / "cluster.yaml")
    assert (code, "sbatch printed no job number" in err) == (1, True)


@pytest.mark.parametrize("wanted", [True, False])
def test_fork_servers_are_a_setting(
    wanted: bool, run: RunDirectory, settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class NoServers(ForkServers):
        def __init__(self, folder: Path, wanted: bool) -> None:
            asked.append(wanted)
            super().__init__(folder, enabled=False)

    monkeypatch.setattr("pipeline.launch.runner.ForkServers", NoServers)
    launch = LaunchSettings(fork_servers=wanted)
    with run.lock():
        given = settings.model_copy(update={"launch": launch})
        run_stages(Run(run.path, given), Console(quiet=True), fake_programs({}))
    assert asked == [wanted]
