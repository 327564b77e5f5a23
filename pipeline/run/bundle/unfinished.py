"""The directory that a bundle is written or unpacked in, before it has its name."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from parallel.errors import UserError
from parallel.files import open_lock
from pipeline.run.directory import PRIVATE, check_own, try_lock
from pipeline.text import shown

INDEX, CONFIG = "bundle.json", "config.yaml"  # of every bundle
ARCHIVES = (".tar.gz", ".tgz")
LOCK = "lock"
POLL_SECONDS = 0.05


@contextmanager
def unfinished(to: Path, timeout: float) -> Iterator[Path]:
    """Hold the directory `.NAME.unfinished` beside `to` for this process alone; remove it at last.

    The kernel releases the lock of a process that is killed, and the next one takes the directory
    over with what is in it. Whoever can write in the directory of `to` can guess the name: one that
    is not this user's alone is refused.

    Raises:
        UserError: another process still holds it after `timeout` seconds; or it is not this user's.
    """
    path = to.with_name(f".{to.name}.unfinished")
    deadline = time.monotonic() + timeout
    while (file := _locked(path)) is None:
        if time.monotonic() > deadline:
            holder = ""
            with suppress(OSError):
                holder = (path / LOCK).read_text(errors="replace").strip()
            raise UserError(
                f"{shown(to)} is being written by {holder or 'another process'}; wait for it"
            )
        time.sleep(POLL_SECONDS)
    with file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _locked(path: Path) -> BinaryIO | None:
    """Return the locked file of a directory, which is created; None where another has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=PRIVATE)
    lock = path / LOCK
    try:
        check_own(path)
        file = open_lock(lock)
    except FileNotFoundError:  # its holder has just removed the directory
        return None
    # The holder may also have removed the file between its opening and its locking here.
    with suppress(FileNotFoundError):
        if try_lock(file.fileno()) and lock.stat().st_ino == os.fstat(file.fileno()).st_ino:
            return file
    file.close()
    return None
