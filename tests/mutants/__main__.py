"""Make every mistake of the lists in a clone, one at a time, and see that tests fail.

A mistake is noticed where one of the tests that it names fails, after they passed without it. The
exit code is 1 where fewer than 95 % are noticed, where the tests fail without a mistake, or where
the code that a mistake changes is gone. A line of JSON for each is written to --result.
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
from contextlib import contextmanager
from pathlib import Path

from . import mechanics, wiring
from .mutant import Mutant

REPOSITORY = Path(__file__).parents[2]
MUTANTS = [*wiring.MUTANTS, *mechanics.MUTANTS]
NOTICED_SHARE = 0.95
SECONDS = 1200.0  # of the tests of one mutant; a mistake that makes them hang is noticed too


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "--only", metavar="TEXT", help="those whose name, file or tests have this text"
    )
    parser.add_argument("--list", action="store_true", help="list them, and make none")
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
    with _clone() as clone:
        wrong = [tests for tests in dict.fromkeys(e.tests for e in chosen) if _fail(clone, tests)]
        if wrong:
            print(f"these fail without a mistake: {'; '.join(wrong)}")
            return 1
        survived = list(_survivors(clone, chosen, arguments.result))
    noticed = len(chosen) - len(survived)
    print(f"noticed {noticed} of {len(chosen)}")
    return int(noticed < NOTICED_SHARE * len(chosen))


def _survivors(clone: Path, chosen: Sequence[Mutant], result: Path | None) -> Iterator[Mutant]:
    """Yield the mutants that no test notices; print a line for each."""
    for number, mutant in enumerate(chosen, start=1):
        file = clone / mutant.file
        whole, began = file.read_text(), time.monotonic()
        file.write_text(mutant.applied(clone))
        try:
            noticed = _fail(clone, mutant.tests)
        finally:
            file.write_text(whole)
        seconds = time.monotonic() - began
        said = "noticed " if noticed else "SURVIVED"
        print(f"[{number}/{len(chosen)}] {said} {mutant.name} ({seconds:.0f} s)", flush=True)
        if result is not None:
            line = {"name": mutant.name, "noticed": noticed, "tests": mutant.tests}
            with result.open("a") as lines:
                lines.write(json.dumps({**line, "seconds": round(seconds)}) + "\n")
        if not noticed:
            yield mutant


def _fail(clone: Path, tests: str) -> bool:
    """Whether one of the tests fails in the clone, or does not end."""
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
    """A copy of what is committed, which Python imports in place of the repository."""
    with tempfile.TemporaryDirectory(prefix="braid-mutants-") as directory:
        clone = Path(directory) / "braid"
        subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
        yield clone


if __name__ == "__main__":
    sys.exit(main())
