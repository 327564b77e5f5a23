"""The floors and their rooms: imports point down, no circles, unique class names."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.structure import REPOSITORY, circles, depth, imports, rooms
from tools.walks import WALKS, Tracer, traced_apart

# The rooms of each floor: a room imports only rooms that stand before it. The audit recomputes a
# step and imports no other room of stages/, so that it cannot repeat their errors.
ROOMS = {
    "pipeline": ["config", "run", "estimate", "launch", "slurm", "new_run", "report", "commands"],
    "stages": [
        "audit",
        "data",
        "rewards",
        "objectives",
        "guards",
        "sampling",
        "trackers",
        "kinds",
        "domain_tools",
    ],
    "parallel": [
        "machine",
        "cpu",
        "weights",
        "estimates",
        "hugging_face",
        "model",
        "checkpoint",
        "engine",
    ],
}
APART = {("engine", "checkpoint"), *(("audit", room) for room in ROOMS["stages"])}
DEEPEST = {"pipeline": 8, "stages": 13, "parallel": 9}  # imports; a change may only lower them
LONGEST_WALKS = {"dry-run": (65, 41), "grpo-step": (48, 53)}  # files, classes; only lower them
ABOVE = {"parallel": {"stages", "pipeline"}, "stages": {"pipeline"}, "pipeline": set()}
ARITHMETIC = {f"parallel.weights.{name}" for name in ("names", "holdings", "needs", "planner")}
WITHOUT_TORCH = {
    "parallel.estimates.memory",
    "parallel.errors",
    "parallel.families",
    "parallel.hugging_face.stored",
    "parallel.hugging_face.text_model",
    "parallel.files",
    "parallel.machine.forkserver",
    "parallel.machine.gpus",
    "parallel.layout_rules",
    "parallel.micro_batches",
    "parallel.machine.network",
    "parallel.parquet_files",
    "parallel.machine.on_gpus",
    "parallel.machine.slots",
    "parallel.estimates.tensor_sizes",
    "parallel.estimates.phases",
    "parallel.estimates.roofline.hardware",
    "parallel.estimates.roofline.step",
    "parallel.estimates.roofline.weight_sync",
    "parallel.estimates.roofline.work",
    "parallel.engine.platform",
    "parallel.engine_rules",
    "parallel.estimates.engine_memory",
    "parallel.weights.names",
    "parallel.weights.needs",
    "stages.directory",
    "stages.guards.registry",
    "stages.metric_definitions",
    "stages.metric_ranges",
    "stages.domains",
    "stages.keys",
    "stages.kinds",
    "stages.kinds.mixture_settings",
    "stages.kinds.distill.settings",
    "stages.kinds.dpo.settings",
    "stages.objectives.kl",
    "stages.kinds.evaluate.settings",
    "stages.kinds.export.settings",
    "stages.kinds.grpo.settings",
    "stages.kinds.kind",
    "stages.kinds.distill.source_settings",
    "stages.kinds.merge_weights.settings",
    "stages.kinds.quantize.settings",
    "stages.kinds.rules",
    "stages.kinds.sample.settings",
    "stages.kinds.sft.settings",
    "stages.objectives.advantages.gae",
    "stages.objectives.loss",
    "stages.objectives.surrogate",
    "stages.data.end_tokens",
    "stages.data.reasoning_gym",
    "stages.data.reasoning_gym_options",
    "stages.data.columns",
    "stages.data.messages",
    "stages.data.prompt_template",
    "stages.data.row_forms",
    "stages.data.thoughts",
    "stages.data.tokenizer",
    "stages.rewards.reward",
    "stages.rewards.kinds",
    "stages.rewards.kinds.judge",
    "stages.rewards.kinds.math",
    "stages.rewards.kinds.python",
    "stages.rewards.sandbox",
    "stages.sampling.sample_files",
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


@pytest.mark.parametrize("floor", ROOMS)
def test_rooms_of_a_floor_import_those_before_them(floor: str) -> None:
    order = ROOMS[floor]
    assert {path.parent.name for path in (REPOSITORY / floor).glob("*/__init__.py")} == set(order)
    for room, others in rooms(imports()).items():
        above, _, name = room.partition(".")
        if above == floor:
            below = {each.partition(".")[2] for each in others}
            assert below <= set(order[: order.index(name)]), room
            assert not {(name, each) for each in below} & APART, room


def test_rooms_import_what_their_modules_import_from_rooms_of_their_floor() -> None:
    graph = {
        "pipeline.cli": frozenset({"pipeline.run.a"}),
        "pipeline.run.a": frozenset({"pipeline.run.b", "pipeline.config.c", "stages.data.e"}),
        "pipeline.run.b": frozenset({"pipeline.text"}),
        "pipeline.config.c": frozenset({"pipeline.config.d"}),
        "pipeline.config.d": frozenset({"pipeline.run.b"}),
    }
    one, other = "pipeline.config", "pipeline.run"
    assert circles(graph) == []
    assert rooms(graph) == {one: {other}, other: {one}}
    assert [set(circle) for circle in circles(rooms(graph))] == [{one, other}]


def test_imports_have_no_circle_and_no_new_depth() -> None:
    graph = imports()
    assert circles(graph) == circles(rooms(graph)) == []
    assert all(depth(graph, floor) <= deepest for floor, deepest in DEEPEST.items())


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_gets_no_longer(name: str) -> None:
    walk = traced_apart(name)
    files, classes = LONGEST_WALKS[name]
    assert len(walk.files) <= files, f"python -m tools.walks {name} lists them"
    assert len(walk.classes) <= classes, sorted(walk.classes)


TRACED = """\
class A:
    def method(self):
        return sorted([2, 1], key=lambda number: -number)
def threaded():
    pass
def not_called():
    pass
"""


def test_a_walk_has_what_the_floors_call_in_every_thread(tmp_path: Path) -> None:
    inside, outside = dict[str, Any](), dict[str, Any]()
    codes = {
        file: compile(TRACED, str(tmp_path / file), "exec")
        for file in ("stages/a.py", "tests/b.py")
    }
    tracer = Tracer(tmp_path)
    tracer.start()
    exec(codes["stages/a.py"], inside)  # bodies of a module and a class are no functions
    exec(codes["tests/b.py"], outside)
    inside["A"]().method()
    outside["threaded"]()
    thread = threading.Thread(target=inside["threaded"])
    thread.start()
    thread.join()
    walk = tracer.stop()
    inside["not_called"]()
    assert walk.functions == [("stages/a.py", "A.method"), ("stages/a.py", "threaded")]


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
