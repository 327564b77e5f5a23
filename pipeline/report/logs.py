"""What a stage's processes print, from all of its attempts' folders."""

from __future__ import annotations

import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator
from pathlib import Path

from parallel.files import open_file
from pipeline.config.violations import shown
from pipeline.errors import BraidError
from pipeline.run.directory import StageDirectory
from pipeline.text import say, visible

LOOK_SECONDS = 0.5
ASK_SECONDS = 5.0  # Slurm's controller has others to answer too
CHUNK = 1 << 20
SRUN = "srun.log"


def print_log(
    directory: StageDirectory,
    name: str,
    goes_on: Callable[[], bool] | None,
    output: Callable[[], Path | None] = lambda: None,
) -> None:
    """Print what a job of Slurm's printed, its `output`, or where there is none a log of the newest
    attempt, such as `rank_0.log`; and while the stage `goes_on` what comes. A new attempt's log
    follows the one before.

    Raises:
        BraidError: there is no such log, and none will come.
    """

    def find() -> Path:
        return output() or _log(directory, name)

    log = find()
    if log.name == name and log.exists() and not log.stat().st_size:
        say(
            f"{shown(log)} is empty: ranks print what goes wrong, and nothing else. How far the "
            f"stage is says {shown(directory.metrics)}, and `braid status`",
            flush=True,
        )
    _print(_grown(find, goes_on))


def print_file(log: Path, goes_on: Callable[[], bool] | None) -> None:
    """Print a log that is not of an attempt, such as an engine's, in the same way.

    Raises:
        BraidError: there is none.
    """
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
            more = goes_on()  # asked before reading: what is written until the end is read still
            ask = time.monotonic() + ASK_SECONDS
        newest = find()  # before reading too: by the time there is another log, this one is whole
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
    """A log that is read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        # What is written may end within a letter of several bytes.
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> Iterator[str]:
        """Give what has been written since the last call; nothing where there is no file yet."""
        if not self.path.exists():
            return
        with open_file(self.path) as file:
            file.seek(self.offset)
            while chunk := file.read(CHUNK):
                self.offset += len(chunk)
                yield self._decoder.decode(chunk)

    def rest(self) -> Iterator[str]:
        """Give what stands for the beginning of a letter that nothing completes."""
        yield self._decoder.decode(b"", final=True)


def _log(directory: StageDirectory, name: str) -> Path:
    """Return the path of a log of the newest attempt, or of srun's, which says why no rank has
    begun."""
    folder = directory.job(max(directory.attempts(), 1)).parent
    log, srun = folder / name, folder / SRUN
    return srun if srun.exists() and not log.exists() else log
