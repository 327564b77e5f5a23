"""The types of the whole source, checked beside the other tests: it takes most of a minute."""

from __future__ import annotations

import subprocess
import sys

from tests.runs import REPOSITORY


def test_types_hold() -> None:
    command = [sys.executable, "-m", "mypy"]
    checked = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
