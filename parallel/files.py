"""Files that are replaced whole; never imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
