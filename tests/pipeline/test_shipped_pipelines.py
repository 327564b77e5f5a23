"""The shipped pipelines and recipes: the stages and Slurm jobs of each, in golden_pipelines/.

A template is completed with the fewest keys that a run adds to it. Steps, samples and models are
not in the files, so that tuning a recipe changes nothing here. After a change of a pipeline `make
golden` rewrites them; read their diff.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pipeline import cli
from pipeline.config.validate import load
from pipeline.run.graph import Stage, compile_graph
from tests.pipeline.checkpoint_headers import SMALL, write_checkpoint
from tests.pipeline.conftest import CONFIG
from tests.pipeline.violations import extending
from tests.runs import REPOSITORY

GOLDEN = Path(__file__).parent / "golden_pipelines"
TEMPLATES = REPOSITORY / "configs" / "pipelines"
RECIPES = REPOSITORY / "configs" / "recipes"


@dataclass(frozen=True)
class Completion:
    """The keys that a run adds to a template: blocks to train, and others."""

    trained: tuple[str, ...]
    keys: tuple[str, ...] = ()
    weights: bool = False  # it starts from a checkpoint


COMPLETIONS = {
    "dapo": Completion(("dapo",), weights=True),
    "experts-merge": Completion(("cold_start", "merge")),
    "experts-merge-from-weights": Completion(("merge",), weights=True),
    "mixed": Completion(("cold_start", "merge", "mixed")),
    "r1": Completion(
        ("zero", "cold_start", "reasoning", "sft", "final"),
        ("stages.collect.prompts=8", "stages.sft.sequences_per_step=8"),
        weights=True,
    ),
    "two-rounds": Completion(("cold_start", "merge", "merge_2")),
    "ultra": Completion(
        ("sft", "rlvr", "warm_up", "mopd_1", "mopd_2"),
        (
            "stages.refreshed.domains=[sums]",
            "stages.mopd_2.teachers={sums: refreshed.sums, words: teachers.words}",
        ),
    ),
    "v4": Completion(("cold_start", "merge"), ("stages.experts.gate.problems=20",)),
    "zero": Completion(("zero",), weights=True),
}
CASES = [
    *(f"pipelines/{path.stem}" for path in sorted(TEMPLATES.glob("*.yaml"))),
    *(f"recipes/{path.stem}" for path in sorted(RECIPES.glob("[!_]*.yaml"))),
]


def described(case: str, directory: Path) -> str:
    """Return the stages of a shipped file and the jobs that submit them."""
    path, overrides = REPOSITORY / "configs" / f"{case}.yaml", []
    if case.startswith("pipelines/"):
        path, overrides = completed(path.stem, directory)
    stages = compile_graph(load(path, overrides))
    planned = [stage["name"] for stage in printed("plan", directory, path, *overrides)["stages"]]
    assert planned == [stage.name for stage in stages]
    profile = directory / "cluster.yaml"
    profile.write_text("ranks_per_node: 2\n")
    given = ("--cluster", profile, "--dry-run")
    commands = printed("submit", directory, path, *overrides, *given)["commands"]
    # An array has its stages together, so only their order may differ.
    assert sorted(name for each in commands for name in each["stages"]) == sorted(planned)
    jobs = [f"{number}: {job_of(each)}" for number, each in enumerate(commands)]
    return "\n".join(["# stages", *map(stage_of, stages), "# jobs", *jobs, ""])


def completed(template: str, directory: Path) -> tuple[Path, list[str]]:
    """Return a configuration that completes a template, and its overrides."""
    completion = COMPLETIONS[template]
    config = directory / "small.yaml"
    config.write_text(CONFIG)
    extending(config, template, *completion.trained)
    overrides = list(completion.keys)
    if completion.weights:
        start = directory / "start"
        start.mkdir(exist_ok=True)
        (start / "config.json").write_text('{"model_type": "qwen3_moe"}')
        write_checkpoint(start, SMALL)
        overrides.append(f"model.initial_weights={start}")
    return config, overrides


def stage_of(stage: Stage) -> str:
    """Return a stage with what it loads and waits for."""
    roles = [
        name if role == f"models.{name}" else f"{role}={name}" for role, name in stage.roles.items()
    ]
    after = [f"after={name}" for name in stage.after]
    return " ".join([f"{stage.name}: {stage.kind}", *roles, *after])


def job_of(command: dict[str, Any]) -> str:
    """Return a job's script, its array, the jobs that it waits for, and its stages."""
    words = shlex.split(command["command"])
    options = [each for each in words if each.startswith(("--array=", "--dependency="))]
    script = next(Path(each).name for each in words if each.endswith(".sbatch"))
    shown = [re.sub(r"\$\{job_(\d+)\}", r"\1", each) for each in options]
    return " ".join([script, *shown, *command["stages"]])


def printed(command: str, directory: Path, *arguments: object) -> dict[str, Any]:
    """Return what a command prints as JSON, on a machine with two cores and no GPU."""
    output = io.StringIO()
    with (
        mock.patch.object(os, "sched_getaffinity", lambda _: {0, 1}),
        mock.patch("parallel.machine.gpus.built_for_cpu", lambda: True),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        given = ("--json", "--runs-dir", str(directory / "runs"))
        assert cli.main([command, *map(str, arguments), *given]) == 0
    return json.loads(output.getvalue())


def renew() -> None:
    """Rewrite the golden files."""
    for old in GOLDEN.rglob("*.txt"):
        old.unlink()
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory:
            found = described(case, Path(directory))
        path = GOLDEN / f"{case}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found)


@pytest.mark.parametrize("case", CASES)
def test_stages_and_jobs_are_golden(case: str, tmp_path: Path) -> None:
    assert described(case, tmp_path) == (GOLDEN / f"{case}.txt").read_text()
    assert not (tmp_path / "runs").exists()


def test_every_file_and_no_other_is_golden() -> None:
    found = [path.relative_to(GOLDEN).with_suffix("") for path in GOLDEN.rglob("*.txt")]
    assert sorted(map(str, found)) == sorted(CASES)


if __name__ == "__main__":
    renew()
