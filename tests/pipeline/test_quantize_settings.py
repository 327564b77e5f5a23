"""Stages of kind quantize in a configuration: rules, gates, and what makes them stale."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.validate import load
from pipeline.run.gates import judge_loss
from pipeline.run.graph import Stage, compile_graph
from stages.guards.settings import LossGateSettings
from tests.pipeline.violations import edited, errors, violation

BLOCK = "  small: {kind: quantize, from: merge, format: int4, group_size: 32, gate: {}}\n"
KEY = "stages.small"
EXPERTS = "stages.small.exclude=['*.experts.*']"


@pytest.fixture
def quantized(config: Path) -> Path:
    return edited(config, "  evaluate:", f"{BLOCK}  evaluate:")


def stages(path: Path, *overrides: str) -> dict[str, Stage]:
    return {stage.name: stage for stage in compile_graph(load(path, overrides))}


def test_it_is_evaluated_and_its_gate_compares_it_with_its_parent(quantized: Path) -> None:
    found = stages(quantized, "stages.export.from=small")
    assert found["small"].parent == "merge" and found["small"].steps == 0
    assert "small" in found["evaluate"].models
    gate = found["gates.small"]
    assert gate.gated == "small" and gate.against == {"sums": "merge", "words": "merge"}
    assert found["export"].after == ("gates.small",)


def test_its_prompts_make_it_stale_and_its_gate_does_not(quantized: Path) -> None:
    before = stages(quantized)["small"].reads
    assert before["calibration"] == 128
    other = "domains.sums.prompts.config={max_digits: 2}"
    assert stages(quantized, other)["small"].reads != before
    assert stages(quantized, "stages.small.calibration=8")["small"].reads != before
    for same in ("stages.small.gate.max_loss=0.1", "domains.sums.sampling.temperature=0.9"):
        assert stages(quantized, same)["small"].reads == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("format=int3", "format: should be 'fp8', 'nvfp4', 'int8' or 'int4', not \"int3\""),
        ("calibration=0", "calibration: should be greater than 0, not 0"),
        ("format=fp8", "group_size: only of format int8 and int4; remove it"),
        (
            "exclude=['*.q_proj.wieght']",
            "exclude: *.q_proj.wieght is of no tensor to quantize; those are"
            " model.layers.3.self_attn.q_proj.weight, model.layers.3.self_attn.k_proj.weight,"
            " model.layers.3.self_attn.v_proj.weight, model.layers.3.self_attn.o_proj.weight,"
            " model.layers.3.mlp.experts.N.gate_proj.weight,"
            " model.layers.3.mlp.experts.N.up_proj.weight,"
            " model.layers.3.mlp.experts.N.down_proj.weight",
        ),
        (
            "exclude=['*.q_proj.weight']",
            "exclude: leaves model.layers.0.self_attn.k_proj.weight alone in"
            " model.layers.0.self_attn.qkv_proj, which vLLM loads as one; exclude all of it",
        ),
        (
            "exclude=['*.experts.0.*']",
            "exclude: leaves model.layers.0.mlp.experts.1.gate_proj.weight alone in"
            " model.layers.0.mlp.experts, which vLLM loads as one; exclude all of it",
        ),
        ("exclude=['*']", "exclude: leaves nothing to quantize; remove a pattern"),
        (
            "group_size=64",
            "group_size: 64 weights have a scale, and do not divide the 96 columns of"
            " model.layers.0.self_attn.q_proj.weight; set 32, or exclude it",
        ),
    ],
)
def test_broken_rules_name_file_and_key(quantized: Path, override: str, message: str) -> None:
    found = violation(quantized, f"stages.small.{override}")
    where, _, said = found.partition(": stages.small.")
    assert where
    assert said == message


def test_it_starts_from_a_model(quantized: Path) -> None:
    said = violation(quantized, "stages.small.from=null", "stages.small.gate=null")
    assert said.endswith("stages.small.from: must name the stage whose model is quantized")


def test_a_group_that_divides_no_row_asks_for_another_format(quantized: Path) -> None:
    narrow = "model.expert_hidden_size=40"
    [said] = errors(quantized, narrow, "stages.small.group_size=32")
    assert "do not divide the 40 columns of model.layers.0.mlp.experts.0.down_proj.weight" in said
    assert said.endswith("exclude it, or use format: fp8")
    load(quantized, (narrow, EXPERTS))
    load(quantized, (narrow, "stages.small.format=fp8", "stages.small.group_size=null"))


def test_a_format_of_one_group_size_is_named_where_that_divides_no_row(quantized: Path) -> None:
    given = "model.expert_hidden_size=40", "stages.small.format=nvfp4"
    [said] = errors(quantized, *given, "stages.small.group_size=null")
    assert "stages.small.format: 16 weights have a scale, and do not divide the 40 columns" in said


def test_the_group_size_of_a_format_must_divide_every_row(quantized: Path) -> None:
    [said] = errors(quantized, "stages.small.group_size=null")
    assert "stages.small.group_size: 128 weights have a scale, and do not divide the 96" in said


@pytest.mark.parametrize(
    ("lost", "found", "bound", "outcome"),
    [(0, 0, 0.02, "passed"), (10, 0, 0.02, "stopped"), (10, 0, 0.05, "passed")],
)
def test_the_gate_bounds_the_loss_on_the_same_problems(
    quantized: Path, lost: int, found: int, bound: float, outcome: str
) -> None:
    stage = stages(quantized)["gates.small"]
    before = [1] * 200 + [0] * 200
    after = [0] * lost + [1] * (200 - lost + found) + [0] * (200 - found)
    solved = {"merge": dict.fromkeys(("sums", "words"), before), "small": {"sums": after}}
    solved["small"]["words"] = before
    verdict = judge_loss(stage, LossGateSettings(max_loss=bound), solved)
    assert verdict.outcome == outcome
    if outcome == "stopped":
        assert verdict.reasons == (
            "small loses +2.5 points (95 %: +0.9 to +4.1) of merge on sums; the upper 95 % bound"
            " must be at most stages.small.gate.max_loss = +2.0",
        )
