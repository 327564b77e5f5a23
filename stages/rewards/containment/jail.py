"""The first process inside the sandbox, which builds the file system and starts the program.

It is process 1 of its process-id namespace: when it ends, the kernel kills all processes that the
program leaves, and no signal from inside reaches it.
"""

from __future__ import annotations

import fcntl
import os
import resource

from stages.rewards.containment import kernel

TYPE_CHECKING = False  # as typing's, whose import costs more than a run should
if TYPE_CHECKING:
    from typing import Any

OUTSIDE = "/outside"  # the host's files while the file system is built
SCRATCH = "/scratch"
PROGRAM, EXAMINER, INPUT = "/program.py", "/examiner.py", "/dev/stdin"
# Programs of contests print integers of more digits than CPython converts by default.
FLAGS = ("-I", "-S", "-B", "-X", "utf8", "-X", "int_max_str_digits=0")
# `site`, which -S leaves out, defines exit and quit. compile() names the file for tracebacks.
START = (
    "import builtins, sys; builtins.exit = builtins.quit = sys.exit; "
    "__import__('_thread').stack_size({stack}); "
    f"exec(compile(open({PROGRAM!r}, encoding='utf-8').read(), {PROGRAM!r}, 'exec'))"
)
# The first number of copied descriptors, above all that a program is given.
WAITING = 64
SCRATCH_FILES = 1024
STACK_BYTES = 64 << 20  # of a process's first thread; others have less, see _thread_stack_bytes
THREAD_STACKS = (1 << 20, 8 << 20)
OURS = 2  # processes of the sandbox that count as the program's where all are of one user


def live(request: dict[str, Any], pipes: dict[str, int]) -> None:
    """Build the file system, run the program (and the examiner), report. Never returns.

    `pipes` are the write ends of output, errors, verdicts and report. A report is one line:
    `failed REASON` for an error of the sandbox, `ended STATUS` (of wait) otherwise.
    """
    # Closed by `exec`, so that no program can write a report.
    report = fcntl.fcntl(pipes["report"], fcntl.F_DUPFD_CLOEXEC, WAITING)
    try:
        kernel.die_with_parent()
        kernel.handle_no_interrupt()  # process 1 receives from inside only signals it handles
        os.umask(0o022)
        with _Step("make namespaces of mounts"):
            kernel.unshare(kernel.NEW_MOUNTS)
        with _Step("build the file system"):
            questions, tests = _build(request)
        main = _start_all(request, pipes, report, questions, tests)
        process, status = os.wait()
        while process != main:  # it reaps all others that end meanwhile
            process, status = os.wait()
        os.write(report, f"ended {status}\n".encode())
    except BaseException as error:
        os.write(report, f"failed {error}\n".encode())
    finally:
        os._exit(0)


class _Step:
    """A context manager that adds to an OSError what could not be done."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        if isinstance(error, OSError):
            raise OSError(f"cannot {self._what}: {error.strerror or error}") from error


def _build(request: dict[str, Any]) -> tuple[int, int]:
    """Replace the root by a small one; return descriptors of standard input and of the tests.

    The tests' file is unlinked: only the descriptor can read it.
    """
    # Else what is mounted below would appear on the host too.
    kernel.mount("none", "/", flags=kernel.RECURSIVE | kernel.PRIVATE)
    kernel.mount("root", "/tmp", "tmpfs", kernel.NO_SETUID | kernel.NO_DEVICES, "mode=755")
    os.chdir("/tmp")
    os.mkdir(OUTSIDE[1:], 0o700)
    kernel.pivot_root(".", OUTSIDE[1:])
    os.chdir("/")
    for directory, real in request["directories"]:
        os.makedirs(directory, exist_ok=True)
        kernel.mount(OUTSIDE + real, directory, flags=kernel.BIND)
    for hidden in request["hidden"]:
        kernel.mount("hidden", hidden, "tmpfs", kernel.NO_SETUID | kernel.NO_DEVICES, "mode=755")
    for file, real in (*request["files"], ("/dev/null", "/dev/null")):
        os.makedirs(os.path.dirname(file), exist_ok=True)
        _write(file, b"")
        kernel.mount(OUTSIDE + real, file, flags=kernel.BIND)
    _write(PROGRAM, request["program"])
    _write(EXAMINER, request["examiner"])
    os.mkdir(SCRATCH)
    _write(INPUT, request["input"])  # a link to a descriptor would need /proc
    descriptors = os.open(INPUT, os.O_RDONLY), _nameless(request["tests"])
    kernel.unmount(OUTSIDE)
    os.rmdir(OUTSIDE)
    kernel.make_read_only("/")
    kernel.mount(
        "scratch",
        SCRATCH,
        "tmpfs",
        kernel.NO_SETUID | kernel.NO_DEVICES | kernel.NO_EXECUTION,
        f"mode=1777,size={request['scratch_bytes']},nr_inodes={SCRATCH_FILES}",
    )
    os.chdir(SCRATCH)
    return descriptors


def _write(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)


def _nameless(content: bytes) -> int:
    _write("/nameless", content)
    descriptor = os.open("/nameless", os.O_RDONLY)
    os.unlink("/nameless")
    return descriptor


def _start_all(
    request: dict[str, Any], pipes: dict[str, int], report: int, questions: int, tests: int
) -> int:
    """Start the program, alone or with an examiner; return the process that the run ends with."""
    python = [request["python"], *FLAGS]
    stack = str(_thread_stack_bytes(request))
    if not request["tests"]:
        descriptors = {0: questions, 1: pipes["output"], 2: pipes["errors"]}
        command = [*python, "-c", START.format(stack=stack)]
        return _start(command, descriptors, request, "program", report)
    nothing = os.open("/dev/null", os.O_RDWR)
    (calls_reading, calls_writing), (answers_reading, answers_writing) = os.pipe(), os.pipe()
    common = {0: nothing, 1: nothing, 2: pipes["errors"]}
    examiner_pipes = {0: tests, 3: answers_reading, 4: calls_writing, 5: pipes["verdicts"]}
    examiner = _start(
        [*python, EXAMINER, "tests"], common | examiner_pipes, request, "examiner", report
    )
    # The program has no descriptor of the tests or of the verdicts.
    program_pipes = {1: pipes["output"], 3: calls_reading, 4: answers_writing}
    _start(
        [*python, EXAMINER, "program", stack], common | program_pipes, request, "program", report
    )
    # Held open here, no pipe would end with the program or the examiner.
    for descriptor in (calls_reading, calls_writing, answers_reading, answers_writing):
        os.close(descriptor)
    return examiner


def _start(
    command: list[str], descriptors: dict[int, int], request: dict[str, Any], role: str, report: int
) -> int:
    process = os.fork()
    if process:
        return process
    try:
        # Out of the way first: what is moved to a number may be the source of another.
        waiting = {
            number: fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, WAITING)
            for number, descriptor in descriptors.items()
        }
        for number, descriptor in waiting.items():
            os.dup2(descriptor, number)
        os.setsid()
        with _Step("give up rights"):
            kernel.forbid_new_rights()
            if (user := request["users"].get(role)) is not None:  # None where there is only one
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
            kernel.drop_capabilities()
        _limit(request)
        with _Step("install the filter of system calls (CONFIG_SECCOMP_FILTER)"):
            kernel.install_filter(request["filter"])
        with _Step(f"start {command[0]}"):
            os.execve(command[0], command, request["environment"])
    except BaseException as error:
        os.write(report, f"failed {error}\n".encode())
    finally:
        os._exit(1)


def _thread_stack_bytes(request: dict[str, Any]) -> int:
    """Return the bytes of a thread's stack: all that a program may start take a quarter at most.

    The C library would give each RLIMIT_STACK, all of which counts as address space.
    """
    least, most = THREAD_STACKS
    share: int = request["memory_bytes"] // (4 * request["processes"])
    return max(least, min(most, share & -(1 << 12)))


def _limit(request: dict[str, Any]) -> None:
    ours = 0 if request["users"] else OURS + bool(request["tests"])
    memory, scratch = request["memory_bytes"], request["scratch_bytes"]
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_STACK: min(STACK_BYTES, memory // 2),
        resource.RLIMIT_CPU: int(request["cpu_seconds"]) + 2,  # the supervisor comes first
        resource.RLIMIT_NPROC: request["processes"] + ours,
        resource.RLIMIT_NOFILE: request["open_files"],
        resource.RLIMIT_FSIZE: scratch,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 64,
    }
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
