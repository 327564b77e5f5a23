"""The teacher `self` and the data of a merge in the graph, the lineage and the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.validate import load
from pipeline.estimate.stage_memory import compared_with
from pipeline.report.drawing import origin
from pipeline.run.graph import Stage, compile_graph
from tests.pipeline.violations import edited

SELF = "stages.merge.teachers={sums: self, words: experts}"
COLLECT = "collect: {kind: sample, from: cold_start, prompts: 8, keep: {reward: 1.0}}"


def stages_of(config: Path, *overrides: str) -> dict[str, Stage]:
    return {stage.name: stage for stage in compile_graph(load(config, overrides))}


def below(stage: Stage, *keys: str) -> set[str]:
    return {key for key in stage.reads if key.startswith(keys)}


def test_a_merge_without_either_reads_what_it_read_before(config: Path) -> None:
    """Else every finished merge would be stale."""
    merge = stages_of(config)["merge"]
    assert not below(merge, "self_teacher", "data")
    assert not any("demonstrations" in key for key in merge.reads)


def test_the_student_is_no_input_and_its_context_is_in_the_lineage(config: Path) -> None:
    merge = stages_of(config, SELF)["merge"]
    assert merge.teachers == {"words": "experts.words"}
    assert merge.waits_for == ("cold_start", "experts.words")
    assert origin(merge) == "cold_start, taught by experts.words, itself"
    assert below(merge, "self_teacher") == {
        f"self_teacher.{key}" for key in ("ema_decay", "context", "column", "template")
    }
    assert not below(merge, "domains.sums.rewards")
    sibling = (
        SELF,
        "stages.merge.self_teacher.context=sibling",
        "stages.merge.sampling={group_size: 2}",
    )
    assert below(stages_of(config, *sibling)["merge"], "domains.sums.rewards")
    shown = stages_of(config, SELF, "stages.merge.self_teacher.context=demonstration")["merge"]
    assert below(shown, "domains.sums.demonstrations")
    assert not below(shown, "domains.words.demonstrations")


def test_one_stage_of_each_domain_may_teach_itself(config: Path) -> None:
    each = (SELF, "stages.merge.for_each=domain", "stages.merge.self_teacher.ema_decay=0.5")
    stages = stages_of(config, *each, "stages.evaluate=null", "stages.export=null")
    assert below(stages["merge.sums"], "self_teacher")
    assert not below(stages["merge.words"], "self_teacher")
    assert stages["merge.sums"].teachers == {}


@pytest.mark.parametrize(("decay", "models"), [(0, (1, 0)), (0.5, (1, 1)), (1, (2, 0))])
def test_the_plan_counts_the_average(decay: float, models: tuple[int, int], config: Path) -> None:
    settings = load(config, [SELF, f"stages.merge.self_teacher.ema_decay={decay}"])
    merge = next(stage for stage in compile_graph(settings) if stage.name == "merge")
    assert compared_with(merge, settings) == models


def test_data_are_of_a_stage_or_of_the_domain_s_demonstrations(config: Path) -> None:
    share = "stages.merge.data_share=0.5"
    merge = stages_of(config, share)["merge"]
    assert merge.data == {}
    for name in ("sums", "words"):
        assert below(merge, f"domains.{name}.demonstrations")
    collected = "stages.merge.data={sums: {stage: collect}}"
    edited(config, "  evaluate: {", f"  {COLLECT}\n  evaluate: {{")
    merge = stages_of(config, share, collected)["merge"]
    assert merge.data == {"sums": "collect"}
    assert merge.roles["data.sums"] == "collect"
    assert not below(merge, "domains.sums.demonstrations")
    assert merge.reads["data_share"] == 0.5
    assert not below(merge, "data.")


def test_a_gate_on_the_student_as_teacher_compares_with_its_start(config: Path) -> None:
    gate = stages_of(config, SELF, "stages.merge.gate={}")["gates.merge"]
    assert gate.against == {"sums": "cold_start", "words": "experts.words"}
