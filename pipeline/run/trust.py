"""Whose run it is: a run directory that other users could have written is refused.

A run decides what its commands do: run.yaml names the functions of its rewards, the stage scripts
source its setup.sh. Whoever continues, evaluates or exports it therefore trusts all who may write
to it. What only looks at a run (`status`, `why`, `logs`, `plan`) does not ask.
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
# What decides in a run: its own files, those of stages, and checkpoints.
DECIDING = ("*", "stages/*", "stages/*/*", "stages/*/checkpoints/*", "stages/*/checkpoints/*/*")
RUNS_AS = "what is in a run runs as whoever works on it"


def check_owner(run: RunDirectory, trusted: bool) -> None:
    """Raise BraidError where users other than this one and root own a run or may write to it, and
    it is not `trusted`; its message has what to type."""
    if not trusted and (found := exposure(run)) is not None:
        raise BraidError(found)


def exposure(run: RunDirectory) -> str | None:
    """Return who else may have written what is in a run, and what to do; None where nobody has."""
    closed = False
    for path, status in _looked_at(run.path):
        mode = status.st_mode & 0o777
        if path == run.path:
            closed = not mode & OTHERS_ENTER
        if status.st_uid not in (os.geteuid(), ROOT):
            who = f"belongs to {_name(status.st_uid)}"
            return f"{shown(path)}: {who}, and {RUNS_AS}; if you trust them, add {OPTION}"
        # In a closed directory a file that the group may write to, as under a umask of 002, is no
        # harm; one that belongs to somebody else is, who may still have it open.
        if mode & OTHERS_WRITE and not (closed and path != run.path):
            return (
                f"{shown(path)}: other users may write to it (mode {mode:o}), and {RUNS_AS}; if "
                f"nobody else has, type: chmod -R go-w {shown(run.path)}\n"
                f"or add {OPTION} to trust them"
            )
    return None


def warn_of_readers(run: RunDirectory) -> None:
    """Say on standard error that others can read a run, as those of older versions could be; it is
    left so, since it may be shared on purpose."""
    mode = run.path.stat().st_mode & 0o777 if run.path.exists() else 0
    if mode & (OTHERS_READ | OTHERS_ENTER):
        here = shown(run.path)
        say(
            f"{here}: other users can read this run (mode {mode:o}); to make it private: "
            f"chmod 700 {here}",
            file=sys.stderr,
        )


def _looked_at(run: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The run's directory, and what decides in it."""
    try:
        found = run.stat()
    except FileNotFoundError:
        return
    yield run, found
    for path in (each for pattern in DECIDING for each in run.glob(pattern)):
        try:
            yield path, path.stat()
        except OSError:  # gone with a stage that runs, or a link that whoever reads it will name
            continue


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
