"""A FIFO in place of a file of a run: nobody writes to it, and no command waits for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.pipeline.conftest import Braid

READ = [
    "ledger.jsonl",
    "run.lock",
    "results.json",
    "stages/merge/manifest.json",
    "stages/merge/metrics.jsonl",
    "stages/merge/stage.lock",
    "stages/merge/attempt_1/rank_0.log",
    "stages/merge/checkpoints/step_2/checksums.json",
    "stages/cold_start/checkpoints/step_1/state.json",
]


@contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """Fail what still waits after some seconds."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"waited for {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def waits(command: tuple[str, ...], braid: Braid) -> bool:
    """Return whether a command waits; it has to end well or with a message."""
    try:
        with alarm(20):
            code, _, err = braid(*command)
    except AssertionError:
        return True
    assert code == 0 or err.startswith("braid: "), err
    return False


def test_no_command_waits_for_a_fifo(config: Path, runs: Path, braid: Braid) -> None:
    assert braid("run", config, actions={"cold_start": {"0": "end_early"}})[0] == 0
    stage = ("small", "merge")
    commands = [("status",), ("why", *stage), ("diff", "small", "small"), ("logs", *stage)]
    waiting = []
    for name in READ:
        path = runs / "small" / name
        kept = path.rename(path.with_name("kept"))
        os.mkfifo(path)
        waiting += [(name, command[0]) for command in commands if waits(command, braid)]
        path.unlink()
        kept.rename(path)
    assert not waiting
