"""What the numbers were measured on: the machine, the code, the day."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent


def measured() -> dict[str, str]:
    """What every file of numbers begins with: `machine`, `revision` and `date`.

    The revision is a commit's; of code that differs from it, it ends in "-dirty".
    """
    described = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    revision = subprocess.run(described, cwd=HERE, capture_output=True, text=True, check=True)
    return {
        "machine": machine(),
        "revision": revision.stdout.strip(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


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
