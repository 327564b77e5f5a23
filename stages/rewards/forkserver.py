"""The process that forks and kills reward workers: `python -m stages.rewards.forkserver FD`.

It imports the rewards' heavy modules once, without torch, and forks a worker in milliseconds. It
runs no reward itself and so always answers. When the pool is gone it kills its workers, even those
that hang, and all processes that rewards have started; where it is killed, the kernel kills its
workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
import time
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import NoReturn

from stages.rewards.registry import imports
from stages.rewards.worker import Clock, Setup, serve

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
REAPING_SECONDS = 1.0  # between two rounds of reaping
ENDING_ROUNDS, ENDING_SECONDS = 100, 0.01  # of killing processes that still start others
_libc = ctypes.CDLL(None)


def main() -> None:
    """Fork and kill workers as the pool asks, until it is gone.

    As a subreaper this process becomes the parent of what rewards leave, so that none outlives it.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the stage decides when it ends
        signal.signal(ignored, signal.SIG_IGN)
    control = Connection(int(sys.argv[1]))
    setup: Setup = control.recv()
    settings = [each for rewards in setup.rewards.values() for each in rewards.values()]
    for module in imports(settings):
        with contextlib.suppress(Exception):  # a worker reports the error
            import_module(module)
    gc.freeze()  # else garbage collection would copy shared pages into every worker
    workers: set[int] = set()
    with contextlib.suppress(EOFError, OSError):
        while True:
            while not control.poll(REAPING_SECONDS):
                _reap(_children(os.getpid()) - workers)
            wanted: int | None = control.recv()
            if wanted is None:
                process = _forked(control, setup)
                workers.add(process)
                control.send(process)
            else:
                control.send(_killed(wanted))
                workers.remove(wanted)
    _end_all()


def _forked(control: Connection, setup: Setup) -> int:
    """Return the process id of a new worker on the two descriptors that the pool sends."""
    theirs, shared = recv_handle(control), recv_handle(control)
    process = os.fork()
    if process == 0:
        control.close()
        _work(setup, theirs, shared)
    os.close(theirs)
    os.close(shared)
    return process


def _killed(process: int) -> int:
    """Kill a worker and its descendants; return its exit status, or minus its signal."""
    for each in [*_descendants(process), process]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _work(setup: Setup, descriptor: int, shared: int) -> NoReturn:
    status = 1
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        limit = setup.settings.memory_mebibytes << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        connection = Connection(descriptor)  # open until the end, which the pool waits for
        serve(setup, connection, Clock(shared))
        status = 0
    except (EOFError, OSError):
        status = 0  # the pool is gone
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end_all() -> None:
    """Kill all descendants of this process."""
    for _ in range(ENDING_ROUNDS):
        found = _descendants(os.getpid())
        if not found:
            return
        for each in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        time.sleep(ENDING_SECONDS)
        _reap(_children(os.getpid()))


def _reap(processes: set[int]) -> None:
    """Reap the children that have exited."""
    for each in processes:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(each, os.WNOHANG)


def _descendants(process: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    children = _children(process)
    return [*children, *(each for child in children for each in _descendants(child))]


def _children(process: int) -> set[int]:
    try:
        threads = Path(f"/proc/{process}/task").iterdir()
        return {
            int(child) for thread in threads for child in (thread / "children").read_text().split()
        }
    except OSError:  # it has ended, or the kernel does not list them
        return set()


if __name__ == "__main__":
    main()
