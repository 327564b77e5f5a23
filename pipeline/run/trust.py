"""The check that no other user could have written a run directory.

A run contains code: run.yaml names its reward functions, and the stage scripts source its setup.sh.
Commands that resume, evaluate or export a run therefore trust everyone who may write to it, and
check first. Commands that only read it (`status`, `why`, `logs`, `plan`) do not check.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Iterator
from pathlib import Path

from pipeline.config.violations import shown
from pipeline.errors import BraidError
from pipeline.run.directory import RunDirectory
from pipeline.text import say

OPTION = "--trust-run"
ROOT = 0  # may write everywhere in any case
OTHERS_WRITE, OTHERS_READ, OTHERS_ENTER = 0o022, 0o044, 0o011
# The files that affect what a command does: the run's, the stages' and the checkpoints.
DECIDING = ("*", "stages/*", "stages/*/*", "stages/*/checkpoints/*", "stages/*/checkpoints/*/*")
RUNS_AS = "code in a run runs as whoever works on the run"


def check_owner(run: RunDirectory, trusted: bool) -> None:
    """Raise BraidError where others than this user and root could have written an untrusted run.

    The message has the command that fixes the permissions.
    """
    if not trusted and (found := exposure(run)) is not None:
        raise BraidError(found)


def exposure(run: RunDirectory) -> str | None:
    """Return who else may have written to a run, and the fix; None if nobody."""
    closed = False
    for path, status in _looked_at(run.path):
        mode = status.st_mode & 0o777
        if path == run.path:
            closed = not mode & OTHERS_ENTER
        if status.st_uid not in (os.geteuid(), ROOT):
            who = f"belongs to {_name(status.st_uid)}"
            return f"{shown(path)}: {who}, and {RUNS_AS}; if you trust them, add {OPTION}"
        # In a closed directory a group-writable file, as under umask 002, is harmless. Another
        # user's file is not: that user may still have it open.
        if mode & OTHERS_WRITE and not (closed and path != run.path):
            return (
                f"{shown(path)}: other users may write to it (mode {mode:o}), and {RUNS_AS}; if "
                f"nobody else has, run: chmod -R go-w {shown(run.path)}\n"
                f"or add {OPTION} to trust them"
            )
    return None


def warn_of_readers(run: RunDirectory) -> None:
    """Warn on standard error if others can read a run.

    Older versions created runs like that; the mode stays, since it may be intended.
    """
    mode = run.path.stat().st_mode & 0o777 if run.path.exists() else 0
    if mode & (OTHERS_READ | OTHERS_ENTER):
        here = shown(run.path)
        say(
            f"{here}: other users can read this run (mode {mode:o}); to make it private: "
            f"chmod 700 {here}",
            file=sys.stderr,
        )


def _looked_at(run: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the run's directory and the files in DECIDING, with their status."""
    try:
        found = run.stat()
    except FileNotFoundError:
        return
    yield run, found
    for path in (each for pattern in DECIDING for each in run.glob(pattern)):
        try:
            yield path, path.stat()
        except OSError:  # removed by a running stage, or a dangling link that its reader reports
            continue


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
