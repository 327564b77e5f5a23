"""The append-only history of a run: one JSON line per change of a stage's state."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import Field, StrictInt, TypeAdapter

from parallel.files import naming, open_in_place, read_text

State = Literal["pending", "submitted", "running", "done", "failed", "stale"]
# About a century, more than any attempt takes: the sum of a damaged ledger's seconds stays finite.
Seconds = Annotated[float, Field(ge=0, le=3e9)]
# `17`, `17_2` (array) or `17+1` (heterogeneous): it is written into a shell script.
Job = Annotated[str, Field(pattern=r"^[0-9]+([_+][0-9]+)*$")]

PUT_ASIDE = "put aside as "  # starts the cause of a stage that is rerun
RENAMED = "renamed to "  # starts the last cause under a former name


@dataclass(frozen=True)
class Event:
    """A stage entered a state.

    `seconds` is the wall time of the attempt that this event ended; None where it ended none. `job`
    is the number of the stage's Slurm job, if any.
    """

    time: str
    stage: str
    state: State
    cause: str
    attempt: StrictInt
    seconds: Seconds | None = None
    job: Job | None = None

    @property
    def timestamp(self) -> float:
        """The time as seconds since the epoch."""
        return datetime.fromisoformat(self.time).timestamp()


_EVENT = TypeAdapter(Event)


class Ledger:
    """The file `ledger.jsonl` of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(
        self,
        stage: str,
        state: State,
        cause: str,
        attempt: int,
        seconds: float | None = None,
        job: str | None = None,
    ) -> None:
        """Append one line and fsync; a file lock orders the writers of all machines."""
        rounded = None if seconds is None else round(seconds, 3)
        with self._alone() as file:
            _write(file, stage, state, cause, attempt, rounded, job)

    def submitted(self, stage: str, cause: str, attempt: int, job: str) -> None:
        """Record that Slurm has `job` for a stage, unless the ledger's newest job is that one.

        A job may start, and end, before sbatch returns its number: its own events are newer.
        """
        with self._alone() as file:
            # Closing a second descriptor of the file would release the lock: read through this one.
            file.seek(0)
            events = _events(file.read().decode(errors="replace"))
            jobs = [event.job for event in events if event.stage == stage and event.job]
            if job not in jobs[-1:]:
                _write(file, stage, "submitted", cause, attempt, None, job)

    def events(self) -> list[Event]:
        """Return the events of all whole lines; a line that a crash cut short is ignored."""
        return [event for _, event in self.numbered()]

    def numbered(self) -> list[tuple[int, Event]]:
        """Return the events with the numbers of their lines, from 1."""
        if not self.path.exists():
            return []
        lines = read_text(self.path, errors="replace").split("\n")
        events = ((number, _event(line)) for number, line in enumerate(lines, 1))
        return [(number, event) for number, event in events if event is not None]

    @contextmanager
    def _alone(self) -> Iterator[IO[bytes]]:
        """Open the file, locked for this process; the kernel releases the lock at its end."""
        with naming(self.path), open_in_place(self.path, "a+b", buffering=0) as file:
            # lockf, not flock: NFS and Lustre have it too. Without locks a line is still one write.
            try:
                fcntl.lockf(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
            yield file


def _write(file: IO[bytes], stage: str, state: State, cause: str, *further: Any) -> None:
    """Append one line to the file, which the caller has locked."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    event = Event(now, stage, state, cause, *further)
    fields = {name: value for name, value in asdict(event).items() if value is not None}
    line = (json.dumps(fields) + "\n").encode()
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":  # a crash cut the last line short
            line = b"\n" + line
    if file.write(line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file.fileno())


def _events(text: str) -> list[Event]:
    return [event for line in text.split("\n") if (event := _event(line)) is not None]


def _event(line: str) -> Event | None:
    """Return the event of a line; None for a line that was cut short or damaged."""
    try:
        event = _EVENT.validate_python(json.loads(line))
        _ = event.timestamp  # overflows on the first and the last day of the calendar
    except (ValueError, OverflowError, RecursionError):
        return None
    return event


def latest(events: Iterable[Event]) -> dict[str, Event]:
    """Return each stage's newest event, except `stale`, which is derived from the lineage."""
    return {event.stage: event for event in events if event.state != "stale"}


def minutes(events: Iterable[Event]) -> dict[str, float]:
    """Return each stage's wall time in minutes, over all attempts since it was put aside.

    The time of a renamed stage counts under its new name.
    """
    total: dict[str, float] = {}
    for event in events:
        if event.state == "pending" and event.cause.startswith((PUT_ASIDE, RENAMED)):
            total.pop(event.stage, None)
        if event.seconds is not None:
            total[event.stage] = total.get(event.stage, 0.0) + event.seconds / 60
    return {stage: round(value, 3) for stage, value in total.items()}


def took(events: Iterable[Event]) -> dict[str, float]:
    """Return the seconds of each stage's newest successful attempt."""
    return {e.stage: e.seconds for e in events if e.state == "done" and e.seconds is not None}
