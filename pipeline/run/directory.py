"""Where everything of a run lies on disk."""

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
    newest_whole,
    numbered,
    open_file,
    read_checkpoint,
    read_text,
    whole_checkpoints,
)
from pipeline.config.violations import shown
from pipeline.errors import BraidError

LOCK_PATIENCE_SECONDS = 0.5
PRIVATE = 0o700  # the mode of a run's directory


class RunLocked(BraidError):
    """Another launcher works on the run."""


@dataclass(frozen=True)
class StageDirectory:
    """One stage's folder."""

    path: Path

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def lock(self) -> Path:
        """Held by the launcher that works on the stage."""
        return self.path / "stage.lock"

    @property
    def engines(self) -> Path:
        """The folder of engines that are this stage's alone."""
        return self.path / "engine"

    @property
    def results(self) -> Path:
        """What an evaluation found."""
        return self.path / "results.json"

    @property
    def verdict(self) -> Path:
        """What a gate says of what it measured."""
        return self.path / "verdict.json"

    @property
    def measured(self) -> Path:
        """What an unfinished evaluation has found so far, a file a model."""
        return self.path / "models"

    @property
    def exported(self) -> Path:
        """The Hugging Face checkpoint of an export."""
        return self.path / "huggingface"

    def is_running(self) -> bool:
        """Whether a launcher works on the stage now, as far as locks of its machine reach."""
        return _is_locked(self.lock)

    def job(self, attempt: int) -> Path:
        """What the processes of an attempt read; their logs lie beside it."""
        return self.path / f"attempt_{attempt}" / "job.json"

    def attempts(self) -> int:
        """How many times the stage was tried."""
        return max((number for number, _ in numbered(self.path, "attempt_")), default=0)

    def newest_checkpoint(self) -> Checkpoint | None:
        """The whole checkpoint with the highest step."""
        return newest_whole(self.path / "checkpoints")

    def checkpoint(self, step: int) -> Checkpoint | None:
        """The whole checkpoint of a step."""
        return read_checkpoint(self.path / "checkpoints" / f"step_{step}")

    def whole_steps(self) -> list[int]:
        """The steps of all whole checkpoints, the oldest first."""
        return [found.step for found in whole_checkpoints(self.path / "checkpoints")]

    def ended_early(self) -> str | None:
        """Why the stage is done before its last step, where its newest checkpoint says so."""
        checkpoint = self.newest_checkpoint()
        return ended_early(checkpoint) if checkpoint else None


def ended_early(checkpoint: Checkpoint) -> str | None:
    """Why the stage was done at this checkpoint, before its last step; None where it was not, or
    where state.json is damaged, which is reported when a stage loads it."""
    try:
        state = json.loads(read_text(checkpoint.path / STATE))
    except (OSError, ValueError, RecursionError):
        return None
    found = state.get(ENDED) if isinstance(state, dict) else None
    return found if isinstance(found, str) else None


@dataclass(frozen=True)
class EngineDirectory:
    """One engine's folder."""

    path: Path

    @property
    def job(self) -> Path:
        """What the engine's process reads."""
        return self.path / "engine.json"

    @property
    def log(self) -> Path:
        return self.path / "engine.log"

    @property
    def address(self) -> Path:
        """Where the engine says how to reach it, when it is ready."""
        return self.path / "address.json"

    @property
    def restart(self) -> Path:
        """Where a rank that has given the engine up says why, to have it restarted."""
        return self.path / RESTART_REQUEST


@dataclass(frozen=True)
class RunDirectory:
    """`runs/NAME`."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def settings(self) -> Path:
        return self.path / "run.yaml"

    @property
    def settings_for_programs(self) -> Path:
        return self.path / ".run.json"

    @property
    def stages_for_programs(self) -> Path:
        return self.path / ".stages.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def results(self) -> Path:
        return self.path / "results.json"

    @property
    def replaced(self) -> Path:
        """What stages left that were then made anew."""
        return self.path / "replaced"

    @property
    def fork_servers(self) -> Path:
        """The directory of the fork servers' logs."""
        return self.path / "fork_servers"

    @property
    def engines(self) -> Path:
        """The folder of the engines that stay up from stage to stage."""
        return self.path / "engine"

    @property
    def cluster(self) -> Path:
        """What is said of the cluster that stages were submitted to."""
        return self.path / "cluster.yaml"

    @property
    def setup_script(self) -> Path:
        """What the stage scripts source before they run a stage."""
        return self.path / "setup.sh"

    @property
    def slurm(self) -> Path:
        """What Slurm's jobs printed, and the script that submits them."""
        return self.path / "slurm"

    @property
    def submission(self) -> Path:
        """The script of the commands that submit it."""
        return self.slurm / "submit.sh"

    @property
    def submitting(self) -> Path:
        """There while Slurm may have jobs that the ledger does not name."""
        return self.slurm / "submitting"

    def output_of(self, job: str) -> Path | None:
        """What a job of Slurm's printed, if it began at all."""
        found = sorted(self.slurm.glob(f"*-{glob.escape(job)}.out"))
        return found[0] if found else None

    def to_go_on(self) -> str:
        """The command that continues it: on the cluster that it was submitted to, or here."""
        if self.cluster.exists():
            folder = shown(self.path.parent)
            elsewhere = f" --runs-dir {folder}" if folder != "runs" else ""
            return f"braid submit {shown(self.settings)}{elsewhere}"
        return f"braid resume {shown(self.path)}"

    def engine(self, index: int) -> EngineDirectory:
        return EngineDirectory(self.engines / str(index))

    def stage(self, name: str) -> StageDirectory:
        return StageDirectory(self.path / "stages" / name)

    def create(self) -> None:
        """Create the directory where there is none, for this user alone: nobody else gets to what
        is in it, whatever the modes of the files (mkdir's mode, so that no umask opens it)."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=PRIVATE, exist_ok=True)

    @contextmanager
    def lock(self, shared: bool = False) -> Iterator[None]:
        """Hold the run for this process alone, or `shared` with others that each hold a stage; the
        kernel lets go when the process ends.

        Raises:
            RunLocked: another launcher holds it.
        """
        self.create()
        with _locked(self._lock, f"{shown(self.path)} is", shared):
            yield

    @contextmanager
    def lock_stage(
        self,
        name: str,
        patience: float = LOCK_PATIENCE_SECONDS,
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Hold one stage for this process alone; the caller has the run's lock, shared or not.
        `check`, called while this waits, may raise.

        Raises:
            RunLocked: another launcher works on the stage, and went on for `patience` seconds.
        """
        what = f"stage {name} of {shown(self.path)} is"
        with _locked(self.stage(name).lock, what, patience=patience, check=check):
            yield

    @contextmanager
    def lock_submission(self) -> Iterator[int]:
        """Submit stages of the run for this process alone; gives the lock's descriptor, for others
        to hold that may live longer.

        Raises:
            RunLocked: another one does.
        """
        with _locked(self.path / "submit.lock", f"{shown(self.path)} is") as descriptor:
            yield descriptor

    def is_running(self) -> bool:
        """Whether a launcher has the run for itself now."""
        return _is_locked(self._lock)

    @property
    def _lock(self) -> Path:
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
    with path.open("a+") as file:
        deadline = time.monotonic() + patience
        while not _try_lock(file.fileno(), fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            # `_is_locked` holds the lock for an instant when it looks.
            if time.monotonic() > deadline:
                file.seek(0)
                holder = file.read().strip() or "braid stage or braid submit: see braid status"
                raise RunLocked(f"{what} being run by {holder}")
            check()
            time.sleep(0.05)
        file.truncate(0)
        if not shared:  # of several, none is to be named alone
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
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
