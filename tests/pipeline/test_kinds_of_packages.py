"""A kind of stage that an installed package brings, found by its entry point."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.violations import cells

REPOSITORY = Path(__file__).parents[2]
MODULE = """\
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from stages.kinds.kind import MODEL, Inputs, RunBlocks, StageKind, StageSettings, register


class ShrinkSettings(StageSettings):
    \"\"\"The removal of experts that are hardly used.\"\"\"

    kind: Literal["shrink"] = "shrink"
    share: float = Field(default=0.5, gt=0, lt=1, description="share of the experts that stays")


class BlendSettings(StageSettings):
    \"\"\"The mean of two models.\"\"\"

    kind: Literal["blend"] = "blend"
    models: tuple[str, str]

    def inputs(self, run: RunBlocks, domains: Sequence[str]) -> Inputs:
        return Inputs(models={"one": self.models[0], "other": self.models[1]})


for name, settings, merges in (("shrink", ShrinkSettings, False), ("blend", BlendSettings, True)):
    work = f"{name}ing_work"
    register(
        StageKind(name, work, "checkpoints", MODEL, settings, script="export", merges=merges)
    )
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A directory of installed packages, with one that brings the kind `shrink`."""
    packages = tmp_path / "packages"
    information = packages / "shrinking-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: shrinking\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[braid.stages]\nshrink = shrinking_kind\n")
    (packages / "shrinking_kind.py").write_text(MODULE)
    return packages


def braid(package: Path, *arguments: str) -> tuple[int, str]:
    """Run `braid` where the package is installed; return its exit status and all that it prints."""
    finished = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{REPOSITORY}:{package}"},
        capture_output=True,
        text=True,
    )
    return finished.returncode, finished.stdout + finished.stderr


def test_a_package_brings_a_kind(package: Path, config: Path, runs: Path) -> None:
    shrunk = "stages.export.from=shrunk"
    blocks = "  shrunk: {kind: shrink, from: merge, share: 0.25}\n"
    blocks += "  blended: {kind: blend, models: [merge, cold_start]}\n"
    config.write_text(f"{config.read_text()}{blocks}")
    code, said = braid(package, "plan", str(config), shrunk, "--runs-dir", str(runs))
    assert code == 0, said
    rows = [" ".join(cells(line)) for line in said.splitlines()]
    assert any(row.startswith("shrunk shrink merge") for row in rows)
    # By its trait, not its name, it starts from these weights; else it would compare two models.
    start = "blended blend the weights of merge, cold_start"
    assert any(row.startswith(start) for row in rows), said
    code, said = braid(package, "validate", str(config), "stages.shrunk.share=2")
    assert code == 1
    assert "stages.shrunk.share: should be less than 1, not 2" in said
    code, said = braid(package, "validate", str(config), "stages.shrunk.shares=0.5")
    assert (code, 'did you mean "share"?' in said) == (1, True), said


def test_a_kind_that_cannot_be_imported_is_named(package: Path, config: Path) -> None:
    (package / "shrinking_kind.py").write_text("raise RuntimeError('no GPU')")
    code, said = braid(package, "validate", str(config))
    assert code == 1
    assert "braid.stages: shrink, cannot be imported: RuntimeError('no GPU')" in said
