"""Start `braid` as a person does, and read a run's files."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
BRAID = [sys.executable, "-m", "pipeline.cli"]


def braid(directory: Path, *arguments: str, log: Path | None = None) -> subprocess.Popen[str]:
    """`braid ARGUMENTS`, with its runs in `directory`; prints into `log`, or into a pipe."""
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
    """What a run that is expected to succeed printed."""
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def metrics(run: Path, stage: str) -> list[dict[str, Any]]:
    """The stage's metrics so far; a line that is being written is left out."""
    path = run / "stages" / stage / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
