"""What the numbers were measured on: the machine, the code, the day."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
NOT_NUMBERS = ":(exclude,top)benchmarks/**/*.json"


def measured(runs: Iterable[Path] = ()) -> dict[str, str]:
    """What every file of numbers begins with: `machine`, `revision` and `date`.

    The revision is a commit's; of code that differs from it, it ends in "-dirty". Of `runs`, which
    may have been made some time ago, it is the one that made them.

    Raises ValueError where several have.
    """
    made_by = {
        json.loads(path.read_text())["code"]
        for run in runs
        for path in run.glob("stages/*/manifest.json")
    }
    if len(made_by) > 1:
        raise ValueError(f"the runs are of several revisions: {', '.join(sorted(made_by))}")
    return {
        "machine": machine(),
        "revision": next((each[:7] + each[40:] for each in made_by), None) or _revision(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _revision() -> str:
    """Return this code's revision; files of numbers, which it writes, do not count as changes."""
    head = _git("rev-parse", "--short=7", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", NOT_NUMBERS)
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str:
    found = subprocess.run(
        ["git", *arguments], cwd=HERE, capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def machine() -> str:
    """Cores, processor and system."""
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {processor()}, {platform.system()} {platform.machine()}"


def processor() -> str:
    """Its name where the system tells it."""
    information = Path("/proc/cpuinfo")
    for line in information.read_text().splitlines() if information.exists() else []:
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or "unknown"
