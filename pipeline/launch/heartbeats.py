"""The signs of life of a stage's ranks, as its launcher sees them.

A stopped rank, or one whose machine hangs, does not end: the other ranks wait for it in a
collective until that times out, and then one of them is blamed. The signs are the times of files,
which reach the launcher from every node that its run's directory does.
"""

from __future__ import annotations

import contextlib
import os
import time

from parallel.files import open_file
from pipeline.launch.processes import TAIL_LINES, ProcessFailure, log_lines
from stages.settings import StageJob

LOOK_SECONDS = 5.0
# Between two looks. After a longer pause this process was stopped itself, or waited for its disk,
# and knows nothing of the time in between.
PAUSE_SECONDS = 30.0


class Heartbeats:
    """The heartbeats of an attempt's ranks; a rank counts from its first one on."""

    def __init__(self, job: StageJob) -> None:
        self._directory = job.files.job(job.attempt).parent
        self._seconds = job.settings.launch.hang_timeout_seconds
        ranks = range(job.settings.layout.ranks)
        self._files = {rank: job.files.heartbeat(job.attempt, rank) for rank in ranks}
        self._beats: dict[int, int] = {}  # the time of each rank's file, by its disk's clock
        self._seen: dict[int, float] = {}  # when it last changed, by this process's clock
        self._looked = time.monotonic()

    def failure(self) -> ProcessFailure | None:
        """Return the failure of the ranks that have given no sign for too long; None without any.

        It counts as a loss: a Slurm job then starts again, on other nodes.
        """
        now = time.monotonic()
        pause = now - self._looked
        if pause < LOOK_SECONDS:
            return None
        self._looked = now
        for rank in self._files:
            self._look(rank, now, paused=pause > PAUSE_SECONDS)
        silent = [rank for rank, seen in self._seen.items() if now - seen > self._seconds]
        if not silent:
            return None
        ranks = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, sorted(silent)))}"
        log = self._directory / f"rank_{min(silent)}.log"
        tail = tuple(log_lines(log, 0)[-TAIL_LINES:]) if log.exists() else ()
        cause = (
            f"{ranks} gave no sign of life for {self._seconds} s (launch.hang_timeout_seconds): "
            "stopped, or on a machine that hangs"
        )
        return ProcessFailure(cause, log, tail=tail, lost=True)

    def _look(self, rank: int, now: float, paused: bool) -> None:
        """Look at a rank's file; where it cannot be read, nobody knows that the rank is silent."""
        try:
            with open_file(self._files[rank]) as file:  # opened, so that NFS asks the server
                beat = os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:  # it has not begun, or has ended
            self._seen.pop(rank, None)
        except OSError:
            self._seen[rank] = now
        else:
            if paused or rank not in self._seen or beat != self._beats.get(rank):
                self._seen[rank] = now
            self._beats[rank] = beat

    def remove(self) -> None:
        """Remove the files of ranks that were killed."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
