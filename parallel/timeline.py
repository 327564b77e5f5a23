"""The timeline of a process: its phases, what it waits for in them, and its sign of life.

A phase is a line of JSON when it begins and another when it ends, so that the file of a process
that hangs says in what, and since when. Phases may overlap. Never imports torch.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from parallel.files import open_in_place, touch

BEAT_SECONDS = 10.0

_file: BinaryIO | None = None
_numbers = itertools.count(1)


def open_timeline(path: Path) -> None:
    """Write the phases of this process to a file, after those of processes before it."""
    global _file
    path.parent.mkdir(parents=True, exist_ok=True)
    _file = open_in_place(path, "ab", buffering=0)  # what is written is seen
    _write({"process": os.getpid()})


@contextmanager
def phase(name: str, waits_for: str | None = None, step: int | None = None) -> Iterator[None]:
    """Record the block as a phase, in which the process `waits_for` someone; a step's number."""
    number = next(_numbers)
    about = {"waits_for": waits_for, "step": step}
    _write({"phase": number, "name": name, **{k: v for k, v in about.items() if v is not None}})
    try:
        yield
    finally:
        _write({"phase": number})


@contextmanager
def heartbeat(path: Path) -> Iterator[None]:
    """Set the time of a file every BEAT_SECONDS, from a thread; remove the file at the end.

    However long a step takes, the thread continues. A process that is stopped, or whose machine
    hangs, leaves the file as it is; so does one that is killed.
    """
    ended = threading.Event()

    def beat() -> None:
        while not ended.is_set():
            with suppress(OSError):  # of a disk that is away; the next beat may reach it again
                touch(path)
            ended.wait(BEAT_SECONDS)

    path.parent.mkdir(parents=True, exist_ok=True)
    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        path.unlink(missing_ok=True)


def _write(line: dict[str, Any]) -> None:
    """Append a line with the time; a full disk must not end a process for its timeline."""
    global _file
    if _file is None:
        return
    try:
        _file.write(json.dumps({**line, "time": time.time()}).encode() + b"\n")
    except OSError as error:
        print(f"{_file.name}: {error}; the timeline ends here", flush=True)
        _file = None
