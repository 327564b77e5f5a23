"""What a stage's processes print, from all of its attempts' folders."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from parallel.files import open_file
from pipeline.errors import BraidError
from pipeline.run_directory import StageDirectory
from pipeline.violations import shown

LOOK_SECONDS = 0.5
ASK_SECONDS = 5.0  # Slurm's controller has others to answer too
CHUNK = 1 << 20
SRUN = "srun.log"


def print_log(directory: StageDirectory, name: str, goes_on: Callable[[], bool] | None) -> None:
    """Print a log of the newest attempt, such as `rank_0.log`, and while the stage `goes_on` what
    comes; a new attempt's follows that of the one before.

    Raises:
        BraidError: there is no such log, and none will come.
    """
    log = _log(directory, name)
    if not log.exists() and _log(directory, SRUN).exists():
        name = SRUN  # no rank has begun, and srun says why
    elif log.exists() and not log.stat().st_size:
        print(
            f"{shown(log)} is empty: ranks print what goes wrong, and nothing else. How far the "
            f"stage is says {shown(directory.metrics)}, and `braid status`",
            flush=True,
        )
    _print(_grown(lambda: _log(directory, name), goes_on))


def print_file(log: Path, goes_on: Callable[[], bool] | None) -> None:
    """The same of a log that is not of an attempt: an engine's, or what a job of Slurm's says of
    its stage's progress.

    Raises:
        BraidError: there is none.
    """
    _print(_grown(lambda: log, goes_on))


def _print(texts: Iterator[str]) -> None:
    for text in texts:
        sys.stdout.write(text)
        sys.stdout.flush()


def _grown(find: Callable[[], Path], goes_on: Callable[[], bool] | None) -> Iterator[str]:
    log, offset = find(), 0
    more, ask = goes_on is not None, 0.0
    while True:
        if goes_on is not None and time.monotonic() >= ask:
            more = goes_on()  # asked first: what it writes last is read still
            ask = time.monotonic() + ASK_SECONDS
        newest = find()
        if newest.exists() and newest != log:
            yield f"--- {shown(newest)} ---\n"
            log, offset = newest, 0
        if log.exists():
            with open_file(log) as file:
                file.seek(offset)
                while chunk := file.read(CHUNK):
                    offset += len(chunk)
                    yield chunk.decode(errors="replace")
        elif not more:
            known = sorted(path.name for path in log.parent.glob("*.log"))
            there = f"; there are {', '.join(known)}" if known else ""
            raise BraidError(f"there is no {shown(log)}{there}")
        if not more:
            return
        time.sleep(LOOK_SECONDS)


def _log(directory: StageDirectory, name: str) -> Path:
    attempt = max(directory.attempts(), 1)
    return directory.job(attempt).parent / name
