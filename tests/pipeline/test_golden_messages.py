"""What `braid validate` says of wrong configurations, whole and word for word: golden/.

A case is golden/NAME.yaml, which may begin with a line `# overrides: KEY=VALUE ...`; a name that
begins with _ is of a file that cases use. What is to be printed stands in golden/NAME.txt. When a
message has changed, `make golden` writes these anew: read their diff, it is what a person will see.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from pathlib import Path
from unittest import mock

import pytest

from pipeline import cli

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.stem for path in GOLDEN.glob("[!_]*.yaml"))
OVERRIDES = "# overrides: "
# A line of a fault: where it was written, which key, and what is wrong with it.
FAULT = re.compile(r"(command line|[\w./]+\.yaml(:\d+)?): .+")


def message(case: str) -> str:
    """What a person reads, of a machine with two cores."""
    path = Path(f"{case}.yaml")
    printed = io.StringIO()
    with (
        contextlib.chdir(GOLDEN),
        mock.patch.object(os, "sched_getaffinity", lambda _: {0, 1}),
        contextlib.redirect_stderr(printed),
    ):
        first = path.read_bytes().partition(b"\n")[0].decode(errors="replace")
        given = first.removeprefix(OVERRIDES) if first.startswith(OVERRIDES) else ""
        assert cli.main(["validate", str(path), *shlex.split(given)]) == 1
    return printed.getvalue()


def renew() -> None:
    """Write what is printed now."""
    for old in GOLDEN.glob("*.txt"):
        old.unlink()
    for case in CASES:
        (GOLDEN / f"{case}.txt").write_text(message(case))


@pytest.mark.parametrize("case", CASES)
def test_the_message_is_the_one_that_was_agreed_on(case: str) -> None:
    assert message(case) == (GOLDEN / f"{case}.txt").read_text()


@pytest.mark.parametrize("case", CASES)
def test_every_fault_has_its_place(case: str) -> None:
    title, *faults = (GOLDEN / f"{case}.txt").read_text().splitlines()
    assert title.startswith(f"braid: the configuration has {len(faults)} fault")
    for fault in faults:
        assert (found := FAULT.fullmatch(fault)), fault
        assert found[1] == "command line" or found[2] or "cannot be read" in fault, fault


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(GOLDEN):
        assert cli.main(["validate", "nowhere.yaml"]) == 1
    assert capsys.readouterr().err == (
        "braid: the configuration has 1 fault:\n"
        "nowhere.yaml: cannot be read: No such file or directory\n"
    )


def test_no_message_is_left_of_a_case_that_is_gone() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == CASES


if __name__ == "__main__":
    renew()
