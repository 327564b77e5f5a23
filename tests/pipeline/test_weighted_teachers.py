"""Several teachers of a domain, with weights: what a configuration may say, and what follows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel.files import CHECKSUMS
from pipeline.config.unroll import Blocks
from pipeline.config.validate import load
from pipeline.estimate.stage_memory import heads_needed
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage, compile_graph
from pipeline.run.lineage import changes
from pipeline.run.run import Run
from stages.kinds.distill.settings import DistillSettings
from tests.pipeline.conftest import Braid
from tests.pipeline.violations import edited_copy, errors

SEVERAL = "{sums: {cold_start: 0.25, experts: 0.75}, words: experts.words}"
PRECISION = "hidden_states_precision"
RIGHT = ("evaluation.problems=4",)


def taught_by(teachers: str) -> str:
    return f"stages.merge.teachers={teachers}"


def merge_of(config: Path, *overrides: str) -> tuple[Stage, DistillSettings]:
    settings = load(config, [*overrides])
    block = settings.stages["merge"]
    assert isinstance(block, DistillSettings)
    return next(each for each in compile_graph(settings) if each.name == "merge"), block


def test_every_teacher_of_a_domain_is_an_input(config: Path) -> None:
    merge, block = merge_of(config, taught_by(SEVERAL))
    assert merge.teachers == {
        "sums/1": "cold_start",
        "sums/2": "experts.sums",
        "words": "experts.words",
    }
    assert block.teacher_weights("sums") == {"sums/1": 0.25, "sums/2": 0.75}
    assert block.teacher_names("sums") == {"sums/1": "cold_start", "sums/2": "experts"}
    assert merge.reads["teacher_weights.sums"] == [0.25, 0.75]
    assert {"cold_start", "experts.sums", "experts.words"} <= set(merge.waits_for)


def test_one_teacher_with_a_weight_is_that_teacher(config: Path) -> None:
    given = taught_by("{sums: {experts.sums: 1}, words: experts.words}")
    plain, _ = merge_of(config)
    merge, block = merge_of(config, given)
    assert (merge.teachers, merge.reads) == (plain.teachers, plain.reads)
    assert block.teacher_weights("sums") == {"sums": 1.0}


def test_the_memory_of_teachers_makes_nothing_stale_but_their_precision_does(config: Path) -> None:
    plain, _ = merge_of(config)
    block = "stages.merge.teacher_memory"
    moved, _ = merge_of(config, f"{block}={{resident: all, hidden_states: disk}}")
    assert moved.reads == plain.reads
    rounded, _ = merge_of(config, f"{block}.{PRECISION}=bf16")
    assert rounded.reads == {**plain.reads, f"teacher_memory.{PRECISION}": "bf16"}


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("{cold_start: 0.5, experts: 0.4}", "the weights of the teachers sum to 0.9, but must"),
        ("{cold_start: 1.5, experts: -0.5}", "the weight of experts is -0.5, but must be more"),
        ("{cold_start: 0, experts: 1}", "the weight of cold_start is 0, but must be more than 0"),
        ("{cold_start: a, experts: 1}", "should be a block, or a mapping of domains to blocks"),
        ("{cold: 0.5, experts: 0.5}", "no such stage: cold; known: cold_start, "),
        ("{self: 0.5, experts: 0.5}", "self is one of several teachers: a response without"),
        ("{}", "should be a block, or a mapping of domains to blocks or stages, or to several"),
    ],
)
def test_wrong_weights_are_refused_with_file_and_key(config: Path, weights: str, said: str) -> None:
    text = config.read_text()
    line = f"    teachers:\n      words: experts\n      sums: {weights}\n"
    config.write_text(text.replace("    teachers: experts\n", line))
    [found] = errors(config)
    assert str(config.name) in found and "stages.merge.teachers" in found and said in found


def test_a_path_with_a_weight_is_relative_to_its_file(config: Path, runs: Path) -> None:
    other = Run(runs / "other", load(config, ["name=other"]))
    other.create()
    other.write_settings()
    path = other.stage("experts.sums").checkpoints / "step_2"
    path.mkdir(parents=True)
    (path / CHECKSUMS).write_text(json.dumps({"digest": "first", "files": {}}))
    weights = "{runs/other/stages/experts.sums: 0.5, ./runs/other/stages/experts.sums: 0.5}"
    both = "{experts: 0.5, runs/other/stages/experts.sums: 0.5}"
    text = config.read_text()
    config.write_text(
        text.replace("teachers: experts", f"teachers: {{sums: {both}, words: experts}}")
    )
    merge, block = merge_of(config)
    at = str(other.stage("experts.sums").path)
    assert merge.teachers == {"sums/1": "experts.sums", "sums/2": at, "words": "experts.words"}
    assert block.teacher_names("sums") == {"sums/1": "experts", "sums/2": "2"}
    here = Run(RunDirectory(runs / "small").path, load(config, []))
    before = here.lineage(merge)
    (path / CHECKSUMS).write_text(json.dumps({"digest": "second", "files": {}}))
    assert [*changes(before, here.lineage(merge))] == [f"the checkpoint of {at} changed"]
    config.write_text(
        text.replace("teachers: experts", f"teachers: {{sums: {weights}, words: experts}}")
    )
    [found] = errors(config)
    assert "the weights of the teachers sum to 0.5" in found  # one model, named twice


def test_a_template_s_weights_are_replaced_or_deleted(config: Path) -> None:
    own = config.with_name("own.yaml")
    text = config.read_text().replace("teachers: experts", f"teachers: {SEVERAL}")
    config.write_text(text)
    own.write_text(
        "extends: small.yaml\nname: own\n"
        "stages: {merge: {teachers: {sums: {cold_start: null, experts: 1}}}}\n"
    )
    merge, _ = merge_of(own)
    assert merge.teachers == {"sums": "experts.sums", "words": "experts.words"}


def test_memory_counts_the_models_and_heads_that_are_held(config: Path) -> None:
    def held(*overrides: str) -> int:
        settings = load(config, [*overrides])
        [merge] = [each for each in compile_graph(settings) if each.name == "merge"]
        return heads_needed(merge, settings)

    all_of_them = "stages.merge.teacher_memory.resident=all"
    assert held() == 1
    assert held(all_of_them) == 2
    assert held(taught_by(SEVERAL)) == 2
    assert held(taught_by(SEVERAL), all_of_them) == 3
    assert held(taught_by("{sums: cold_start, words: cold_start}"), all_of_them) == 1


def test_the_gate_compares_with_the_teacher_of_the_largest_weight(config: Path) -> None:
    settings = load(config, [taught_by(SEVERAL), "stages.merge.gate={}"])
    [gate] = [each for each in compile_graph(settings) if each.name == "gates.merge"]
    assert gate.against == {"sums": "experts.sums", "words": "experts.words"}


def test_a_renamed_block_is_renamed_in_the_weights(config: Path, braid: Braid, runs: Path) -> None:
    assert braid("run", config, *RIGHT, taught_by(SEVERAL))[0] == 0
    renamed = edited_copy(config, ("experts: {kind: grpo,", "rl: {was: experts, kind: grpo,"))
    assert braid("run", renamed, *RIGHT, taught_by(SEVERAL.replace("experts", "rl")))[0] == 0
    assert braid("status")[1] == "small: 6 done\n"
    assert len(list((runs / "small/stages/merge").glob("attempt_*"))) == 1


def test_a_bundle_routes_domains_to_weighted_teachers(
    config: Path, braid: Braid, tmp_path: Path, runs: Path
) -> None:
    assert braid("run", config, *RIGHT, "--name", "first")[0] == 0
    outside = runs / "first/stages/experts.sums"
    weights = f"{{sums: {{experts: 0.5, {outside}: 0.5}}, words: experts}}"
    assert braid("run", config, *RIGHT, taught_by(weights), "deterministic=true")[0] == 0
    to = tmp_path / "bundle"
    assert braid("bundle", "small", "--to", to, "--weights", "copy")[0] == 0
    index = json.loads((to / "bundle.json").read_text())
    sums = {"experts.sums": 0.5, str(outside): 0.5}
    assert index["routing"] == {"merge": {"sums": sums, "words": "experts.words"}}
    [found] = [each for each in index["inputs"] if each["kind"] == "model"]
    assert (found["key"], found["copied"]) == ("stages.merge.teachers.sums", True)
    settings = load(to / "config.yaml", [])
    merge = next(each for each in Blocks(settings).stages if each.name == "merge")
    assert isinstance(merge.settings, DistillSettings)
    assert merge.settings.teachers_of(["sums"])["sums/2"].startswith(str(to))
