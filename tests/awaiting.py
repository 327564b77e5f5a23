"""Waiting for what other processes do, and whether they still live."""

import time
from collections.abc import Callable
from pathlib import Path

# For whatever ends unless it hangs, however busy the machine is: no test passes or fails by how
# many others run beside it.
PATIENCE_SECONDS = 600


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
