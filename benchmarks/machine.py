"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


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
