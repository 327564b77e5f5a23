"""The end of a rank: one line for an error that a person can fix, a traceback for a bug."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from stages.data.problem import DomainError
from stages.loop import StageStopped
from stages.main import _leave

ERRORS = {
    "domain": DomainError("sums", "prompts.config", "no prompts\nat all"),
    "disk": OSError(28, "No space left on device", "x.json"),
    "stopped": StageStopped("sums saved step 3 and stopped"),
    "ours": IndexError("list index out of range"),
}


def leave(error: BaseException, output: Path) -> int:
    """Return the exit status of a process that leaves with an error, and prints into `output`.

    Forked from this process, which has imported what a rank imports.
    """
    if (pid := os.fork()) == 0:
        try:
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
            for number in (1, 2):
                os.dup2(descriptor, number)
            sys.excepthook = sys.__excepthook__  # torch's names the rank, once a test had one
            sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
            _leave(error)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        ("domain", 1, "braid-error: domains.sums.prompts.config: no prompts at all"),
        ("disk", 1, "braid-error: [Errno 28] No space left on device: 'x.json'"),
        ("stopped", 143, "sums saved step 3 and stopped"),
        ("ours", 1, "IndexError: list index out of range"),
    ],
)
def test_the_last_line_says_why(error: str, status: int, line: str, tmp_path: Path) -> None:
    assert leave(ERRORS[error], tmp_path / "log") == status
    assert (tmp_path / "log").read_text().splitlines()[-1] == line


def test_a_rank_exits_even_where_the_log_is_full() -> None:
    assert leave(ERRORS["domain"], Path("/dev/full")) == 1
