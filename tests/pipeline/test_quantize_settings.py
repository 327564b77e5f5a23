"""Stages of kind quantize in a configuration: rules, gates, and what makes them stale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.validate import load
from pipeline.run.gates import judge_loss
from pipeline.run.graph import Stage, compile_graph
from stages.guards.settings import LossGateSettings
from tests.pipeline.violations import edited, errors, violation

Braid = Callable[..., tuple[int, str, str]]
BLOCK = "  small: {kind: quantize, from: merge, format: int4, group_size: 32, gate: {}}\n"
TUNED = "  tuned: {kind: sft, from: small, optimizer: {learning_rate: 1e-3}, loop: {steps: 2}}\n"
EXPERTS = "stages.small.exclude=['*.experts.*']"


@pytest.fixture
def quantized(config: Path) -> Path:
    return edited(config, "  evaluate:", f"{BLOCK}  evaluate:")


def stages(path: Path, *overrides: str) -> dict[str, Stage]:
    return {stage.name: stage for stage in compile_graph(load(path, overrides))}


def test_it_is_evaluated_and_its_gate_compares_it_with_its_parent(quantized: Path) -> None:
    found = stages(edited(quantized, "  evaluate:", f"{TUNED}  evaluate:"))
    assert found["small"].parent == "merge" and found["small"].steps == 0
    assert "small" in found["evaluate"].models
    gate = found["gates.small"]
    assert gate.gated == "small" and gate.against == {"sums": "merge", "words": "merge"}
    assert found["tuned"].after == ("gates.small",)


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


def test_gpt_oss_is_not_quantized(quantized: Path) -> None:
    said = violation(quantized, "model.family=gpt_oss", "model.norm_epsilon=1e-5")
    assert said.endswith(
        "stages.small: gpt_oss is not quantized: its checkpoints stack the experts with their"
        " biases; remove the stage"
    )


def test_delta_nets_are_not_quantized(quantized: Path) -> None:
    assert violation(quantized, "model.family=qwen3_5_moe_text").endswith(
        "stages.small: qwen3_5_moe_text is not quantized: no engine has loaded delta nets"
        " quantized; remove the stage"
    )


def test_a_quantized_model_is_neither_exported_nor_quantized_again(quantized: Path) -> None:
    assert violation(quantized, "stages.export.from=small") == (
        "command line: stages.export.from: small is quantized, and its stage already leaves the"
        " export: stages/small/huggingface; remove this stage, or export merge"
    )
    again = "  again: {kind: quantize, from: small, format: fp8}\n"
    assert violation(edited(quantized, "  evaluate:", f"{again}  evaluate:")) == (
        "small.yaml:35: stages.again.from: small is quantized already; name the model before that,"
        " merge"
    )


def test_the_end_of_a_run_names_the_files_for_vllm(
    braid: Braid, quantized: Path, runs: Path
) -> None:
    code, out, err = braid("run", quantized)
    assert (code, err) == (0, "")
    assert f"\nmodel of small: {runs}/small/stages/small/huggingface\n" in out
    code, _, err = braid("export", "small", "--stage", "small", "--to", runs / "other")
    assert code == 1
    assert err.startswith("braid: small is quantized, and its stage already leaves the export: ")


def test_a_group_that_divides_no_row_asks_for_another_format(quantized: Path) -> None:
    narrow = "model.expert_hidden_size=40"
    [said] = errors(quantized, narrow, "stages.small.group_size=32")
    assert "do not divide the 40 columns of model.layers.0.mlp.experts.0.down_proj.weight" in said
    assert said.endswith("exclude it, or use format: fp8")
    said = violation(quantized, narrow, "stages.small.format=fp8", "stages.small.group_size=64")
    assert said.endswith("group_size: only of format int8 and int4; remove it")
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
            "small loses +2.5 points (paired 95 %: +0.9 to +4.1) of merge on sums; the upper 95 %"
            " bound must be at most stages.small.gate.max_loss = +2.0",
        )


def test_a_quantized_model_that_solves_more_gains(quantized: Path) -> None:
    stage = stages(quantized)["gates.small"]
    before, after = [1] * 200 + [0] * 200, [1] * 204 + [0] * 196
    solved = {
        name: dict.fromkeys(("sums", "words"), right)
        for name, right in (("merge", before), ("small", after))
    }
    verdict = judge_loss(stage, LossGateSettings(), solved)
    assert verdict.outcome == "passed"
    assert verdict.reasons[0] == (
        "small gains 1.0 points over merge on sums (paired 95 % of the loss: -2.1 to +0.1)"
    )


GREEDY = "evaluation.temperature=0"


@pytest.mark.parametrize(
    ("gate", "greedy", "message"),
    [
        ("max_loss: 0.02, problems: 98", True, None),
        (
            "max_loss: 0.02, problems: 50",
            True,
            "with 50 problems the upper 95 % bound of the loss is +3.8 points where two models"
            " solve the same half of them, above +2.0; it takes at least 98 problems",
        ),
        (
            "max_loss: 0.0",
            True,
            "with 500 problems the upper 95 % bound of the loss is +0.4 points where two models"
            " solve the same half of them, above +0.0; no number of problems below 10000 is enough",
        ),
        (
            "max_loss: 0.02",
            False,
            "with 500 sampled answers to 500 problems a model that loses nothing passes 0.02 in"
            " 12 % of tries; for 80 % use samples_per_problem: 14, or a max_loss of 0.072, or"
            " on_failure: warn",
        ),
        ("max_loss: 0.02, samples_per_problem: 14", False, None),
        ("max_loss: 0.02, on_failure: warn", False, None),
        (
            "max_loss: 0.0",
            False,
            "with 500 sampled answers to 500 problems a model that loses nothing passes 0 in"
            " 3 % of tries; for 80 % use a max_loss of 0.072, or on_failure: warn",
        ),
    ],
)
def test_a_bound_that_no_model_can_keep_is_a_warning(
    braid: Braid, quantized: Path, gate: str, greedy: bool, message: str | None
) -> None:
    more = [GREEDY] if greedy else []
    code, out, err = braid("validate", quantized, f"stages.small.gate={{{gate}}}", *more)
    assert (code, len(out.splitlines())) == (0, 1)
    said = [line.partition("stages.small.gate.max_loss: ")[2] for line in err.splitlines()]
    assert said == ([] if message is None else [message])


@pytest.mark.parametrize(("answers", "advised"), [(1, 0.072), (14, 0.02)])
def test_what_the_warning_advises_passes_four_of_five_lossless_models(
    quantized: Path, answers: int, advised: float
) -> None:
    """Two equal models sample each answer: solve rates are spread evenly over 500 problems."""
    stage, draw = stages(quantized)["gates.small"], np.random.default_rng(0)
    gate, passed = LossGateSettings(max_loss=advised, samples_per_problem=answers), 0
    for _ in range(200):
        rates = draw.uniform(size=500)
        one, other = (draw.binomial(answers, rates).tolist() for _ in range(2))
        solved = {
            name: dict.fromkeys(("sums", "words"), right)
            for name, right in (("merge", one), ("small", other))
        }
        passed += judge_loss(stage, gate, solved).reasons[0].find("must be") < 0
    assert 0.7 < passed / 200 < 0.9
