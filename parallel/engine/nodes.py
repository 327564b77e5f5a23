"""The processes of an engine over several nodes, and where they meet; never imports torch.

Such an engine is one Slurm step with a task per node. The task on the engine's first node, node
rank 0, serves; the launcher knows neither that node's address on `interface` nor a free port of it,
so node rank 0 publishes both in a file beside the engine's address.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from parallel.errors import UserError
from parallel.files import write_atomically
from parallel.machine.network import address_of, free_port
from parallel.settings import EngineJob

POLL_SECONDS = 0.2


class MeetingPoint(NamedTuple):
    """The address and the TCP port at which an engine's processes meet, on its first node."""

    address: str
    port: int


def node_rank(job: EngineJob) -> int:
    """Return the number of this process's node among the engine's nodes."""
    return int(os.environ["SLURM_PROCID"]) if job.nodes > 1 else 0


def meeting_point(job: EngineJob) -> MeetingPoint:
    """Return where the engine's processes meet: published by node rank 0, awaited by the others.

    Raises:
        UserError: node rank 0 published nothing within `engine.start_timeout_seconds`.
        OSError: the interface has no address.
    """
    file = _file(job)
    if node_rank(job) == 0:
        for old in file.parent.glob("meeting.*.json"):
            old.unlink(missing_ok=True)
        point = MeetingPoint(address_of(job.interface), free_port())
        write_atomically(file, json.dumps(point))
        return point
    return published(job, file, "node rank", node_rank(job))


def published(job: EngineJob, file: Path, process: str, rank: int) -> MeetingPoint:
    """Wait for the meeting point that rank 0 of an engine's processes publishes in a file.

    Raises:
        UserError: it is not there after engine.start_timeout_seconds.
    """
    deadline = time.monotonic() + job.engine.start_seconds
    while not file.exists():
        if time.monotonic() > deadline:
            seconds = f"{job.engine.start_seconds} s (engine.start_timeout_seconds)"
            raise UserError(
                f"engine {job.index}, {process} {rank}: {process} 0 has not published "
                f"{file.name} after {seconds}; see its log, or raise the timeout"
            )
        time.sleep(POLL_SECONDS)
    address, port = json.loads(file.read_text())
    return MeetingPoint(address, port)


def _file(job: EngineJob) -> Path:
    """Return the path for this Slurm step: a restarted engine must not read the file before."""
    step = "_".join(os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return job.address.with_name(f"meeting.{step}.json")
