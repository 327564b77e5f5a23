"""The process outside the sandbox, which makes its namespaces, watches it, and reports the outcome.

`stages.rewards.sandbox` starts one for each program. It reads a request from standard input and
writes the outcome to standard output, both by `marshal`, since both ends are trusted. Exit status
1 with a line on standard error is an error of the sandbox.
"""

from __future__ import annotations

import errno
import marshal
import os
import select
import sys
import time

from stages.rewards.containment import jail, kernel

TYPE_CHECKING = False  # as typing's, whose import costs more than a run should
if TYPE_CHECKING:
    from typing import Any

WATCH_SECONDS = 0.02
CHUNK = 1 << 16
ERROR_BYTES = 8192  # of the program's error output that are kept
TICKS = os.sysconf("SC_CLK_TCK")
NAMESPACES = (
    kernel.NEW_CGROUP | kernel.NEW_HOST_NAME | kernel.NEW_IPC | kernel.NEW_PIDS | kernel.NEW_NETWORK
)
NOBODY, EXAMINER = 65534, 65533
# Without a user namespace the limit on processes counts all of a user's, so each run has separate
# users, far above those of people.
OWN_USERS = 0x60000000
# Refusals by the kernel's settings, by a container's filter, or by a limit on namespaces.
REFUSALS = (errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOSPC, errno.ENOSYS, errno.EUSERS)


def main() -> None:
    """Serve one request."""
    kernel.die_with_parent()
    request: dict[str, Any] = marshal.loads(sys.stdin.buffer.read())
    try:
        outcome = _run(request)
    except OSError as error:
        sys.exit(str(error.args[-1]))
    sys.stdout.buffer.write(marshal.dumps(outcome))


def _run(request: dict[str, Any]) -> dict[str, Any]:
    request["users"] = _enter_namespaces()
    ends = {name: os.pipe() for name in ("output", "errors", "verdicts", "report")}
    first_process = os.fork()
    if first_process == 0:
        for reading, _ in ends.values():
            os.close(reading)
        jail.live(request, {name: writing for name, (_, writing) in ends.items()})
    # Held open here, no pipe would ever end.
    for _, writing in ends.values():
        os.close(writing)
    started = time.monotonic()
    pipes = {reading: name for name, (reading, _) in ends.items()}
    captured, cause = _watch(request, first_process, pipes, started)
    report = captured["report"].decode(errors="replace").splitlines()
    for line in report:
        if line.startswith("failed "):
            raise OSError(line.removeprefix("failed "))
    if not report and cause is None:
        raise OSError("the sandbox's first process was killed; is the host out of memory?")
    return {
        "cause": cause,
        "status": os.waitstatus_to_exitcode(int(report[0].split()[1])) if report else None,
        "output": bytes(captured["output"]),
        "errors": bytes(captured["errors"][-ERROR_BYTES:]),
        "verdicts": bytes(captured["verdicts"]),
        "seconds": time.monotonic() - started,
    }


def _enter_namespaces() -> dict[str, int]:
    """Leave the host's namespaces; return the users to run as, {} where there is only one.

    Root may map any user into a namespace, other users only themselves. Root needs no user
    namespace where they are refused.
    """
    user = os.geteuid()
    root = user == 0
    ready, go = os.pipe()
    writer = os.fork()
    if writer == 0:  # stays outside, where root has the right to map users
        os.close(go)
        os._exit(_write_maps(os.getppid(), user, root) if os.read(ready, 1) else 0)
    os.close(ready)
    try:
        kernel.unshare(kernel.NEW_USERS | NAMESPACES)
    except OSError as error:
        os.close(go)
        os.waitpid(writer, 0)
        return _enter_as_root(root, error)
    # Only now is there a namespace whose users the writer can map.
    os.write(go, b"!")
    os.close(go)
    mapped = os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1])
    if mapped == MAPPED_NONE:
        raise OSError("cannot map users into a user namespace")
    return {"program": NOBODY, "examiner": EXAMINER} if mapped == MAPPED_MANY else {}


MAPPED_MANY, MAPPED_ONE, MAPPED_NONE = range(3)


def _write_maps(process: int, user: int, root: bool) -> int:
    if root:
        many = f"0 0 1\n{EXAMINER} {EXAMINER} 2\n"
        try:
            _write(f"/proc/{process}/uid_map", many)
            _write(f"/proc/{process}/gid_map", many)
            return MAPPED_MANY
        except OSError:  # root of a container that itself has few users
            pass
    try:
        _write(f"/proc/{process}/setgroups", "deny")
        _write(f"/proc/{process}/uid_map", f"0 {user} 1\n")
        _write(f"/proc/{process}/gid_map", f"0 {os.getegid()} 1\n")
    except OSError:
        return MAPPED_NONE
    return MAPPED_ONE


def _write(path: str, text: str) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(text.encode())


def _enter_as_root(root: bool, refusal: OSError) -> dict[str, int]:
    if not root or refusal.errno not in REFUSALS:
        raise OSError(
            f"cannot create a user namespace ({refusal.strerror}); allow user namespaces"
            " (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone,"
            " kernel.apparmor_restrict_unprivileged_userns; in a container, its seccomp profile)"
        )
    try:
        kernel.unshare(NAMESPACES)
    except OSError as error:
        raise OSError(
            f"cannot create user namespaces ({refusal.strerror}) or others ({error.strerror}); give"
            " the container CAP_SYS_ADMIN or a seccomp profile that allows unshare"
        ) from error
    user = OWN_USERS + 2 * os.getpid()
    return {"program": user, "examiner": user + 1}


def _watch(
    request: dict[str, Any], first_process: int, pipes: dict[int, str], started: float
) -> tuple[dict[str, bytearray], str | None]:
    """Read the sandbox's pipes until none of its processes is left; end it at the first limit.

    Return what each pipe said, and the limit exceeded. An error while watching ends the program as
    killed: were it an error of the sandbox, a program could choose to have no reward instead of a
    bad one.
    """
    captured = {name: bytearray() for name in pipes.values()}
    cause: str | None = None
    poll = select.poll()
    for descriptor in pipes:
        os.set_blocking(descriptor, False)
        poll.register(descriptor, select.POLLIN)

    def end(limit: str) -> None:
        """Kill the first process, and thereby all others of its namespace."""
        nonlocal cause
        if cause is None:
            cause = limit
            os.kill(first_process, kernel.KILL)

    looked = started
    try:
        while pipes:
            for descriptor, _ in poll.poll(WATCH_SECONDS * 1000):
                name, chunk = pipes[descriptor], os.read(descriptor, CHUNK)
                if not chunk:
                    poll.unregister(descriptor)
                    os.close(descriptor)
                    del pipes[descriptor]
                elif cause is None or name == "report":
                    captured[name] += chunk
                    if (
                        name in ("output", "errors")
                        and len(captured[name]) > request["output_bytes"]
                    ):
                        end("output")
            now = time.monotonic()
            if now >= started + request["wall_seconds"]:
                end("timeout")
            if cause is None and now - looked >= WATCH_SECONDS:
                looked = now
                processes, memory, seconds = _usage(first_process)
                if seconds > request["cpu_seconds"]:
                    end("timeout")
                elif memory > request["memory_bytes"]:
                    end("memory")
                elif processes > request["processes"] + bool(request["tests"]):
                    end("killed")
    except Exception as error:
        captured["errors"] += f"\nthe program cannot be watched: {error!r}".encode()
        end("killed")
    os.waitpid(first_process, 0)  # after all others: the kernel makes it wait for them
    return captured, cause


def _usage(first_process: int) -> tuple[int, int, float]:
    """Return the threads, bytes of memory and seconds of CPU time of all below process `first`.

    Pages that a process shares with its parent since a fork count twice. The CPU time of ended
    processes is added to their parents', and finally to that of `first`: the filter refuses to
    ignore SIGCHLD, with which the kernel would drop it.
    """
    threads, memory, ticks = 0, 0, 0
    counted, unseen = set(), [first_process]
    while unseen:
        process = unseen.pop()
        # A process names itself, in any bytes but 0; the name ends at the last parenthesis.
        after_name = _read(f"/proc/{process}/stat").rpartition(b")")[2].split()
        if process in counted or not after_name:
            continue
        counted.add(process)
        ticks += sum(map(int, after_name[11:15]))
        try:
            tasks = [
                f"/proc/{process}/task/{thread}" for thread in os.listdir(f"/proc/{process}/task")
            ]
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        if process != first_process:
            threads += int(after_name[17])
            # A first thread that has ended reports no memory; the other threads do.
            held = (memory_held(_read(f"{task}/status")) for task in tasks)
            memory += next(filter(None, held), 0)
        for task in tasks:
            unseen += map(int, _read(f"{task}/children").split())
    return threads, memory, ticks / TICKS


def memory_held(status: bytes) -> int:
    """Return the bytes of heap, stacks and shared mappings in a /proc/PID/status, also swapped out.

    Only newlines end a line: `splitlines` would also split at a carriage return in the process's
    name, so that a name could forge a line.
    """
    counted = (b"RssAnon:", b"RssShmem:", b"VmSwap:", b"HugetlbPages:")
    lines = [line for line in status.split(b"\n") if line.startswith(counted)]
    return sum(int(line.split()[1]) << 10 for line in lines)


def _read(path: str) -> bytes:
    """Return the content of a file; b"" where its process or thread has just ended."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.readall()
    except (FileNotFoundError, ProcessLookupError):
        return b""
