"""The fixtures of the stages' tests."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

OPENED: list[Any] = []  # what the present test opened and does not close itself
SANDBOX_SECRET = "the-parents-own-secret"
SUBREAPER, IS_SUBREAPER = 36, 37


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Close what the test opened: reward workers outlive a test that forgets them."""
    yield
    while OPENED:
        OPENED.pop().close()


@pytest.fixture(scope="module")
def sentinel() -> Iterator[subprocess.Popen[bytes]]:
    """A process beside the sandbox, with a secret: nobody may read it or harm it.

    Orphans become children of this process, so that none can hide.
    """
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(IS_SUBREAPER, ctypes.byref(before), 0, 0, 0)  # where fork servers are used
    libc.prctl(SUBREAPER, 1, 0, 0, 0)
    with subprocess.Popen(["sleep", "300"], env={"BRAID_TEST_SECRET": SANDBOX_SECRET}) as process:
        yield process
        assert process.poll() is None
        process.kill()
    libc.prctl(SUBREAPER, before.value, 0, 0, 0)


def children() -> set[str]:
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found.update((task / "children").read_text().split())
    return found
