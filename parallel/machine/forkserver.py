"""The fork server: a process that imports a program's packages once and forks it on request.

    python -m parallel.machine.forkserver DESCRIPTOR MODULE

DESCRIPTOR is a socket to the launcher, MODULE imports everything that the program needs. These
imports take a rank 8 to 10 s and an engine 15 to 20 s; a fork takes 20 ms.

The standard library's `multiprocessing.forkserver` does not do: it blocks the launcher without a
bound while it imports, prints on the launcher's terminal, and stays the parent of its forks, whose
exit statuses are lost when it dies. Here the launcher (a subreaper, see prctl(2)) adopts the forked
processes, and killing this server prevents later forks only.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

from parallel.errors import STATUS_DESCRIPTOR

LARGEST_REQUEST = 1 << 20  # bytes
ADOPTION_SECONDS = 10.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
prctl = ctypes.CDLL(None).prctl


def main() -> None:
    """Import argv[2], then fork whenever the launcher asks, until the launcher is gone.

    In a forked process, run the requested program and return when it ends.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    import_module(sys.argv[2])
    check_forkable()
    gc.collect()
    gc.freeze()  # a garbage collection would copy the shared pages in every fork
    while True:
        # One message: the request, the link to the launcher, the log, and the status pipe.
        message, (*descriptors,), _, _ = socket.recv_fds(control, LARGEST_REQUEST, 3)
        if not message:
            return  # the launcher is gone
        if (intermediate := os.fork()) == 0:
            if os.fork() > 0:
                os._exit(0)  # the launcher, a subreaper, then adopts the grandchild
            control.close()
            request: dict[str, Any] = json.loads(message)
            _become(request, *descriptors)
            import_module(request["module"]).main()
            return
        os.waitpid(intermediate, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def check_forkable() -> None:
    """Raise RuntimeError where a fork would not work.

    Threads do not survive a fork, while locks that they hold do; and CUDA cannot be used in a fork
    after it was initialized.
    """
    names = sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    if len(names) > 1:
        raise RuntimeError(f"an import has started threads: {names}")
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError("an import has initialized CUDA")


def _become(request: dict[str, Any], link_descriptor: int, output: int, status: int) -> None:
    """Set this process up as exec by the launcher would have; exit where the launcher is gone."""
    os.setsid()
    deadline = time.monotonic() + ADOPTION_SECONDS
    while os.getppid() != request["launcher"] and time.monotonic() < deadline:
        time.sleep(0.001)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != request["launcher"]:
        os._exit(1)
    try:
        with socket.socket(fileno=link_descriptor) as link:
            link.send(b"%d" % os.getpid())
            if not link.recv(1):  # the launcher has stopped waiting, and does not know of us
                os._exit(1)
    except OSError:
        os._exit(1)
    sys.argv = [request["module"], *request["arguments"]]
    print(os.getpid(), "runs", *sys.argv, flush=True)  # in the server's log still
    # The title that `ps` shows. Set before the environment changes: setproctitle locates its
    # memory by the environment.
    setproctitle(" ".join([sys.executable, "-m", *sys.argv]))
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.close(output)
    if request["cores"] is not None:
        os.sched_setaffinity(0, request["cores"])
    torch: Any = sys.modules.get("torch")
    if torch is not None:  # OpenMP counted the server's cores when it was loaded
        threads = request["environment"].get("OMP_NUM_THREADS", "").split(",")[0]
        torch.set_num_threads(int(threads) if threads.isdecimal() else len(os.sched_getaffinity(0)))
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ[STATUS_DESCRIPTOR] = str(status)


if __name__ == "__main__":
    main()
