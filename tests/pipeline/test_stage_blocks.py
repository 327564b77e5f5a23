"""A block of stages: the names it gives, the references it resolves, and what a stage reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.read import ConfigError
from pipeline.config.validate import load
from pipeline.run.graph import Stage, compile_graph

Graph = Callable[..., dict[str, Stage]]


@pytest.fixture
def graph(config: Path) -> Graph:
    """Return the stages of the smallest configuration by name, with other keys of its blocks."""

    def compiled(**blocks: dict[str, Any]) -> dict[str, Stage]:
        tree = yaml.safe_load(config.read_text())
        for name, keys in blocks.items():
            tree["stages"].setdefault(name, {}).update(keys)
        path = config.with_name("changed.yaml")
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return {stage.name: stage for stage in compile_graph(load(path))}

    return compiled


def test_a_block_for_each_domain_is_one_stage_of_each(graph: Graph) -> None:
    stages = graph(experts={"as": "policy.{domain}"}, merge={"teachers": "experts"})
    assert [stages[f"policy.{name}"].domain for name in ("sums", "words")] == ["sums", "words"]
    assert stages["merge"].teachers == {"sums": "policy.sums", "words": "policy.words"}
    assert stages["policy.sums"].parent == "cold_start"
    few = graph(experts={"domains": ["sums"]}, merge={"domains": ["sums"]})
    assert "experts.words" not in few
    assert few["merge"].teachers == {"sums": "experts.sums"}


def test_a_stage_waits_for_those_after_it_and_loads_none_of_them(graph: Graph) -> None:
    own = {"kind": "sft", "optimizer": {"learning_rate": 1e-3}, "loop": {"steps": 2}}
    stages = graph(second={**own, "after": ["experts.sums", "merge"]}, evaluate={"after": []})
    assert stages["second"].after == ("experts.sums", "merge")
    assert stages["second"].inputs == ()
    with pytest.raises(ConfigError, match=r"stages\.second\.after: no such stage: merged"):
        graph(second={**own, "after": ["merged"]})


def test_another_name_changes_nothing_that_a_stage_reads(graph: Graph) -> None:
    """A renamed stage repeats bit for bit where it is seeded as before."""
    before = graph()["experts.sums"]
    renamed = {"as": "policy.{domain}", "was": "experts.{domain}"}
    now = graph(experts=renamed)["policy.sums"]
    assert now.reads == before.reads
    assert before.seeded_as == now.seeded_as == "experts.sums"


def test_a_stage_trains_as_its_domain_says_but_for_the_blocks_it_states(graph: Graph) -> None:
    stages = graph(experts={"updates_per_rollout": 2, "loop": {"steps": 5}})
    assert [stages[f"experts.{name}"].steps for name in ("sums", "words")] == [5, 5]
    assert stages["experts.sums"].reads["updates_per_rollout"] == 2
    assert stages["experts.sums"].reads["optimizer.learning_rate"] == 1e-3


def test_an_evaluation_is_of_all_models_or_of_those_it_names(graph: Graph, start: Path) -> None:
    every = ["cold_start", "experts.sums", "experts.words", "merge"]
    assert sorted(graph()["evaluate"].models) == every
    few = graph(evaluate={"models": ["merge", "./start"]})["evaluate"]
    assert few.models == {"merge": "merge", str(start): str(start)}


def test_a_kl_reference_outside_the_run_is_relative_to_the_file_that_names_it(
    graph: Graph, start: Path
) -> None:
    penalty = {"kl": {"coefficient": 0.1, "reference": "./start"}}
    assert graph(experts={"objective": penalty})["experts.sums"].models == {"sums": str(start)}


def test_every_teacher_of_another_kind_of_reference_is_found(graph: Graph, start: Path) -> None:
    teachers = {"sums": "cold_start", "words": "./start"}
    merge = graph(merge={"teachers": teachers, "from": "experts.sums"})["merge"]
    assert merge.teachers == {"sums": "cold_start", "words": str(start)}
    assert merge.parent == "experts.sums"
