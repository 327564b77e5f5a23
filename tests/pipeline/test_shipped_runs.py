"""The runs of real models in configs/runs: valid, within a GPU's memory, and simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.config.validate import load
from pipeline.run.graph import compile_graph
from tests.pipeline.conftest import Braid
from tests.runs import REPOSITORY

RUNS = sorted((REPOSITORY / "configs" / "runs").glob("[a-z]*.yaml"))
DOMAINS = ("math", "code", "instructions")


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_run_fits_the_gpus_that_it_names(path: Path, braid: Braid) -> None:
    code, out, err = braid("simulate", path, "--gpu", "h100", "--json")
    assert code == 0, err  # also where a phase needs more than a GPU has
    stages = json.loads(out)["stages"]
    assert [*stages] == [*(f"experts.{name}" for name in DOMAINS), "merge"]
    stated = int(path.read_text().split()[1])
    assert {each["gpus"] for each in stages.values()} == {stated}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_what_is_missing_is_named(path: Path, braid: Braid) -> None:
    """On a machine without the weights and the prompts."""
    code, _, err = braid("validate", path)
    assert code and all(f"/data/{name}.jsonl" in err for name in DOMAINS)


def test_every_model_has_a_run() -> None:
    described = {path.stem for path in (REPOSITORY / "configs" / "models").glob("*.yaml")}
    assert {path.stem for path in RUNS} == described - {"tiny-moe"}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_experts_and_merge_follow_the_import(path: Path) -> None:
    stages = {each.name: each for each in compile_graph(load(path, to_start=False))}
    assert all(stages[f"experts.{name}"].parent == "initial" for name in DOMAINS)
    assert [*stages["merge"].teachers] == [*DOMAINS]
