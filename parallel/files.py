"""Files that are replaced whole, and which checkpoints are whole; never imports torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CHECKSUMS = "checksums.json"  # written last of all into a checkpoint
STATE = "state.json"  # the loop's own state in a checkpoint
ENDED = "ended"  # in it: why the stage is done before the last of its steps


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: `files` holds the SHA-256 of each, `digest` that of them all."""

    path: Path
    step: int
    digest: str
    files: dict[str, str]


def write_atomically(path: Path, text: str) -> None:
    """Replace the file in one step: whenever we are killed, a reader sees the old text or the new.

    Raises:
        OSError: such as a full disk; the old file then still stands.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path), temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError that lacks it, as that of a write to a full disk does."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def checkpoint_folders(directory: Path) -> list[Path]:
    """Every `step_N` in `directory`, whole or not, oldest first."""
    # Not what a person has put aside: `step_20.bak`.
    found = [path for path in directory.glob("step_*") if _number(path) is not None]
    return sorted(found, key=lambda path: (_number(path), path))


def whole_checkpoints(directory: Path) -> list[Checkpoint]:
    """The complete checkpoints `step_N` in `directory`, oldest first."""
    return [whole for path in checkpoint_folders(directory) if (whole := read_checkpoint(path))]


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint at `path`, or None where that is none, or not a whole one."""
    step = _number(path)
    if step is None:
        return None
    try:
        sums = json.loads((path / CHECKSUMS).read_text())
        return Checkpoint(path, step, str(sums["digest"]), dict(sums["files"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def digest_of(files: dict[str, str]) -> str:
    """The digest of a checkpoint whose files have these checksums."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _number(path: Path) -> int | None:
    digits = path.name.removeprefix("step_")
    return int(digits) if digits.isdecimal() else None
