"""Lint reads the files of the repository alone, whatever a run has left beside them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.runs import REPOSITORY

SOURCES = ["pipeline", "stages", "parallel", "tests", "benchmarks"]
LEFT_BY_A_RUN = ["runs/quickstart", "wandb/offline-run-1", "build/lib"]


def test_lint_does_not_see_what_a_run_leaves(tmp_path: Path) -> None:
    """`make quickstart && make test` is the README's own order."""
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=ignored)
    for name in ("pyproject.toml", ".gitignore"):
        shutil.copy(REPOSITORY / name, tmp_path)
    for name in LEFT_BY_A_RUN:
        (tmp_path / name).mkdir(parents=True)
    linted = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert linted.returncode == 0, linted.stdout + linted.stderr
