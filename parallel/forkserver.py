"""The fork server: a process that imports a program's packages once and forks it on request.

    python -m parallel.forkserver DESCRIPTOR MODULE

DESCRIPTOR is a socket to the launcher, MODULE what imports everything that the program needs. A
rank pays 8 to 10 s for these imports and an engine 15 to 20 s; a fork takes 20 ms.

Not the standard library's `multiprocessing.forkserver`: that one blocks the launcher without a
bound while it imports, prints on the launcher's terminal, and stays the parent of what it forks, so
that with it their exit statuses are lost. Here a forked process is handed to the launcher (a
subreaper, see prctl(2)), and whoever kills this server ends nothing but later forks.
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

LARGEST_REQUEST = 1 << 20  # bytes
ADOPTION_SECONDS = 10.0

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def main() -> None:
    """Import argv[2], then fork whenever the launcher asks, until it is gone.

    In a forked process this runs the program that was asked for and returns when it ends.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    import_module(sys.argv[2])
    check_forkable()
    gc.collect()
    gc.freeze()  # else collecting garbage would give every fork pages of its own
    request = _serve(control)
    import_module(request["module"]).main()


def check_forkable() -> None:
    """Raise RuntimeError where a fork would not work: a thread is gone in it, which may hold a
    lock, and CUDA refuses to be used in it."""
    threads = list(Path("/proc/self/task").iterdir())
    if len(threads) > 1:
        names = sorted((each / "comm").read_text().strip() for each in threads)
        raise RuntimeError(f"an import has started threads: {names}")
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError("an import has initialized CUDA")


def _serve(control: socket.socket) -> dict[str, Any]:
    """Return in a forked process, which is the launcher's child by then, with its request."""
    while True:
        # One message: what to run, the link to the launcher, where to print, and its status pipe.
        message, (*descriptors,), _, _ = socket.recv_fds(control, LARGEST_REQUEST, 3)
        if not message:
            sys.exit(0)  # the launcher is gone
        if (intermediate := os.fork()) == 0:
            if os.fork() > 0:
                os._exit(0)  # so that the launcher, a subreaper, becomes the other one's parent
            control.close()
            request: dict[str, Any] = json.loads(message)
            _become(request, *descriptors)
            return request
        os.waitpid(intermediate, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(request: dict[str, Any], link_descriptor: int, output: int, status: int) -> None:
    """Make this process what the launcher would have started with exec; exit where it is gone."""
    os.setsid()
    deadline = time.monotonic() + ADOPTION_SECONDS
    while os.getppid() != request["launcher"] and time.monotonic() < deadline:
        time.sleep(0.001)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != request["launcher"]:
        os._exit(1)
    with socket.socket(fileno=link_descriptor) as link:
        try:
            link.send(b"%d" % os.getpid())
            if not link.recv(1):  # the launcher has stopped waiting: nothing must run that it
                os._exit(1)  # does not know of
        except OSError:
            os._exit(1)
    sys.argv = [request["module"], *request["arguments"]]
    print(os.getpid(), "runs", *sys.argv, flush=True)  # in the server's log still
    # What `ps` shows. Before the environment changes, by which setproctitle finds its memory.
    setproctitle(" ".join([sys.executable, "-m", *sys.argv]))
    for standard in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(output, standard)
    os.close(output)
    if request["cores"] is not None:
        os.sched_setaffinity(0, request["cores"])
    torch: Any = sys.modules.get("torch")
    if torch is not None:  # OpenMP counted the server's cores when it was loaded
        wanted = request["environment"].get("OMP_NUM_THREADS", "").split(",")[0]
        torch.set_num_threads(int(wanted) if wanted.isdecimal() else len(os.sched_getaffinity(0)))
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ[request["status_variable"]] = str(status)


if __name__ == "__main__":
    main()
