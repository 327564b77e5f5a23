"""Starts and ends the processes that score: `python -m stages.domains.reward_nursery DESCRIPTOR`.

It imports what the rewards need, once and without torch, and forks a worker whenever the pool asks,
which takes milliseconds. It runs no reward itself and so always answers. When the pool is gone it
ends, and the kernel ends its workers, even those that hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import NoReturn

from stages.domains.reward_worker import Clock, Setup, serve
from stages.domains.rewards.registry import modules

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def main() -> None:
    """Fork and end workers as the pool asks, until it is gone."""
    control = Connection(int(sys.argv[1]))
    setup: Setup = control.recv()
    settings = [each for rewards in setup.rewards.values() for each in rewards.values()]
    for module in modules(settings):
        with contextlib.suppress(Exception):  # a worker says what is wrong with it
            import_module(module)
    gc.freeze()  # else collecting garbage would give every worker pages of its own
    with contextlib.suppress(EOFError, OSError):
        while True:
            wanted: int | None = control.recv()
            control.send(_forked(control, setup) if wanted is None else _ended(wanted))


def _forked(control: Connection, setup: Setup) -> int:
    """The process id of a new worker, on the two descriptors that the pool sends."""
    theirs, shared = recv_handle(control), recv_handle(control)
    process = os.fork()
    if process == 0:
        control.close()
        _work(setup, theirs, shared)
    os.close(theirs)
    os.close(shared)
    return process


def _ended(process: int) -> int:
    """Kill a worker and what it started; its exit status, or minus the signal that ended it."""
    for each in [*_descendants(process), process]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _work(setup: Setup, descriptor: int, shared: int) -> NoReturn:
    status = 1
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for ignored in (signal.SIGINT, signal.SIGTERM):  # the stage decides when it ends
            signal.signal(ignored, signal.SIG_IGN)
        limit = setup.settings.memory_mebibytes << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        serve(setup, Connection(descriptor), Clock(shared))
        status = 0
    except (EOFError, OSError):
        status = 0  # the pool is gone
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _descendants(process: int) -> list[int]:
    """Processes that a process started, those that they started, and so on."""
    try:
        text = Path(f"/proc/{process}/task/{process}/children").read_text()
    except OSError:  # it has ended, or the kernel does not list them
        return []
    children = [int(number) for number in text.split()]
    return [*children, *(each for child in children for each in _descendants(child))]


if __name__ == "__main__":
    main()
