"""Start `braid` as a person does, watch a run's files, and kill its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
BRAID = [sys.executable, "-m", "pipeline.cli"]
CONFIG = str(REPOSITORY / "configs" / "smoke.yaml")
STAGES = [
    "cold_start",
    "experts.chain_sum",
    "experts.spell_backward",
    "experts.number_sorting",
    "gates.chain_sum",
    "merge",
    "evaluate",
    "export",
]
TRAINING = [*STAGES[:4], "merge"]


def braid(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    """`braid ARGUMENTS`, with its runs in `directory`."""
    return subprocess.Popen(
        [*BRAID, *arguments, "--runs-dir", str(directory)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
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


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait while the run goes on."""
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def processes(run: Path, module: str) -> list[int]:
    """The run's processes of a module, in the order they were started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if entry.name.isdecimal() and module in command and str(run) in " ".join(command):
            found.append(int(entry.name))
    return sorted(found)


def kill(pid: int) -> None:
    """End a process as the kernel's out-of-memory killer would."""
    os.kill(pid, signal.SIGKILL)
