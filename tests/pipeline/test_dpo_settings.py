"""The settings of preference optimisation: its rules, its inputs, and what makes it stale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parallel.files import CHECKSUMS, Checkpoint
from pipeline.config.cautions import graph_cautions
from pipeline.config.read import ConfigError
from pipeline.config.validate import load
from pipeline.run.graph import Stage, compile_graph
from pipeline.run.lineage import changes, lineage_from
from tests.pipeline.conftest import CONFIG

TUNED = {
    "kind": "dpo",
    "from": "cold_start",
    "data": {"files": {"source": "jsonl", "path": "pairs.jsonl"}},
    "optimizer": {"learning_rate": 1e-4},
    "loop": {"steps": 3},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run with a stage of kind dpo, on the file pairs.jsonl beside it."""
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row))
    path = tmp_path / "small.yaml"
    path.write_text(f"{CONFIG}  tuned: {json.dumps(TUNED)}\n")
    return path


def tuned(config: Path, *overrides: str) -> Stage:
    graph = compile_graph(load(config, overrides))
    return next(stage for stage in graph if stage.name == "tuned")


def test_the_reference_is_the_parent_or_another_model(config: Path) -> None:
    stage = tuned(config)
    assert (stage.parent, stage.models, stage.steps) == ("cold_start", {}, 3)
    assert stage.declared.work == "stages.kinds.dpo.work"
    assert stage.trains and not stage.needs_engine
    other = tuned(config, "stages.tuned.reference=experts.sums")
    assert other.models == {"reference": "experts.sums"}
    assert other.inputs == ("cold_start", "experts.sums")
    path = config.parent / "step_4"
    path.mkdir()
    (path / CHECKSUMS).write_text('{"digest": "a", "files": {}}')
    beside = tuned(config, f"stages.tuned.reference={path}")
    assert beside.models == {"reference": str(path)}


def test_data_loss_and_reference_make_it_stale(config: Path) -> None:
    def lineage(*overrides: str) -> Any:
        stage = tuned(config, *overrides)
        return lineage_from(stage, dict.fromkeys(stage.sources), {})

    before = lineage()
    assert list(changes(before, lineage("stages.tuned.loop.micro_batch_tokens=64"))) == []
    [loss] = changes(before, lineage("stages.tuned.loss.beta=0.2"))
    assert loss == "loss.beta was 0.1 and is now 0.2"
    (config.parent / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "d"}')
    assert list(changes(before, lineage())) == ["the files of data.files.path changed"]


def test_the_reference_counts_by_its_digest_and_not_by_its_name(config: Path) -> None:
    """So that a renamed stage is still the same reference."""
    names = ("merge", "experts.sums")
    one, other = (tuned(config, f"stages.tuned.reference={name}") for name in names)
    assert one.reads == other.reads
    assert one.roles != other.roles


def test_held_out_prompts_of_its_domains_make_it_stale(config: Path) -> None:
    """Pairs of held-out prompts are left out."""
    halves = [f"domains.{name}.prompts.held_out_fraction=0.5" for name in ("sums", "words")]
    before, after = tuned(config).reads, tuned(config, *halves).reads
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {key.partition("=")[0] for key in halves}


def test_collected_pairs_that_change_places_make_it_stale(config: Path) -> None:
    """By their digests: the names of the stages are no settings of its own."""
    with config.open("a") as file:
        for name, start in (("one", "cold_start"), ("two", "merge")):
            kept = "prompts: 9, keep: {reward: null}"
            file.write(f"  {name}: {{kind: sample, from: {start}, {kept}}}\n")

    def lineage(first: str, second: str) -> Any:
        data = f"{{a: {{stage: {first}}}, b: {{stage: {second}}}}}"
        stage = tuned(config, f"stages.tuned.data={data}")
        found = {name: Checkpoint(Path(name), 0, name, {}) for name in stage.sources}
        return lineage_from(stage, found, {})

    assert list(changes(lineage("one", "two"), lineage("two", "one"))) == [
        "data.a is another of its inputs",
        "data.b is another of its inputs",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("from=null", "tuned.from: must name what the policy starts from"),
        (
            "reference=cold_start",
            "reference: cold_start is what the stage starts from; write parent",
        ),
        ("reference=nobody", "tuned.reference: no such stage: nobody"),
        ("data.files=null", "tuned.data: should have at least 1 item"),
        ("data.files.path=none.jsonl", "tuned.data.files.path: no such file"),
        ("data.files.max_tokens=99999", "files.max_tokens: 99999 is more than model.max_positions"),
        ("data.files.rejected=chosen", "files.rejected: chosen is the column of `chosen` too"),
        ("data={own: {stage: merge}}", "data.own.stage: merge leaves checkpoints, and data are"),
        ("data={own: {stage: who}}", "data.own.stage: no such stage: who"),
        # Its files would be under no key that the lineage compares.
        ("data={a.b: {source: jsonl, path: pairs.jsonl}}", "data.a.b: a source's name must be 1"),
        ("pairs_per_step=1", "pairs_per_step: 1 is less than the 2 data-parallel ranks"),
        ("optimizer.warmup_steps=3", "optimizer.warmup_steps: 3 must be less than the 3 updates"),
        ("loss={name: ipo, label_smoothing: 0.1}", "loss.label_smoothing: unknown key"),
        ("loss.label_smoothing=0.5", "loss.label_smoothing: should be less than 0.5"),
        ("loss.beta=0", "loss.beta: should be greater than 0"),
    ],
)
def test_wrong_settings_are_named_with_their_key(config: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(config, [f"stages.tuned.{override}"])
    assert message in str(error.value)


SAMPLED = (
    "  collect: {kind: sample, from: cold_start, prompts: 9, keep: {reward: 0.5, per_prompt: 2}}\n"
)


def test_a_filter_that_leaves_no_pair_is_named(config: Path) -> None:
    config.write_text(f"{config.read_text()}{SAMPLED}")
    given, key = ["stages.tuned.data={own: {stage: collect}}"], "stages.tuned.data.own.stage"

    def cautioned(*overrides: str) -> list[str]:
        cautions = graph_cautions(load(config, [*given, *overrides]))
        return [why for where, why in cautions if where == key]

    assert not cautioned()
    [why] = cautioned("stages.collect.keep.reward=1.0")
    assert why.startswith("stages.collect.keep.reward = 1 leaves no pair where each reward is at")
    heavier = "domains.words.rewards={right: {kind: math, weight: 2.0}}"
    assert not cautioned("stages.collect.keep.reward=1.0", heavier)
    with pytest.raises(ConfigError, match=r"and stages\.collect\.keep\.per_prompt = 1 keeps one"):
        load(config, [*given, "stages.collect.keep.per_prompt=1"])
    alone = ["stages.collect.sampling={group_size: 1}", "stages.collect.keep.per_prompt=null"]
    with pytest.raises(ConfigError, match=r"and stages\.collect\.sampling\.group_size = 1 samples"):
        load(config, [*given, *alone])
