"""The files and directories of a run, the locks on them, and who may write to them."""

from __future__ import annotations

import fcntl
import glob
import os
import pwd
import shlex
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from parallel.errors import UserError
from parallel.files import naming, open_file, open_lock, read_text
from pipeline.run.ledger import Ledger
from pipeline.text import shown, warn
from stages.directory import Below, EngineDirectory, StageDirectory

LOCK_TIMEOUT_SECONDS = 0.5
RESULTS_TIMEOUT_SECONDS = 60.0  # of a thousand evaluations that end at once, on a shared disk
PRIVATE = 0o700  # the mode of a run's directory
TRUST_OPTION = "--trust-run"
ROOT = 0  # may write everywhere in any case
OTHERS_WRITE, OTHERS_READ, OTHERS_ENTER = 0o022, 0o044, 0o011
# The files that affect what a command does: the run's, the stages' and the checkpoints.
DECIDING = ("*", "stages/*", "stages/*/*", "stages/*/checkpoints/*", "stages/*/checkpoints/*/*")
RUNS_AS = "code in a run runs as whoever works on the run"


class RunLocked(UserError):
    """Another launcher holds the run or the stage."""


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run, `runs/NAME`."""

    path: Path

    settings_file = Below("run.yaml")
    results = Below("results.json")
    replaced = Below("replaced")  # the outputs of stages that were rerun
    engines = Below("engine")  # of the engines that stay up from stage to stage
    fork_servers = Below("fork_servers")  # their logs
    cluster = Below("cluster.yaml")  # the profile of the cluster that stages were submitted to
    setup_script = Below("setup.sh")  # which stage scripts source before they run a stage
    slurm = Below("slurm")  # the output of Slurm's jobs, and what submits them
    submission = Below("slurm/submit.sh")  # the sbatch commands
    profile_source = Below("slurm/profile")  # the path of the file that `cluster` was read from
    submitting = Below("slurm/submitting")  # exists while Slurm may have jobs not in the ledger
    lock_file = Below("run.lock")

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.path / "ledger.jsonl")

    def output_of(self, job: str) -> Path | None:
        """Return the path of the output of a Slurm job; None if it never started."""
        outputs = sorted(self.slurm.glob(f"*-{glob.escape(job)}.out"))
        return outputs[0] if outputs else None

    def resume_command(self) -> str:
        """Return the command that resumes the run, on its cluster or on this machine."""
        if self.cluster.exists():
            directory = shown(self.path.parent)
            elsewhere = f" --runs-dir {directory}" if directory != "runs" else ""
            return f"braid submit {shown(self.settings_file)}{self._profile()}{elsewhere}"
        return f"braid resume {shown(self.path)}"

    def _profile(self) -> str:
        """Return the option of the profile's file, "" where it is not known or gone.

        `cluster` is a copy of it, and a profile that Slurm refused is fixed in the file.
        """
        try:
            source = Path(read_text(self.profile_source))
            return f" --cluster {shlex.quote(shown(source))}" if source.is_file() else ""
        except (OSError, ValueError):  # or it has no path's text
            return ""

    def engine(self, member: int | str) -> EngineDirectory:
        return EngineDirectory(self.engines / str(member))

    def engines_of_slots(self, count: int) -> list[Path]:
        """Return the directory of the engines of each of `count` slots."""
        if count == 1:
            return [self.engines]
        return [self.engines / f"slot_{slot}" for slot in range(count)]

    def stage(self, name: str) -> StageDirectory:
        return StageDirectory(self.path / "stages" / name)

    def checkpoint_path(self, stage: str, step: int | None = None) -> Path:
        """Return the path of a stage's newest whole checkpoint, or of its checkpoint of a step.

        Raises:
            UserError: the stage has none, or none of that step.
        """
        directory = self.stage(stage)
        checkpoint = directory.newest_checkpoint() if step is None else directory.checkpoint(step)
        if checkpoint is not None:
            return checkpoint.path.absolute()
        message = f"stage {stage} of {shown(self.path)} has no checkpoint"
        if not (steps := [whole.step for whole in directory.whole_checkpoints()]):
            raise UserError(f"{message} yet")
        available = ", ".join(map(str, steps))
        raise UserError(
            f"{message} of step {step}: it has step{'s' * (len(steps) > 1)} {available}"
        )

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
        lock_timeout: float = LOCK_TIMEOUT_SECONDS,
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Hold one stage for this process alone; the caller holds the run's lock, shared or not.

        `check` is called while this waits and may raise.

        Raises:
            RunLocked: another launcher still holds the stage after `lock_timeout` seconds.
        """
        what = f"stage {name} of {shown(self.path)} is"
        with _locked(self.stage(name).lock, what, lock_timeout=lock_timeout, check=check):
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

    @contextmanager
    def lock_results(self) -> Iterator[None]:
        """Hold results.json for this process alone while it is written."""
        what = f"results.json of {shown(self.path)} is"
        with _locked(self.path / "results.lock", what, lock_timeout=RESULTS_TIMEOUT_SECONDS):
            yield

    def is_running(self, stage: str | None = None) -> bool:
        """Return whether a launcher, on any machine whose locks are shared, holds the run alone.

        With a stage: whether one holds that stage.
        """
        path = self.stage(stage).lock if stage else self.lock_file
        try:
            with open_file(path) as file:
                return not try_lock(file.fileno(), fcntl.LOCK_SH)
        except FileNotFoundError:
            return False


@contextmanager
def _locked(
    path: Path,
    what: str,
    shared: bool = False,
    lock_timeout: float = LOCK_TIMEOUT_SECONDS,
    check: Callable[[], None] = lambda: None,
) -> Iterator[int]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(path) as file:
        deadline = time.monotonic() + lock_timeout
        while not try_lock(file.fileno(), fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            # `is_running` in another process holds the lock for an instant.
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


def try_lock(descriptor: int, mode: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file unless another process has it; return whether it is locked."""
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def check_owner(run: RunDirectory, trusted: bool) -> None:
    """Raise UserError where others than this user and root could have written an untrusted run.

    A run contains code: run.yaml names its reward functions, and the stage scripts source its
    setup.sh. What another user puts in the place of a file or of its directory also decides where a
    command writes. Every command that works on a run, or writes or locks in it, therefore checks
    first; those that only read it (`status`, `why`, `logs`, `plan`) do not. The message has the
    command that fixes the permissions.
    """
    if not trusted and (who := exposure(run)) is not None:
        raise UserError(who)


def exposure(run: RunDirectory) -> str | None:
    """Return who else may have written to a run, and the fix; None if nobody."""
    closed = False
    if run.path.is_symlink() and (owner := run.path.lstat().st_uid) not in (os.geteuid(), ROOT):
        who = f"is a link that belongs to {user_name(owner)}"
        return f"{shown(run.path)}: {who}, and {RUNS_AS}; if you trust them, add {TRUST_OPTION}"
    for path, status in _looked_at(run.path):
        mode = status.st_mode & 0o777
        if path == run.path:
            closed = not mode & OTHERS_ENTER
        if status.st_uid not in (os.geteuid(), ROOT):
            who = f"belongs to {user_name(status.st_uid)}"
            return f"{shown(path)}: {who}, and {RUNS_AS}; if you trust them, add {TRUST_OPTION}"
        # In a closed directory a group-writable file, as under umask 002, is harmless. Another
        # user's file is not: that user may still have it open.
        if mode & OTHERS_WRITE and not (closed and path != run.path):
            return (
                f"{shown(path)}: other users may write to it (mode {mode:o}), and {RUNS_AS}; if "
                f"nobody else has, run: chmod -R go-w {shown(run.path)}\n"
                f"or add {TRUST_OPTION} to trust them"
            )
    return None


def check_own(directory: Path) -> None:
    """Raise UserError for a directory beside a bundle that others made, or may write to.

    Raises:
        FileNotFoundError: it does not exist.
    """
    status = directory.lstat()
    where, remove = shown(directory), "; remove it, or choose another place"
    if not stat.S_ISDIR(status.st_mode):
        raise UserError(f"{where}: not a directory{remove}")
    if status.st_uid != os.geteuid():
        raise UserError(f"{where}: belongs to {user_name(status.st_uid)}{remove}")
    if status.st_mode & OTHERS_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        raise UserError(f"{where}: other users may write to it (mode {mode:o}){remove}")


def warn_of_readers(run: RunDirectory) -> None:
    """Warn on standard error if others can read a run.

    Older versions created runs like that; the mode stays, since it may be intended.
    """
    mode = run.path.stat().st_mode & 0o777 if run.path.exists() else 0
    if mode & (OTHERS_READ | OTHERS_ENTER):
        here = shown(run.path)
        private = f"to make it private: chmod 700 {here}"
        warn([f"{here}: other users can read this run (mode {mode:o}); {private}"])


def _looked_at(run: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the run's directory and the files in DECIDING, with their status."""
    try:
        status = run.stat()
    except FileNotFoundError:
        return
    yield run, status
    for path in (path for pattern in DECIDING for path in run.glob(pattern)):
        try:
            yield path, path.stat()
        except OSError:  # removed by a running stage, or a dangling link that its reader reports
            continue


def user_name(user: int) -> str:
    """Return the name of a user's number, or the number where nobody has it."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
