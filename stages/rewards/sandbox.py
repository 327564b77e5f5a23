"""The sandbox that runs untrusted programs (docs/explanation/sandbox.md).

A program sees an interpreter, its standard library and an empty directory; no network, no other
process, none of the host's files or variables. Its own failure is an outcome. SandboxError is
raised only where the sandbox itself fails: a program never runs uncontained.
"""

from __future__ import annotations

import json
import marshal
import math
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from stages.rewards.containment import call_filter, examiner
from stages.rewards.program_tests import Test

Verdict = Literal["passed", "wrong", "error", "timeout", "memory", "killed", "output"]
Ending = Literal["exited", "error", "timeout", "memory", "killed", "output"]

REPOSITORY = Path(__file__).parents[2]
SUPERVISOR = (
    f"import sys; sys.path.append({str(REPOSITORY)!r}); "
    "from stages.rewards.containment.supervisor import main; main()"
)
PACKAGES = ("site-packages", "dist-packages")  # installed packages, hidden from programs
OLDEST_KERNEL = (5, 14)  # the first that counts the limit on processes by user namespace
MARGIN_SECONDS = 30  # for the supervisor on a busy machine, beyond the program's own time
VERDICTS: dict[int, Verdict] = {
    examiner.PASSED[0]: "passed",
    examiner.WRONG[0]: "wrong",
    examiner.ERROR[0]: "error",
}
# Prints every shared library that the interpreter and its extension modules load, by the loader's
# names. Modules for graphics and line editing are omitted: no program here needs them.
LIST_LIBRARIES = """
import contextlib, ctypes, importlib, os, sysconfig
left_out = ("_test", "_tkinter", "_curses", "readline", "_gdbm", "_dbm", "nis", "_ctypes_test")
for file in sorted(os.listdir(sysconfig.get_path("platstdlib") + "/lib-dynload")):
    if not file.startswith(left_out):
        with contextlib.suppress(ImportError):
            importlib.import_module(file.split(".")[0])
with contextlib.suppress(OSError):
    ctypes.CDLL("libgcc_s.so.1")  # the C library loads it when a thread ends
class Loaded(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Loaded), ctypes.c_size_t, ctypes.c_void_p)
def show(loaded, size, data):
    name = (loaded.contents.name or b"").decode()
    if name.startswith("/") and "/lib-dynload/" not in name:
        print(name)
    return 0
ctypes.CDLL(None).dl_iterate_phdr(show, None)
"""


class SandboxError(Exception):
    """A sandbox that cannot contain programs on this machine; the message says what is missing."""


@dataclass(frozen=True)
class Limits:
    """The limits of a program and all that it starts; exceeding one ends the run."""

    wall_seconds: float = 10.0
    cpu_seconds: float = 10.0  # of all its processes together
    memory_mebibytes: int = 512  # of one process's address space, and of all together in memory
    processes: int = 16  # and threads
    open_files: int = 64  # of one process
    output_bytes: int = 1 << 20  # of output and of error output, each
    scratch_mebibytes: int = 16  # of all files it writes


@dataclass(frozen=True)
class Outcome:
    """The end of a run: `error` is an exit status other than 0, `killed` a signal.

    `memory` differs from `error` only by the end of the error output, so it is a hint.
    """

    ending: Ending
    output: bytes
    errors: str  # the last 8 KiB
    verdicts: tuple[Verdict, ...]  # of the asserts that were run
    seconds: float


@dataclass(frozen=True)
class Score:
    """The verdict on each test, and the error output of the first failed test."""

    verdicts: tuple[Verdict, ...]
    errors: str

    @property
    def passed(self) -> float:
        """The fraction of the tests passed."""
        return self.verdicts.count("passed") / len(self.verdicts)


# Names that LeetCode's programs use without importing them, for tests that are calls.
JUDGE_IMPORTS = (
    "import bisect, collections, functools, heapq, itertools, math, operator, random, re, string;"
    " from typing import *; from collections import *; from functools import *;"
    " from itertools import *; from heapq import *; from bisect import *; from math import *;"
    " from builtins import pow"
)
NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
LONGEST_NUMBER = 400  # characters of a number that is compared as such


def score(
    program: str,
    tests: Sequence[Test],
    limits: Limits,
    seconds: float = math.inf,
    stop_early: bool = False,
    tolerance: float = 0.0,
) -> Score:
    """Run `program` on `tests`: pairs of input and output, one run each, or calls, or asserts.

    A pair is a mapping of `input` and `output`; the expected output never enters the sandbox. An
    output may differ by `tolerance`, absolutely or relatively, from a number that is expected with
    a decimal point or an exponent. Asserts are Python statements that use the program's names, and
    a call a mapping of `function`, of the program or its class Solution, `arguments` and
    `expected`; they share one run, in order, in a separate process.
    `seconds` limits the wall time of all runs together; the pairs left then count as timed out.
    With `stop_early` the pairs after the first failed one are not run and get its verdict.
    Raises SandboxError.
    """
    if any(isinstance(test, str) or "function" in test for test in tests):
        limits = replace(limits, wall_seconds=min(limits.wall_seconds, seconds))
        calls = [test for test in tests if not isinstance(test, str)]
        if calls:
            program = f"{JUDGE_IMPORTS}\nexec(compile({program!r}, '/program.py', 'exec'))"
            tests = [{**call, "tolerance": tolerance} for call in calls]
        outcome = run(program, "", limits, json.dumps(tests).encode())
        # The run's ending is the verdict on the test that was running and on the tests after it.
        missing_verdict: Verdict = "error" if outcome.ending == "exited" else outcome.ending
        missing = len(tests) - len(outcome.verdicts)
        return Score(outcome.verdicts + (missing_verdict,) * missing, outcome.errors)
    verdicts: list[Verdict] = []
    errors = ""
    for pair in tests:
        assert not isinstance(pair, str)
        if seconds <= 0:
            verdicts += ["timeout"] * (len(tests) - len(verdicts))
            break
        wall_seconds = min(limits.wall_seconds, seconds)
        outcome = run(program, pair["input"], replace(limits, wall_seconds=wall_seconds))
        seconds -= outcome.seconds
        if outcome.ending != "exited":
            verdict: Verdict = outcome.ending
        else:
            output = outcome.output.decode(errors="replace")
            verdict = "passed" if equals(output, pair["output"], tolerance) else "wrong"
        verdicts.append(verdict)
        if verdict != "passed":
            errors = errors or outcome.errors
            if stop_early:
                verdicts += [verdict] * (len(tests) - len(verdicts))
                break
    return Score(tuple(verdicts), errors)


@cache
def check() -> None:
    """Raise SandboxError where this machine cannot contain programs."""
    outcome = run(PROBE, "", Limits(wall_seconds=20, processes=4))
    if outcome.ending != "exited" or outcome.output != b"contained\n":
        last_lines = outcome.errors.strip().splitlines()[-1:] or [outcome.ending]
        raise SandboxError(f"sandbox: a program is not contained: {last_lines[0]}")


# Tries what each mechanism must refuse.
PROBE = f"""
import os, socket, threading, time
def refused(what, call):
    try:
        call()
    except (OSError, RuntimeError):  # can't start new thread
        return
    raise SystemExit(f"it may {{what}}")
refused("open a socket", lambda: socket.socket(socket.AF_INET))
refused("write outside its directory", lambda: open("/written", "w"))
refused("read files of the host", lambda: os.listdir({str(REPOSITORY)!r}))
refused("see processes", lambda: os.listdir("/proc/1"))
refused("become another user", lambda: os.setuid(0 if os.getuid() else 1))
def start_many():
    for _ in range(8):
        threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
refused("start more processes than its limit", start_many)
open("written", "w").write("a program writes in its directory")
import hashlib, json, math, random, zlib
print("contained", flush=True)
os._exit(0)
"""


def equals(output: str, expected: str, tolerance: float) -> bool:
    r"""Return whether an output is the expected one: its lines, or all words of each line.

    White space at the end of lines and of the text does not count. A word may be another number
    within `tolerance`, where the expected one has a decimal point or an exponent; with a tolerance
    `3.0` also equals the expected `3`.

    Example:
        >>> equals("0.3333333 \n", "0.333333", 1e-6), equals("0.3333333", "0.333333", 0.0)
        (True, False)
    """
    lines, expected_lines = _lines(output), _lines(expected)
    if lines == expected_lines or not tolerance or len(lines) != len(expected_lines):
        return lines == expected_lines
    pairs = [
        (line.split(), expected_line.split())
        for line, expected_line in zip(lines, expected_lines, strict=True)
        if line != expected_line
    ]
    return all(
        len(words) == len(expected_words)
        and all(map(partial(_is_near, tolerance), words, expected_words))
        for words, expected_words in pairs
    )


def _is_near(tolerance: float, word: str, expected: str) -> bool:
    if word == expected:
        return True
    if max(len(word), len(expected)) > LONGEST_NUMBER or not (
        NUMBER.fullmatch(word) and NUMBER.fullmatch(expected)
    ):
        return False
    if not _is_decimal(expected):
        try:
            return _is_decimal(word) and Decimal(word) == Decimal(expected)
        except InvalidOperation:  # an exponent of twenty digits
            return False
    return math.isclose(float(word), float(expected), rel_tol=tolerance, abs_tol=tolerance)


def _is_decimal(number: str) -> bool:
    return not number.lstrip("+-").isdigit()


def _lines(text: str) -> list[str]:
    """Return the lines of a text without trailing white space and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def run(program: str, stdin: str, limits: Limits, asserts: bytes = b"") -> Outcome:
    """Run `program` once, with `stdin` to read, or its `asserts` (JSON). Raises SandboxError."""
    host = _host()
    request = {
        **host,
        **vars(limits),
        "program": program.encode(errors="replace"),
        "input": stdin.encode(errors="replace"),
        "tests": asserts,
        "memory_bytes": limits.memory_mebibytes << 20,
        "scratch_bytes": limits.scratch_mebibytes << 20,
    }
    try:
        supervisor = subprocess.run(
            [host["python"], "-I", "-S", "-c", SUPERVISOR],
            input=marshal.dumps(request),
            capture_output=True,
            env=host["environment"],
            cwd="/",
            start_new_session=True,  # only the stage handles an interrupt from the terminal
            timeout=limits.wall_seconds + MARGIN_SECONDS,
        )
    except subprocess.TimeoutExpired as error:  # the supervisor is killed, and with it all others
        raise SandboxError(f"sandbox: no outcome {MARGIN_SECONDS} s after the limit") from error
    except OSError as error:
        raise SandboxError(f"sandbox: its supervisor cannot be started: {error}") from error
    if supervisor.returncode:
        error_lines = supervisor.stderr.decode(errors="replace").strip().splitlines()
        raise SandboxError(
            f"sandbox: {error_lines[-1] if error_lines else 'its supervisor was killed'}"
        )
    report = marshal.loads(supervisor.stdout)
    status: int | None = report["status"]
    errors = report["errors"].decode(errors="replace")
    ending: Ending = "exited"
    if report["cause"]:
        ending = report["cause"]
    elif status is None or status < 0:
        ending = "killed"
    elif status:
        last = errors.rstrip().rpartition("\n")[2]
        ending = "memory" if last.startswith("MemoryError") else "error"
    verdicts = tuple(VERDICTS[letter] for letter in report["verdicts"])
    return Outcome(ending, report["output"], errors, verdicts, report["seconds"])


@cache
def _host() -> dict[str, Any]:
    """Return the fields of a request that depend on this machine alone.

    Raises SandboxError where this machine cannot run the sandbox.
    """
    if os.uname().machine not in call_filter.ARCHITECTURES:
        raise SandboxError("sandbox: needs a Linux machine of x86_64 or aarch64")
    release = os.uname().release
    kernel = tuple(int(number) for number in release.split("-")[0].split(".")[:2])
    if kernel < OLDEST_KERNEL:
        oldest = ".".join(map(str, OLDEST_KERNEL))
        raise SandboxError(f"sandbox: needs Linux {oldest} or newer, not {release}")
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise SandboxError("sandbox: needs a kernel with CONFIG_PROC_CHILDREN, to watch programs")
    python = Path(sys.base_prefix, "bin", "python{}.{}".format(*sys.version_info))
    if not python.exists():
        raise SandboxError(f"sandbox: no interpreter at {python}")
    # Programs get no LD_PRELOAD, as vLLM sets one: its libraries would be files of the host.
    environment = {name: text for name, text in os.environ.items() if name != "LD_PRELOAD"}
    listing = subprocess.run(
        [python, "-I", "-S", "-c", LIST_LIBRARIES],
        capture_output=True,
        text=True,
        cwd="/",
        env=environment,
    )
    if listing.returncode:
        raise SandboxError(f"sandbox: cannot list the interpreter's libraries: {listing.stderr}")
    libraries = sorted(set(listing.stdout.split("\n")) - {""})
    bases = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}  # not an environment's
    standard = sorted({sysconfig.get_path(name, vars=bases) for name in ("stdlib", "platstdlib")})
    packages = [Path(directory, name) for directory in standard for name in PACKAGES]
    loaded_from = sorted({str(Path(library).parent) for library in libraries})
    return {
        "python": str(python),
        "directories": _with_real_paths(standard),
        "hidden": [str(directory) for directory in packages if directory.is_dir()],
        "files": _with_real_paths([str(python), *libraries]),
        "environment": {"LD_LIBRARY_PATH": ":".join(loaded_from), "MALLOC_ARENA_MAX": "1"},
        "examiner": Path(examiner.__file__).read_bytes(),
        "filter": call_filter.instructions(),
    }


def _with_real_paths(paths: list[str]) -> list[tuple[str, str]]:
    # The sandbox keeps the names, but links would lead elsewhere inside.
    return [(path, str(Path(path).resolve())) for path in paths]
