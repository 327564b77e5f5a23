"""Programs that try to get out, to stay, to take too much: each is contained and fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stages.rewards import sandbox
from stages.rewards.containment import supervisor
from stages.rewards.sandbox import Limits, SandboxError, run, score
from tests.awaiting import wait_until
from tests.stages.conftest import SANDBOX_SECRET, children

REPOSITORY = Path(__file__).parents[2]
MARK = f"braid-escaped-{os.getpid()}"
PATIENT = Limits(wall_seconds=8, memory_mebibytes=128, processes=8)
HASTY = Limits(wall_seconds=0.6, memory_mebibytes=128, processes=8)
BOUND_SECONDS = 30.0  # beyond the limit; the programs that must be ended sleep for 60

# Every program prints "escaped" if it gets what it wants. By name: how it ends, and what it does.
GIVES_UP = {
    "fork bomb": ("error killed timeout", "import os\nwhile True: os.fork()"),
    "fork bomb that continues": (
        "timeout killed memory",
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    ),
    "thread bomb": (
        "error",
        "import threading, time\n"
        "while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
    ),
    "list of everything": ("memory", "a = [0]\nwhile True: a += a"),
    "mapped memory": ("error", "import mmap\nmmap.mmap(-1, 1 << 30)\nprint('escaped')"),
    "memory in many processes": (
        "memory",
        "import os, time\nfor _ in range(6): os.fork() or (bytes(0) or b'x' * (60 << 20), "
        "time.sleep(20))\ntime.sleep(20)",
    ),
    "memory in no process": (
        "error",
        "import os\nf = os.memfd_create('a')\nos.write(f, b'x')\nprint('escaped')",
    ),
    "memory of System V": (
        "error",
        "import ctypes\nif ctypes.CDLL(None).shmget(0, 99, 0o1666) >= 0: print('escaped')\n1 / 0",
    ),
    "endless output": ("output", "while True: print('x' * 10000)"),
    "endless errors": ("output", "import sys\nwhile True: print('x' * 10000, file=sys.stderr)"),
    "endless output of a child": (
        "output",
        "import os, time\nif os.fork(): time.sleep(30)\nwhile True: os.write(1, b'x' * 9999)",
    ),
    "huge file": ("error", "f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 20))"),
    "many files": (
        "error",
        "for i in range(99): open(str(i), 'wb').write(bytes(1 << 20))\nprint('escaped')",
    ),
    "many names": ("error", "for i in range(9999): open(str(i), 'w')\nprint('escaped')"),
    "many open files": ("error", "f = [open('/program.py') for _ in range(999)]\nprint('escaped')"),
    "shared memory files": ("error", "open('/dev/shm/MARK', 'wb')\nprint('escaped')"),
    "own device": (
        "error",
        "import os\nos.mknod('d', 0o20666, os.makedev(1, 1))\nprint('escaped')",
    ),
    "tcp": ("error", "import socket\nsocket.create_server(('', 0))\nprint('escaped')"),
    "udp": (
        "error",
        "import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))\n"
        "print('escaped')",
    ),
    "unix socket": (
        "error",
        "import socket\nsocket.socket(socket.AF_UNIX).bind('s')\nprint('escaped')",
    ),
    "abstract socket": (
        "error",
        "import socket\nsocket.socket(socket.AF_UNIX).bind('\\0s')\nprint('escaped')",
    ),
    "netlink": ("error", "import socket\nsocket.socket(socket.AF_NETLINK, 3)\nprint('escaped')"),
    "name look-up": (
        "error",
        "import socket\nsocket.getaddrinfo('localhost', 80)\nprint('escaped')",
    ),
    "environment": ("error", "import os\nprint('escaped', os.environ['BRAID_TEST_SECRET'])"),
    "user table": ("error", "print('escaped', open('/etc/passwd').read())"),
    "passwords": ("error", "print('escaped', open('/etc/shadow').read())"),
    "repository": ("error", "print('escaped', open('REPOSITORY/setup.py').read())"),
    "installed packages": (
        "error",
        "import os, sysconfig\n"
        "if os.listdir(sysconfig.get_path('stdlib') + '/site-packages'): print('escaped')\n"
        "import pytest",
    ),
    "home": (
        "error",
        "import os\nfor f in ('/home', '/var', '/tmp', '/etc', '/sys', '/proc'):\n"
        "  try: os.listdir(f); print('escaped')\n  except OSError: pass\n1 / 0",
    ),
    "parent's environment": ("error", "print('escaped', open('/proc/SENTINEL/environ').read())"),
    "own root of /proc": ("error", "print('escaped', open('/proc/self/root/etc/passwd').read())"),
    "first process's root": ("error", "import os\nprint('escaped', os.listdir('/proc/1/root'))"),
    "magic keys": ("error", "open('/proc/sysrq-trigger', 'w').write('b')\nprint('escaped')"),
    "kernel settings": ("error", "open('/sys/kernel/mm/ksm/run', 'w')\nprint('escaped')"),
    "symbolic link": (
        "error",
        "import os\nos.symlink('/etc/passwd', 'l')\nprint('escaped', open('l').read())",
    ),
    "way up": ("error", "print('escaped', open('../' * 40 + 'etc/passwd').read())"),
    "writing elsewhere": (
        "error",
        "for f in ('/', '/tmp', '/lib', '/dev', '/home'):\n"
        "  try: open(f + '/MARK', 'w'); print('escaped')\n"
        "  except OSError: pass\n1 / 0",
    ),
    "writing in the library": (
        "error",
        "import os\nos.chmod(os.__file__, 0o777)\nopen(os.__file__, 'a')\nprint('escaped')",
    ),
    "killing the parent": ("error", "import os\nos.kill(SENTINEL, 9)\nprint('escaped')"),
    "killing everybody": ("exited error killed", "import os\nos.kill(-1, 9)"),
    "killing the first": ("error", "import os\nos.kill(1, 9)\n1 / 0"),
    "stopping the first": ("error", "import os\nos.kill(1, 19)\n1 / 0"),
    "interrupting the first": (
        "error",
        "import os\ntry: os.kill(1, 2)\nexcept PermissionError: pass\n1 / 0",
    ),
    "memory behind a thread that has ended": (
        "memory",
        "import ctypes, os, threading, time\ndef hold():\n  x = b'x' * (60 << 20)\n"
        "  time.sleep(20)\nthreading.stack_size(1 << 20)\nfor _ in range(3):\n"
        "  if not os.fork():\n    threading.Thread(target=hold).start()\n"
        "    ctypes.CDLL(None).syscall(EXIT, 0)\ntime.sleep(20)",
    ),
    "memory behind a name": (
        # As a line of /proc/PID/status, it would take 97 MiB off each process's account.
        "memory",
        "import ctypes, os, time\nctypes.CDLL(None).prctl(15, b'\\rRssAnon -99999', 0, 0, 0)\n"
        "for _ in range(6): os.fork() or (b'x' * (60 << 20), time.sleep(1), os._exit(0))\n"
        "time.sleep(1)\nprint('escaped')",
    ),
    "shared memory that is handed back": (
        "error",
        "import mmap, os, time\ndef hold():\n  m = mmap.mmap(-1, 60 << 20)\n"
        "  for i in range(0, 60 << 20, 1 << 20):\n"
        "    m[i:i + (1 << 20)] = b'x' * (1 << 20)\n    m.madvise(mmap.MADV_DONTNEED)\n"
        "  time.sleep(0.5)\n  os._exit(0)\n"
        "children = [os.fork() or hold() for _ in range(4)]\n"
        "if not any(os.waitpid(child, 0)[1] for child in children): print('escaped')\n1 / 0",
    ),
    "another's limits": (
        "error",
        "import resource\nresource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))\nprint('escaped')",
    ),
    "own limits": (
        "error",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nprint('escaped')",
    ),
    "tracing": ("error", "CALL(101, 117, 16, 1, 0, 0)\nprint('escaped')"),
    "another's memory": ("error", "CALL(310, 270, 1, 0, 0, 0, 0, 0)\nprint('escaped')"),
    "mount": ("error", "CALL(165, 40, b'a', b'/scratch', b'tmpfs', 0, 0)\nprint('escaped')"),
    "remount": ("error", "CALL(165, 40, b'', b'/', b'', 0x20, 0)\nprint('escaped')"),
    "new mount calls": ("error", "CALL(442, 442, -100, b'/', 0, b'', 32)\nprint('escaped')"),
    "change of root": ("error", "import os\nos.mkdir('r')\nos.chroot('r')\nprint('escaped')"),
    "own namespaces": ("error", "CALL(272, 97, 0x10000000)\nprint('escaped')"),
    "own namespaces by clone": ("error", "CALL(56, 220, 0x10000011, 0, 0, 0, 0)\nprint('escaped')"),
    "queue of system calls": ("error", "CALL(425, 425, 8, bytes(120))\nprint('escaped')"),
    "programs in the kernel": ("error", "CALL(321, 280, 0, bytes(64), 64)\nprint('escaped')"),
    "keys": ("error", "CALL(250, 219, 0, -3, 1)\nprint('escaped')"),
    "system calls of 32 bits": ("error", "CALL(0x40000000 + 41, 198, 2, 1, 0)\nprint('escaped')"),
    "becoming root": (
        "error",
        "import os\nos.setuid(0 if os.getuid() else 1)\nprint('escaped')",
    ),
    "crash": ("killed", "import ctypes\nctypes.string_at(0)"),
    "bottomless recursion": (
        "timeout killed memory error",
        "import sys\nsys.setrecursionlimit(1 << 30)\n"
        "class A:\n  def __repr__(s): return repr([s])\nrepr(A())",
    ),
    "inherited descriptors": (
        "error",
        "import os\nfor f in range(3, 4096):\n"
        "  try: os.write(f, b'escaped'); print('escaped')\n  except OSError: pass\n1 / 0",
    ),
    "false report": (
        "error",
        "import os\nfor f in range(3, 4096):\n"
        "  try: os.write(f, b'ended 0\\n')\n  except OSError: pass\nraise SystemExit(3)",
    ),
    "silent success": ("exited", "import os\nos._exit(0)"),
    "daemon": (
        "exited",
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
        "    for f in range(3): os.close(f)\n    time.sleep(60)\n  os._exit(0)",
    ),
    "no program": ("error", "def ("),
    "no text": ("error", "\0\ud800"),
}
GOES_ON = {
    "sleep": "import time\ntime.sleep(60)",
    "busy loop": "while True: pass",
    "deaf": "import signal, time\nfor s in set(range(1, 32)) - {9, 17, 19}: "
    "signal.signal(s, signal.SIG_IGN)\nwhile True: time.sleep(60)",
    "late exit": "import atexit, time\natexit.register(time.sleep, 60)",
    "trace": "import sys, time\nsys.settrace(lambda *a: time.sleep(60))\n(lambda: 0)()",
    "stop": "import os\nos.kill(os.getpid(), 19)",
    "without output": "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(60)",
    "daemon that holds the output": "import os, time\nos.fork() or os.setsid()\ntime.sleep(60)",
}


def complete(program: str, sentinel: subprocess.Popen[bytes]) -> str:
    call = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def CALL(x86, arm, *a):\n"
        "  if libc.syscall(x86 if os.uname().machine == 'x86_64' else arm, *a) == -1:\n"
        "    raise OSError(ctypes.get_errno(), 'refused')\n"
    )
    program = call * ("CALL(" in program) + program
    end_of_a_thread = 60 if os.uname().machine == "x86_64" else 93
    program = program.replace("SENTINEL", str(sentinel.pid)).replace("EXIT", str(end_of_a_thread))
    return program.replace("REPOSITORY", str(REPOSITORY)).replace("MARK", MARK)


@pytest.mark.parametrize("name", GIVES_UP)
def test_a_program_cannot_escape(
    name: str, sentinel: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRAID_TEST_SECRET", SANDBOX_SECRET)
    endings, program = GIVES_UP[name]
    limits = HASTY if "timeout" in endings else PATIENT
    before, started = children(), time.monotonic()
    outcome = run(complete(program, sentinel), "", limits)
    assert time.monotonic() - started < limits.wall_seconds + BOUND_SECONDS
    assert outcome.ending in endings.split(), outcome
    assert b"escaped" not in outcome.output
    assert SANDBOX_SECRET not in outcome.errors
    assert children() == before
    assert sentinel.poll() is None
    for folder in ("/", "/tmp", "/dev/shm", "/lib", "/dev", "/home", str(Path.cwd())):
        assert not Path(folder, MARK).exists()


@pytest.mark.parametrize("name", GOES_ON)
def test_an_endless_program_is_ended_at_the_limit(
    name: str, sentinel: subprocess.Popen[bytes]
) -> None:
    before, started = children(), time.monotonic()
    outcome = run(GOES_ON[name], "", HASTY)
    assert HASTY.wall_seconds <= time.monotonic() - started < HASTY.wall_seconds + BOUND_SECONDS
    assert outcome.ending == "timeout"
    assert children() == before


def test_cpu_time_counts_for_all_processes_together() -> None:
    program = "import os\nos.fork()\nos.fork()\nwhile True: pass"
    limits = Limits(wall_seconds=60, cpu_seconds=0.5)
    outcome = run(program, "", limits)
    assert outcome.ending == "timeout" and outcome.seconds < limits.wall_seconds


def test_cpu_time_of_unreaped_children_counts_too() -> None:
    """The kernel accounts their time to nobody if SIGCHLD is ignored."""
    program = """
import os, signal, time
try: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
except OSError: pass
for _ in range(8):
    if os.fork() == 0:
        while time.process_time() < 0.3: pass
        os._exit(0)
    time.sleep(0.4)
time.sleep(60)
"""
    outcome = run(program, "", Limits(wall_seconds=10, cpu_seconds=1.2))
    assert outcome.ending == "timeout" and outcome.seconds < 9


@pytest.mark.parametrize(
    "program",
    [
        "import ctypes\nctypes.CDLL(None).prctl(15, b'\\xff', 0, 0, 0)\n",
        "import os, sys\nif b'\\xff' not in os.listdir(b'.'):\n"
        "  os.symlink(os.fsencode(sys.executable), b'\\xff')\n"
        "  os.execv(b'\\xff', ['x', '-I', '-S', '/program.py'])\n",
    ],
)
def test_a_process_may_have_any_name(program: str) -> None:
    outcome = run(program + "import time\ntime.sleep(0.3)\nprint('named')\n", "", PATIENT)
    assert (outcome.ending, outcome.output) == ("exited", b"named\n"), outcome


def test_a_program_that_cannot_be_watched_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program makes the watch fail: it must not escape a reward of 0 this way."""
    failing = """
from stages.rewards.containment import supervisor
def _usage(first):
    raise ValueError("a line that nobody has thought of")
supervisor._usage = _usage
"""
    path, start = sandbox.SUPERVISOR.split("; ", 2)[1:]
    monkeypatch.setattr(sandbox, "SUPERVISOR", f"import sys; {path}\n{failing}\n{start}")
    outcome = run("import time; time.sleep(60)", "", PATIENT)
    assert outcome.ending == "killed" and outcome.seconds < PATIENT.wall_seconds
    assert "cannot be watched: ValueError('a line that nobody has thought of')" in outcome.errors


def test_memory_in_use_counts() -> None:
    status = b"Name:\t\rRssAnon: -9\nVmRSS:\t 99 kB\nRssAnon:\t 1 kB\nRssFile:\t 99 kB\n"
    status += b"RssShmem:\t 20 kB\nVmSwap:\t 300 kB\nHugetlbPages:\t 4000 kB\n"
    assert supervisor.memory_held(status) == 4321 << 10


def test_an_ordinary_program_runs() -> None:
    program = """
import asyncio, collections, dataclasses, decimal, hashlib, itertools, os, random, re, subprocess
import sys, tempfile, threading, zlib
@dataclasses.dataclass
class Point:
    x: "int"
async def twice(x):
    await asyncio.sleep(0)
    return 2 * x
print(asyncio.run(twice(int(input()))), Point(1), hashlib.sha256(b"").hexdigest()[:4])
thread = threading.Thread(target=print, args=("in a thread",))
thread.start(); thread.join()
with open("notes", "w+") as file:
    file.write("ü"); file.seek(0); print(file.read(), os.getcwd(), os.listdir("."))
sys.stdout.flush()
subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
print(sys.stdin.read(), sys.version_info[:2])
exit()
"""
    outcome = run(program, "21\nrest", Limits())
    assert outcome.ending == "exited", outcome
    assert outcome.output.decode().splitlines() == [
        "42 Point(x=1) e3b0",
        "in a thread",
        "ü /scratch ['notes']",
        "from a child",
        f"rest {sys.version_info[:2]}",
    ]


def test_only_scratch_is_writable() -> None:
    program = "import os\nprint([os.statvfs(p).f_flag & os.ST_RDONLY for p in ('/', '.')])"
    assert run(program, "", Limits()).output == b"[1, 0]\n"


def test_the_smallest_limits_suffice_for_a_small_program() -> None:
    limits = Limits(memory_mebibytes=64, processes=1, output_bytes=2)
    assert run("print(1)", "", limits).output == b"1\n"
    assert run("print(10)", "", limits).ending == "output"
    assert score("x = 1", ["assert x == 1"] * 9, limits).passed == 1


def test_parallel_runs_have_separate_limits() -> None:
    program = """
import os, time
started = 1
try:
    while True:
        if os.fork() == 0:
            time.sleep(0.5)
            os._exit(0)
        started += 1
except OSError:
    print(started)
    time.sleep(0.3)
"""
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda _: run(program, "", PATIENT), range(4)))
    assert [outcome.output for outcome in outcomes] == [b"8\n"] * 4


def test_the_programs_of_a_killed_stage_end(
    sentinel: subprocess.Popen[bytes],
) -> None:
    before = children()
    program = "import time; time.sleep(60)"
    code = f"from stages.rewards.sandbox import *; run({program!r}, '', Limits(wall_seconds=60))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY) as stage:
        wait_until(lambda: depth(str(stage.pid)) == 4)  # supervisor, first process, program
        stage.kill()
    wait_until(lambda: not reaped(children() - before))


def depth(process: str) -> int:
    path = Path(f"/proc/{process}/task/{process}/children")
    below = path.read_text().split() if path.exists() else []
    return 1 + max((depth(child) for child in below), default=0)


def reaped(orphans: set[str]) -> set[str]:
    for orphan in orphans:
        os.waitpid(int(orphan), os.WNOHANG)
    return orphans


def test_unread_input_is_ignored() -> None:
    assert run("print(1)", "x" * (8 << 20), Limits()).output == b"1\n"


def test_this_machine_can_contain_programs() -> None:
    sandbox.check()


def test_a_preloaded_library_is_no_file_of_a_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM sets LD_PRELOAD on a CPU, to a library of the environment that may be in /home."""
    [usual] = [real for _, real in sandbox._host()["files"] if "libgcc_s" in real]
    library = shutil.copy(usual, tmp_path / "libpreloaded.so")
    monkeypatch.setenv("LD_PRELOAD", str(library))
    assert str(library) not in dict(sandbox._host.__wrapped__()["files"])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_needs_no_user_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = """
from stages.rewards.containment import kernel
def unshare(namespaces, original=kernel.unshare):
    if namespaces & kernel.NEW_USERS:
        raise OSError(28, "No space left on device")
    original(namespaces)
kernel.unshare = unshare
"""
    path, start = sandbox.SUPERVISOR.split("; ", 2)[1:]
    monkeypatch.setattr(sandbox, "SUPERVISOR", f"import sys; {path}\n{refusing}\n{start}")
    sandbox.check.__wrapped__()
    limits = Limits(wall_seconds=5, processes=5)
    assert run("import os\nwhile True: os.fork()", "", limits).ending in ("error", "killed")
    assert int(run("import os\nprint(os.getuid())", "", limits).output) > 0x60000000
    assert score("x = 1", ["assert x == 1"], limits).verdicts == ("passed",)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
def test_no_program_runs_where_namespaces_are_refused(tmp_path: Path) -> None:
    """In a user namespace that may have no further ones, of which this process is one user."""
    ran = tmp_path / "ran"
    program = f"open({str(ran)!r}, 'w')"
    code = f"from stages.rewards.sandbox import *; run({program!r}, '', Limits())"
    script = f'echo 0 > /proc/sys/user/max_user_namespaces; exec {sys.executable} -c "$0"'
    found = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", script, code],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 1
    assert "SandboxError: sandbox: " in found.stderr
    assert not ran.exists()


def test_an_error_of_the_sandbox_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    host = {**sandbox._host(), "files": [("/nowhere/python", "/nowhere/python")]}
    monkeypatch.setattr(sandbox, "_host", lambda: host)
    with pytest.raises(SandboxError, match=r"cannot build the file system: .*/nowhere/python"):
        run("print(1)", "", Limits())


def test_one_user_cannot_interrupt_the_first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where anybody but root runs it: then the program may send the signal."""
    alone = """
from stages.rewards.containment import supervisor
def write_maps(process, own, root, original=supervisor._write_maps):
    return original(process, own, False)
supervisor._write_maps = write_maps
"""
    path, start = sandbox.SUPERVISOR.split("; ", 2)[1:]
    monkeypatch.setattr(sandbox, "SUPERVISOR", f"import sys; {path}\n{alone}\n{start}")
    program = "import os, time\nos.kill(1, 2)\ntime.sleep(0.3)\nprint('continues')\n1 / 0"
    outcome = run(program, "", PATIENT)
    assert (outcome.ending, outcome.output) == ("error", b"continues\n")
