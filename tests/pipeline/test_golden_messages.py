"""The whole output of `braid validate` for invalid configurations, in golden/.

A case is golden/NAME.yaml, which may begin with a line `# overrides: KEY=VALUE ...`; its output is
golden/NAME.txt. Files that cases extend begin with _. After a change of a message `make golden`
rewrites the outputs; read their diff.
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
# A line of an error: its location, the key and the problem.
ERROR = re.compile(r"(command line|[\w./]+\.yaml(:\d+)?): .+")


def message(case: str) -> str:
    """Return what `braid validate` prints on a machine with two cores."""
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
    """Rewrite the outputs."""
    for old in GOLDEN.glob("*.txt"):
        old.unlink()
    for case in CASES:
        (GOLDEN / f"{case}.txt").write_text(message(case))


@pytest.mark.parametrize("case", CASES)
def test_the_output_is_golden(case: str) -> None:
    assert message(case) == (GOLDEN / f"{case}.txt").read_text()


@pytest.mark.parametrize("case", CASES)
def test_every_error_has_its_location(case: str) -> None:
    title, *errors = (GOLDEN / f"{case}.txt").read_text().splitlines()
    assert title.startswith(f"braid: {len(errors)} configuration error")
    for error in errors:
        assert (found := ERROR.fullmatch(error)), error
        assert found[1] == "command line" or found[2] or "cannot be read" in error, error


def test_a_missing_file_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(GOLDEN):
        assert cli.main(["validate", "nowhere.yaml"]) == 1
    assert capsys.readouterr().err == (
        "braid: 1 configuration error:\nnowhere.yaml: cannot be read: No such file or directory\n"
    )


def test_every_output_has_its_case() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == CASES


if __name__ == "__main__":
    renew()
