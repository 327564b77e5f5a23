"""The floors: imports point down, the pipeline knows no torch, and a class name is unique."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ABOVE = {"parallel": {"stages", "pipeline"}, "stages": {"pipeline"}, "pipeline": set()}
ARITHMETIC = {f"parallel.weights.{name}" for name in ("names", "holdings", "needs", "planner")}
WITHOUT_TORCH = {
    "parallel.errors",
    "parallel.families",
    "parallel.files",
    "parallel.memory",
    "parallel.network",
    "parallel.status_pipe",
    "parallel.engine.environment",
    "parallel.weights.needs",
    "stages.kinds",
    "stages.data.formats",
    "stages.objectives.advantages.gae",
    "stages.objectives.correction",
    "stages.data.reasoning_gym_options",
    "stages.rewards.registry",
    "stages.rewards.kinds.judge",
    "stages.rewards.kinds.python",
    "stages.rewards.sandbox",
    "stages.statistics",
}
HEAVY = {
    "torch",
    "megatron",
    "vllm",
    "transformers",
    "mbridge",
    "numpy",
    "reasoning_gym",
    "pyarrow",
}


def modules(floor: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((REPOSITORY / floor).rglob("*.py")):
        yield path, ast.parse(path.read_text())


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("floor", ABOVE)
def test_imports_point_down(floor: str) -> None:
    for path, tree in modules(floor):
        floors = {name.partition(".")[0] for name in imported(tree)}
        assert not floors & ABOVE[floor], path


def test_the_pipeline_takes_only_what_needs_no_torch_from_the_floors_below() -> None:
    for path, tree in modules("pipeline"):
        below = {name for name in imported(tree) if name.startswith(("stages", "parallel"))}
        assert all(name.endswith("settings") for name in below - WITHOUT_TORCH), path


def test_a_refit_is_planned_without_torch() -> None:
    program = f"import sys\nimport {', '.join(sorted(ARITHMETIC))}\nprint(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert not {name.partition(".")[0] for name in found.stdout.split()} & HEAVY


def test_a_class_is_found_by_its_name_alone() -> None:
    found = Counter(
        node.name
        for room in (*ABOVE, "benchmarks", "tests")
        for _, tree in modules(room)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in found.items() if count > 1] == []
