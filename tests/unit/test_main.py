"""How a rank ends: one line for what a person can mend, a traceback for what is our fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from stages.domains.problem import DomainError
from stages.loop import StageStopped
from stages.main import _leave
errors = {
    "domain": DomainError("sums", "prompts.config", "no prompts\\nat all"),
    "disk": OSError(28, "No space left on device", "x.json"),
    "stopped": StageStopped("sums saved step 3 and stopped"),
    "ours": IndexError("list index out of range"),
}
_leave(errors[sys.argv[1]])
"""


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        ("domain", 1, "braid-error: experts.sums.prompts.config: no prompts at all"),
        ("disk", 1, "braid-error: [Errno 28] No space left on device: 'x.json'"),
        ("stopped", 143, "sums saved step 3 and stopped"),
        ("ours", 1, "IndexError: list index out of range"),
    ],
)
def test_the_last_line_says_why(error: str, status: int, line: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, error],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.returncode == status
    assert ended.stdout.splitlines()[-1] == line


def test_it_ends_even_where_the_log_is_full() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-c", PROGRAM, "domain"], stdout=full, stderr=full)
    assert ended.returncode == 1
