"""The runs of real models in configs/runs: valid, within a GPU's memory, and simulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tools.walltimes import PROFILES, written

from pipeline.config.validate import load, load_cluster
from pipeline.run.graph import compile_graph
from tests.pipeline.conftest import Braid
from tests.pipeline.test_simulate import ASSUMED
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
    extending = {load(path, to_start=False).name: path.read_text() for path in RUNS}
    models = {name for name, text in extending.items() if "extends: ../models/" in text}
    assert models == described - {"tiny-moe"}


def test_there_is_a_run_for_every_doubling_from_a_node_to_64() -> None:
    found = {load(path, to_start=False).layout.ranks for path in RUNS}
    assert found == {8 << doublings for doublings in range(7)}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_its_layout_keeps_tensor_parallelism_in_a_node(path: Path, braid: Braid) -> None:
    settings = load(path, to_start=False)
    assert settings.layout.tensor <= ASSUMED.per_node
    assert settings.layout.expert <= 64
    code, out, err = braid("plan", path, "--memory")
    assert code == 0, err
    assert "the fullest rank" in out


def test_walltimes_and_costs_are_those_of_the_simulation() -> None:
    for path, text in written().items():
        assert path.read_text() == text, "run: .venv/bin/python -m tools.walltimes"


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_profile_may_extend_its_walltimes(path: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"extends: {PROFILES / path.name}\nkinds: {{export: {{walltime: '30'}}}}\n")
    assert load_cluster(mine).kinds.keys() == {"grpo", "distill", "export"}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_micro_batch_holds_the_longest_sample(path: Path) -> None:
    settings = load(path, to_start=False)
    longest = settings.engine.max_model_tokens
    merge: Any = settings.stages["merge"]
    loops = [domain.loop for domain in settings.domains.values()] + [merge.loop]
    assert min(loop.micro_batch_tokens for loop in loops) >= longest
    room = [domain.sampling.max_response_tokens for domain in settings.domains.values()]
    assert max(*room, merge.sampling.max_response_tokens) + 2048 <= longest


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_models_that_think_have_room_for_it(path: Path) -> None:
    """Mixtral and DeepSeek-V3 do not think; all other models described here do."""
    settings = load(path, to_start=False)
    for name, domain in settings.domains.items():
        thinks = not path.stem.startswith(("mixtral", "deepseek-v3"))
        least = 16384 if name in ("math", "code") else 8192
        assert (domain.sampling.max_response_tokens >= least) >= thinks
        assert domain.objective.mask_truncated == thinks


def test_every_profile_of_walltimes_is_of_a_run() -> None:
    assert {path.name for path in PROFILES.iterdir()} == {path.name for path in RUNS}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_experts_and_merge_follow_the_import(path: Path) -> None:
    stages = {each.name: each for each in compile_graph(load(path, to_start=False))}
    assert all(stages[f"experts.{name}"].parent == "initial" for name in DOMAINS)
    assert [*stages["merge"].teachers] == [*DOMAINS]
