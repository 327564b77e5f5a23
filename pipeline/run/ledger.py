"""The append-only history of a run: one JSON line for every change of state of every stage."""

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
# More than an attempt can take, about a century: the sum of any ledger's seconds stays finite.
MOST_SECONDS = 3e9
PUT_ASIDE = "put aside as "  # what the cause of a stage that is made anew begins with


@dataclass(frozen=True)
class Event:
    """A stage entered a state.

    `seconds` is the wall time of the attempt that ended with this event, and absent from events
    that end none. `job` is the number of the job that Slurm has for it, where there is one.
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
        """Write one line, durably. Writers of any machine that shares the file take turns."""
        rounded = None if seconds is None else round(seconds, 3)
        with naming(self.path), self.path.open("a+b", buffering=0) as file, _alone(file):
            _write(file, Event(_now(), stage, state, cause, attempt, rounded, job))

    def submitted(self, stage: str, cause: str, attempt: int, job: str) -> None:
        """Write that Slurm has `job` for a stage, unless the ledger names that: a job may begin,
        and end, before we have heard its number, and what it said itself is newer."""
        with naming(self.path), self.path.open("a+b", buffering=0) as file, _alone(file):
            file.seek(0)  # of another descriptor of the file, the end would be that of the lock
            events = _events(file.read().decode(errors="replace"))
            named = [each.job for each in events if each.stage == stage and each.job]
            if job not in named[-1:]:
                _write(file, Event(_now(), stage, "submitted", cause, attempt, job=job))

    def events(self) -> list[Event]:
        """Every whole line. A line cut short by a crash says nothing that can be relied on."""
        if not self.path.exists():
            return []
        return _events(read_text(self.path, errors="replace"))


def _events(text: str) -> list[Event]:
    return [event for line in text.split("\n") if (event := _event(line)) is not None]


def _write(file: IO[bytes], event: Event) -> None:
    """Append one line to the file, which the caller holds alone."""
    fields = {name: value for name, value in asdict(event).items() if value is not None}
    line = (json.dumps(fields) + "\n").encode()
    if _ends_in_half_a_line(file):
        line = b"\n" + line
    if file.write(line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file.fileno())


def _event(line: str) -> Event | None:
    """What a line says; None for one that was cut short or damaged."""
    try:
        event = Event(**json.loads(line))
        _ = event.timestamp  # which the first and the last day of the calendar may lack
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    texts, seconds = (event.stage, event.cause), event.seconds
    sound = all(isinstance(text, str) for text in texts) and type(event.attempt) is int
    sound = sound and (event.job is None or _is_job(event.job))
    counted = seconds is None or (type(seconds) in (int, float) and 0 <= seconds <= MOST_SECONDS)
    return event if sound and counted and event.state in get_args(State) else None


def _is_job(number: Any) -> bool:
    """Return whether it is a job's number as Slurm writes it, which goes into a script of shell:
    `17`, `17_2` of an array, `17+1` of a heterogeneous job."""
    return isinstance(number, str) and JOB.fullmatch(number) is not None


def latest(events: Iterable[Event]) -> dict[str, Event]:
    """Each stage's newest event. Staleness is left out: it is found anew from the lineage."""
    return {event.stage: event for event in events if event.state != "stale"}


def minutes(events: Iterable[Event]) -> dict[str, float]:
    """Each stage's wall time over all attempts at what it has now, without those put aside."""
    total: dict[str, float] = {}
    for event in events:
        if event.state == "pending" and event.cause.startswith(PUT_ASIDE):
            total.pop(event.stage, None)
        if event.seconds is not None:
            total[event.stage] = total.get(event.stage, 0.0) + event.seconds / 60
    return {stage: round(value, 3) for stage, value in total.items()}


def took(events: Iterable[Event]) -> dict[str, float]:
    """The seconds of each stage's newest attempt that ended well: one that failed may have done
    next to nothing."""
    return {e.stage: e.seconds for e in events if e.state == "done" and e.seconds is not None}


@contextmanager
def _alone(file: IO[bytes]) -> Iterator[None]:
    """Hold the file, by a lock that NFS and Lustre know too, which the kernel gives back when this
    process ends. Where there are none at all, a line is still a single write."""
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
