"""A machine whose fake ranks are calls and whose fake engines are files.

A whole fake run starts 13 processes, and most tests of the pipeline ask what a command makes of
such a run, not how a process ends. Tests of processes (`test_launcher`, `test_engines`,
`test_attempts`, `test_faults`) and every action that waits, signals or speaks have real children.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.launch.placement import ThisMachine
from pipeline.launch.processes import Process, ProcessFailure, failure_from_log
from tests.pipeline import fake_stage

# They come to their end by themselves, and nothing but their files and exit status is looked at.
LIGHT = (
    fake_stage.work,
    fake_stage.learn_otherwise,
    fake_stage.end_early,
    fake_stage.fall_short,
    fake_stage.draw_level,
    fake_stage.leave_early,
    fake_stage.break_down,
    fake_stage.save_then_break,
)
NOBODY = 1 << 23  # larger than any process id


def is_light(actions: Mapping[str, Mapping[str, str]]) -> bool:
    """Return whether every action is one that a call can do."""
    names = {action.__name__ for action in LIGHT}
    return all(action in names for ranks in actions.values() for action in ranks.values())


class LightMachine(ThisMachine):
    """Starts what `fake_programs` names, as calls in this process."""

    def start_ranks(
        self, command: Sequence[str], world: int, directory: Path, beside_engines: bool
    ) -> list[Process]:
        *_, job, actions, _ = command
        return [
            Rank(rank, world, Path(job), json.loads(actions), directory) for rank in range(world)
        ]

    def start_engine(self, name: str, index: int, command: Sequence[str], log: Path) -> Process:
        return LightEngine(name, Path(command[-2]), log)


class Ended:
    """A process that has ended; a `pipeline.launch.processes.Process`."""

    def __init__(self, name: str, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.name, self.log = name, log
        self._start = log.stat().st_size if log.exists() else 0
        self._status: int | None = None

    def status(self) -> int | None:
        return self._status

    def send(self, number: signal.Signals) -> None:
        if self._status is None:
            self._status = -number

    def reap(self) -> None:
        self.send(signal.SIGKILL)

    def notices(self) -> list[str]:
        return []

    def failure(self) -> ProcessFailure:
        ending = f"{self.name} ended with exit status {self._status}"
        return failure_from_log(ending, False, self.log, self._start)


class Rank(Ended):
    """A call of the rank's action."""

    def __init__(
        self, rank: int, world: int, job: Path, actions: dict[str, dict[str, str]], folder: Path
    ) -> None:
        super().__init__(f"rank {rank}", folder / f"rank_{rank}.log")
        with self.log.open("a") as output, contextlib.redirect_stdout(output):
            self._status = fake_stage.run(json.loads(job.read_text()), actions, rank, world)


class LightEngine(Ended):
    """The files of `fake_engine.py wait`."""

    def __init__(self, name: str, job: Path, log: Path) -> None:
        super().__init__(name, log)
        log.touch()
        with (job.parent / "starts").open("a") as starts:
            starts.write(f"{NOBODY}\n")
        cores = sorted(os.sched_getaffinity(0))
        address = Path(json.loads(job.read_text())["address"])
        address.write_text(json.dumps({"pid": NOBODY, "cores": cores}))
