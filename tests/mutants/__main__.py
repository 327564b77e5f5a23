"""Apply each mutant of the lists to a clone of the repository and check that the tests notice it.

A mutant is noticed where one of the tests that it names fails, after they passed without it. The
exit code is 1 where fewer than 95 % are noticed, where the tests fail without a mutant, or where
the code that a mutant changes is gone. A line of JSON for each is written to --result.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue

from pipeline.commands.support.arguments import positive

from . import contact, joints, mechanics, models, wiring
from .mutant import Mutant

REPOSITORY = Path(__file__).parents[2]
MUTANTS = [
    *(*wiring.MUTANTS, *mechanics.MUTANTS, *models.MUTANTS),
    *(*contact.MUTANTS, *joints.MUTANTS),
]
# Directories that `python -m tools.vendor` fills.
VENDORED = ("pipeline/report/page/web/vendor", "tests/browser/vendor", "tests/vendor")
NOTICED_SHARE = 0.95
SECONDS = 1200.0  # of the tests of one mutant; a mistake that makes them hang is noticed too


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "--only", metavar="TEXT", help="those whose name, file or tests have this text"
    )
    parser.add_argument("--list", action="store_true", help="list them, and make none")
    parser.add_argument(
        "--jobs",
        type=positive,
        default=1,
        metavar="N",
        help="mutants in parallel (default: 1)",
    )
    parser.add_argument("--result", type=Path, help="append a line of JSON for each to this file")
    arguments = parser.parse_args()
    chosen = [
        each
        for each in MUTANTS
        if (arguments.only or "") in f"{each.name} {each.file} {each.tests}"
    ]
    if arguments.list:
        print("\n".join(f"{each.name}: {each.file}; {each.tests}" for each in chosen))
        return 0
    with ExitStack() as stack:
        clones: SimpleQueue[Path] = SimpleQueue()
        for _ in range(arguments.jobs):
            clones.put(stack.enter_context(_clone()))
        pool = ThreadPoolExecutor(arguments.jobs)
        stack.callback(pool.shutdown, cancel_futures=True)
        suites = list(dict.fromkeys(each.tests for each in chosen))
        failed = pool.map(lambda tests: _tried(clones, tests), suites)
        if wrong := [tests for tests, (fails, _) in zip(suites, failed, strict=True) if fails]:
            print(f"these fail without a mutant: {'; '.join(wrong)}")
            return 1
        tried = pool.map(lambda mutant: _tried(clones, mutant.tests, mutant), chosen)
        noticed = _reported(chosen, tried, arguments.result)
    print(f"noticed {noticed} of {len(chosen)}")
    return int(noticed < NOTICED_SHARE * len(chosen))


def _tried(
    clones: SimpleQueue[Path], tests: str, mutant: Mutant | None = None
) -> tuple[bool, float]:
    """Return whether the tests fail in a clone with the mutant applied, and their seconds."""
    clone, began = clones.get(), time.monotonic()
    try:
        if mutant is None:
            return _fail(clone, tests), time.monotonic() - began
        file = clone / mutant.file
        whole = file.read_text()
        mutated = mutant.applied(clone)
        try:
            file.write_text(mutated)
            return _fail(clone, tests), time.monotonic() - began
        finally:
            file.write_text(whole)
    finally:
        clones.put(clone)


def _reported(
    chosen: Sequence[Mutant], tried: Iterator[tuple[bool, float]], result: Path | None
) -> int:
    """Return how many are noticed, and print a line for each, in the lists' order."""
    count = 0
    for number, (mutant, (noticed, seconds)) in enumerate(zip(chosen, tried, strict=True), start=1):
        said = "noticed " if noticed else "SURVIVED"
        print(f"[{number}/{len(chosen)}] {said} {mutant.name} ({seconds:.0f} s)", flush=True)
        if result is not None:
            line = {"name": mutant.name, "noticed": noticed, "tests": mutant.tests}
            with result.open("a") as lines:
                lines.write(json.dumps({**line, "seconds": round(seconds)}) + "\n")
        count += noticed
    return count


def _fail(clone: Path, tests: str) -> bool:
    """Return whether one of the tests fails in the clone, or does not end."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(clone)}  # before what is installed
    try:
        ended = subprocess.run(
            command, cwd=clone, env=environment, capture_output=True, timeout=SECONDS, text=True
        )
    except subprocess.TimeoutExpired:
        return True
    if ended.returncode not in (0, 1):  # not a test that failed, but no test at all
        raise RuntimeError(f"{' '.join(command)}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return ended.returncode == 1


@contextmanager
def _clone() -> Iterator[Path]:
    """Clone the committed state, so that Python imports it in place of the repository."""
    with tempfile.TemporaryDirectory(prefix="braid-mutants-") as directory:
        clone = Path(directory) / "braid"
        subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
        for vendored in VENDORED:  # which git ignores, and tests read
            if (REPOSITORY / vendored).exists():
                (clone / vendored).symlink_to(REPOSITORY / vendored)
        yield clone


if __name__ == "__main__":
    sys.exit(main())
