"""The append-only history of a run: one JSON line per change of a stage's state."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal, get_args

from parallel.files import naming, read_text

State = Literal["pending", "submitted", "running", "done", "failed", "stale"]

JOB = re.compile(r"[0-9]+([_+][0-9]+)*")
# About a century, more than any attempt takes: the sum of a damaged ledger's seconds stays finite.
MOST_SECONDS = 3e9
PUT_ASIDE = "put aside as "  # starts the cause of a stage that is rerun


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
    attempt: int
    seconds: float | None = None
    job: str | None = None

    @property
    def timestamp(self) -> float:
        """The time as seconds since the epoch."""
        return datetime.fromisoformat(self.time).timestamp()


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
        with naming(self.path), self.path.open("a+b", buffering=0) as file, _alone(file):
            _write(file, Event(_now(), stage, state, cause, attempt, rounded, job))

    def submitted(self, stage: str, cause: str, attempt: int, job: str) -> None:
        """Record that Slurm has `job` for a stage, unless the ledger's newest job is that one.

        A job may start, and end, before sbatch returns its number: its own events are newer.
        """
        with naming(self.path), self.path.open("a+b", buffering=0) as file, _alone(file):
            # Closing a second descriptor of the file would release the lock: read through this one.
            file.seek(0)
            events = _events(file.read().decode(errors="replace"))
            named = [each.job for each in events if each.stage == stage and each.job]
            if job not in named[-1:]:
                _write(file, Event(_now(), stage, "submitted", cause, attempt, job=job))

    def events(self) -> list[Event]:
        """Return the events of all whole lines; a line that a crash cut short is ignored."""
        if not self.path.exists():
            return []
        return _events(read_text(self.path, errors="replace"))


def _events(text: str) -> list[Event]:
    return [event for line in text.split("\n") if (event := _event(line)) is not None]


def _write(file: IO[bytes], event: Event) -> None:
    """Append one line to the file, which the caller has locked."""
    fields = {name: value for name, value in asdict(event).items() if value is not None}
    line = (json.dumps(fields) + "\n").encode()
    if _ends_in_half_a_line(file):
        line = b"\n" + line
    if file.write(line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file.fileno())


def _event(line: str) -> Event | None:
    """Return the event of a line; None for a line that was cut short or damaged."""
    try:
        event = Event(**json.loads(line))
        _ = event.timestamp  # overflows on the first and the last day of the calendar
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    texts, seconds = (event.stage, event.cause), event.seconds
    sound = all(isinstance(text, str) for text in texts) and type(event.attempt) is int
    sound = sound and (event.job is None or _is_job(event.job))
    counted = seconds is None or (type(seconds) in (int, float) and 0 <= seconds <= MOST_SECONDS)
    return event if sound and counted and event.state in get_args(State) else None


def _is_job(number: Any) -> bool:
    """Return whether it is a Slurm job number: `17`, `17_2` (array), `17+1` (heterogeneous).

    The number is written into a shell script, so nothing else may pass.
    """
    return isinstance(number, str) and JOB.fullmatch(number) is not None


def latest(events: Iterable[Event]) -> dict[str, Event]:
    """Return each stage's newest event, except `stale`, which is derived from the lineage."""
    return {event.stage: event for event in events if event.state != "stale"}


def minutes(events: Iterable[Event]) -> dict[str, float]:
    """Return each stage's wall time in minutes, over all attempts since it was put aside."""
    total: dict[str, float] = {}
    for event in events:
        if event.state == "pending" and event.cause.startswith(PUT_ASIDE):
            total.pop(event.stage, None)
        if event.seconds is not None:
            total[event.stage] = total.get(event.stage, 0.0) + event.seconds / 60
    return {stage: round(value, 3) for stage, value in total.items()}


def took(events: Iterable[Event]) -> dict[str, float]:
    """Return the seconds of each stage's newest successful attempt."""
    return {e.stage: e.seconds for e in events if e.state == "done" and e.seconds is not None}


@contextmanager
def _alone(file: IO[bytes]) -> Iterator[None]:
    """Lock the file for this process; the kernel releases the lock when the process ends."""
    # lockf, not flock: NFS and Lustre have it too. Without any locks a line is still one write.
    try:
        fcntl.lockf(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    yield


def _ends_in_half_a_line(file: IO[bytes]) -> bool:
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
