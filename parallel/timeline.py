"""The timeline of a process: its phases, and what it waits for in them.

A phase is a line of JSON when it begins and another when it ends, so that the file of a process
that hangs says in what, and since when. Phases may overlap. Never imports torch.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from parallel.files import open_in_place

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
