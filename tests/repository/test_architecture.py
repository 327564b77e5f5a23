"""The floors: imports point down, the pipeline knows no torch, and a class name is unique."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.validate import dump_resolved
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import compile_graph
from pipeline.run.ledger import Ledger
from pipeline.run.lineage import lineage_now, write_manifest
from stages.settings import RunSettings

REPOSITORY = Path(__file__).parents[2]
ABOVE = {"parallel": {"stages", "pipeline"}, "stages": {"pipeline"}, "pipeline": set()}
ARITHMETIC = {f"parallel.weights.{name}" for name in ("names", "trainer", "engine", "planner")}
WITHOUT_TORCH = {
    "parallel.families",
    "parallel.files",
    "parallel.memory",
    "parallel.network",
    "parallel.engine.environment",
    "parallel.weights.needs",
    "stages.data.formats",
    "stages.rewards.endpoint",
    "stages.data.reasoning_gym_options",
    "stages.rewards.reward",
    "stages.rewards.json_schema",
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
        assert all(name.endswith(".settings") for name in below - WITHOUT_TORCH), path


def test_a_refit_is_planned_without_torch() -> None:
    program = f"import sys\nimport {', '.join(sorted(ARITHMETIC))}\nprint(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert not {name.partition(".")[0] for name in found.stdout.split()} & HEAVY


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "configs/quickstart.yaml"],
        ["validate", "configs/quickstart.yaml"],
        ["plan", "configs/quickstart.yaml", "--memory"],
        ["status"],
        ["status", "small"],
        ["run", "--help"],
    ],
)
def test_the_command_answers_without_torch(
    arguments: list[str], run: RunDirectory, settings: RunSettings
) -> None:
    run.path.mkdir(parents=True)
    run.settings.write_text(dump_resolved(settings))
    for stage in compile_graph(settings):
        write_manifest(run.stage(stage.name), lineage_now(stage, settings, run))
        Ledger(run.ledger).append(stage.name, "done", "finished", 1)
    program = (
        "import json, sys\n"
        "from pipeline.cli import main\n"
        "try:\n"
        f"    main({[*arguments, '--runs-dir', str(run.path.parent)]!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(found.stdout.splitlines()[-1])}
    assert "pipeline" in loaded
    assert not loaded & HEAVY


def test_outside_of_its_environment_the_command_says_so() -> None:
    found = subprocess.run(
        [sys.executable, "-S", "-m", "pipeline.cli", "plan", "configs/quickstart.yaml"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stdout) == (1, "")
    [line] = found.stderr.splitlines()
    assert line.startswith(f"braid: {sys.executable} has no package ")
    assert line.endswith("with: source .venv/bin/activate")


def test_a_class_is_found_by_its_name_alone() -> None:
    found = Counter(
        node.name
        for room in (*ABOVE, "benchmarks", "tests")
        for _, tree in modules(room)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in found.items() if count > 1] == []
