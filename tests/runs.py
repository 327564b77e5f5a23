"""Start `braid` as a person does, and read a run's files."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.awaiting import PATIENCE_SECONDS

REPOSITORY = Path(__file__).parents[1]
BRAID = [sys.executable, "-m", "pipeline.cli"]


def braid(directory: Path, *arguments: str, log: Path | None = None) -> subprocess.Popen[str]:
    """Start `braid ARGUMENTS` with its runs in `directory`; it prints to `log`, or to a pipe."""
    with contextlib.ExitStack() as stack:
        output = subprocess.PIPE if log is None else stack.enter_context(log.open("w"))
        return subprocess.Popen(
            [*BRAID, *arguments, "--runs-dir", str(directory)],
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a run that is expected to succeed, and return its output."""
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    return output


def metrics(run: Path, stage: str) -> list[dict[str, Any]]:
    """Return the stage's metrics so far, without a line that is still being written."""
    path = run / "stages" / stage / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
