"""The files and directories of a run, and the locks on them."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from parallel.files import (
    ENDED,
    RESTART_REQUEST,
    STATE,
    Checkpoint,
    naming,
    newest_whole,
    numbered,
    open_file,
    read_checkpoint,
    read_text,
    whole_checkpoints,
)
from pipeline.config.violations import shown
from pipeline.errors import BraidError
from pipeline.run.ledger import Ledger

LOCK_PATIENCE_SECONDS = 0.5
PRIVATE = 0o700  # the mode of a run's directory


class RunLocked(BraidError):
    """Another launcher holds the run or the stage."""


@dataclass(frozen=True)
class StageDirectory:
    """The directory of one stage."""

    path: Path

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def lock(self) -> Path:
        """The lock that the launcher of the stage holds."""
        return self.path / "stage.lock"

    @property
    def engines(self) -> Path:
        """The directory of the engines that serve only this stage."""
        return self.path / "engine"

    @property
    def results(self) -> Path:
        """The accuracies that an evaluation or a gate measured."""
        return self.path / "results.json"

    @property
    def verdict(self) -> Path:
        """The verdict of a gate on what it measured."""
        return self.path / "verdict.json"

    @property
    def measured(self) -> Path:
        """The accuracies that an unfinished evaluation has measured so far, one file per model."""
        return self.path / "models"

    @property
    def exported(self) -> Path:
        """The Hugging Face checkpoint of an export."""
        return self.path / "huggingface"

    def is_running(self) -> bool:
        """Return whether a launcher holds the stage, on any machine whose file locks are shared."""
        return _is_locked(self.lock)

    def job(self, attempt: int) -> Path:
        """Return the path of an attempt's job; the logs of its processes are beside it."""
        return self.path / f"attempt_{attempt}" / "job.json"

    def attempts(self) -> int:
        """Return the number of attempts so far."""
        return max((number for number, _ in numbered(self.path, "attempt_")), default=0)

    def newest_checkpoint(self) -> Checkpoint | None:
        """Return the whole checkpoint with the highest step."""
        return newest_whole(self.path / "checkpoints")

    def checkpoint(self, step: int) -> Checkpoint | None:
        """Return the whole checkpoint of a step."""
        return read_checkpoint(self.path / "checkpoints" / f"step_{step}")

    def whole_steps(self) -> list[int]:
        """Return the steps of all whole checkpoints, the oldest first."""
        return [found.step for found in whole_checkpoints(self.path / "checkpoints")]

    def ended_early(self) -> str | None:
        """Return why the stage stopped before its last step, from its newest checkpoint."""
        checkpoint = self.newest_checkpoint()
        return ended_early(checkpoint) if checkpoint else None


def ended_early(checkpoint: Checkpoint) -> str | None:
    """Return why the stage stopped at this checkpoint before its last step; None if it did not.

    A damaged state.json gives None too: the stage that loads it raises the error.
    """
    try:
        state = json.loads(read_text(checkpoint.path / STATE))
    except (OSError, ValueError, RecursionError):
        return None
    found = state.get(ENDED) if isinstance(state, dict) else None
    return found if isinstance(found, str) else None


@dataclass(frozen=True)
class EngineDirectory:
    """The directory of one engine."""

    path: Path

    @property
    def job(self) -> Path:
        """The job that the engine's process reads."""
        return self.path / "engine.json"

    @property
    def log(self) -> Path:
        return self.path / "engine.log"

    @property
    def address(self) -> Path:
        """The address that the engine writes when it is ready."""
        return self.path / "address.json"

    @property
    def restart(self) -> Path:
        """The reason that a rank writes to request the restart of an engine."""
        return self.path / RESTART_REQUEST


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run, `runs/NAME`."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def settings_file(self) -> Path:
        return self.path / "run.yaml"

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.path / "ledger.jsonl")

    @property
    def results(self) -> Path:
        return self.path / "results.json"

    @property
    def replaced(self) -> Path:
        """The directory of the outputs of stages that were rerun."""
        return self.path / "replaced"

    @property
    def fork_servers(self) -> Path:
        """The directory of the fork servers' logs."""
        return self.path / "fork_servers"

    @property
    def engines(self) -> Path:
        """The directory of the engines that stay up from stage to stage."""
        return self.path / "engine"

    @property
    def cluster(self) -> Path:
        """The profile of the cluster that stages were submitted to."""
        return self.path / "cluster.yaml"

    @property
    def setup_script(self) -> Path:
        """The script that stage scripts source before they run a stage."""
        return self.path / "setup.sh"

    @property
    def slurm(self) -> Path:
        """The directory of the output of Slurm's jobs and of the script that submits them."""
        return self.path / "slurm"

    @property
    def submission(self) -> Path:
        """The script of the sbatch commands."""
        return self.slurm / "submit.sh"

    @property
    def submitting(self) -> Path:
        """A file that exists while Slurm may have jobs that the ledger does not name."""
        return self.slurm / "submitting"

    def output_of(self, job: str) -> Path | None:
        """Return the path of the output of a Slurm job; None if it never started."""
        found = sorted(self.slurm.glob(f"*-{glob.escape(job)}.out"))
        return found[0] if found else None

    def resume_command(self) -> str:
        """Return the command that resumes the run, on its cluster or on this machine."""
        if self.cluster.exists():
            directory = shown(self.path.parent)
            elsewhere = f" --runs-dir {directory}" if directory != "runs" else ""
            return f"braid submit {shown(self.settings_file)}{elsewhere}"
        return f"braid resume {shown(self.path)}"

    def engine(self, index: int) -> EngineDirectory:
        return EngineDirectory(self.engines / str(index))

    def stage(self, name: str) -> StageDirectory:
        return StageDirectory(self.path / "stages" / name)

    def create(self) -> None:
        """Create the directory with access for this user alone, unless it exists."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Set at creation, not by a later chmod, so that nobody else ever has access.
        self.path.mkdir(mode=PRIVATE, exist_ok=True)

    @contextmanager
    def lock(self, shared: bool = False) -> Iterator[None]:
        """Hold the run for this process alone, or `shared` with others that each hold a stage.

        The kernel releases the lock when the process ends.

        Raises:
            RunLocked: another launcher holds it.
        """
        self.create()
        with _locked(self.lock_file, f"{shown(self.path)} is", shared):
            yield

    @contextmanager
    def lock_stage(
        self,
        name: str,
        patience: float = LOCK_PATIENCE_SECONDS,
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Hold one stage for this process alone; the caller holds the run's lock, shared or not.

        `check` is called while this waits and may raise.

        Raises:
            RunLocked: another launcher still holds the stage after `patience` seconds.
        """
        what = f"stage {name} of {shown(self.path)} is"
        with _locked(self.stage(name).lock, what, patience=patience, check=check):
            yield

    @contextmanager
    def lock_submission(self) -> Iterator[int]:
        """Hold the run's submissions for this process alone; yield the lock's descriptor.

        A process that inherits the descriptor keeps the lock when this one is killed.

        Raises:
            RunLocked: another process is submitting.
        """
        with _locked(self.path / "submit.lock", f"{shown(self.path)} is") as descriptor:
            yield descriptor

    def is_running(self) -> bool:
        """Return whether a launcher holds the run alone."""
        return _is_locked(self.lock_file)

    @property
    def lock_file(self) -> Path:
        return self.path / "run.lock"


@contextmanager
def _locked(
    path: Path,
    what: str,
    shared: bool = False,
    patience: float = LOCK_PATIENCE_SECONDS,
    check: Callable[[], None] = lambda: None,
) -> Iterator[int]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        deadline = time.monotonic() + patience
        while not _try_lock(file.fileno(), fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            # `_is_locked` in another process holds the lock for an instant.
            if time.monotonic() > deadline:
                file.seek(0)
                holder = (
                    file.read().decode(errors="replace").strip()
                    or "braid stage or braid submit: see braid status"
                )
                raise RunLocked(f"{what} being run by {holder}")
            check()
            time.sleep(0.05)
        file.truncate(0)
        if not shared:  # the name of one of several holders would mislead
            with naming(path):
                file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield file.fileno()


def _is_locked(path: Path) -> bool:
    try:
        with open_file(path) as file:
            return not _try_lock(file.fileno(), fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _try_lock(descriptor: int, mode: int) -> bool:
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
