"""The settings that stages read: a change touches the stages that depend on it and no other."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest

from pipeline.config.read import ConfigError
from pipeline.config.validate import load
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import compile_graph, problems
from pipeline.run.lineage import changes
from pipeline.run.run import Run
from stages.keys import NEUTRAL_KEYS, NON_INVALIDATING_KEYS, STRUCTURE, flatten, matches
from stages.kinds import KINDS, Kind
from stages.kinds.kind import StageSettings
from stages.settings import RunSettings
from tests.pipeline.violations import MIXED, edited, errors, extending, from_weights
from tests.runs import REPOSITORY

DATASETS = ("number_sorting", "spell_backward")
ONE_AFTER_ANOTHER = (
    "stages={second: {kind: grpo, from: experts, domains: [sums], as: experts.sums}}",
    "stages.experts.domains=[words]",
    "stages.merge.teachers={sums: second, words: experts}",
)


def test_stages_come_after_their_inputs(settings: RunSettings) -> None:
    stages = compile_graph(settings)
    names = [stage.name for stage in stages]
    assert names == ["cold_start", "experts.sums", "experts.words", "merge", "evaluate", "export"]
    for position, stage in enumerate(stages):
        assert set(stage.inputs) <= set(names[:position])
    merge = stages[3]
    assert merge.parent == "cold_start"
    assert merge.teachers == {"sums": "experts.sums", "words": "experts.words"}
    assert list(stages[4].models) == names[:4]


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("domains.sums.objective.kl.coefficient=0.1", {"experts.sums"}),
        ("domains.sums.objective.kl={coefficient: 0.1, estimator: k2}", {"experts.sums"}),
        ("domains.words.routing.replay=none", {"experts.words"}),
        ("stages.cold_start.optimizer.betas=[0.5, 0.5]", {"cold_start"}),
        ("domains.sums.demonstrations.count=7", {"cold_start"}),
        ("stages.merge.loop.steps=3", {"merge"}),
        ("evaluation.problems=5", {"evaluate"}),
        (
            "domains.sums.rewards={exact: {kind: reasoning_gym, weight: 2}}",
            {"experts.sums", "evaluate"},
        ),
        ("rewards.timeout_seconds=9", set()),
        (
            "domains.sums.prompts.config.max_terms=5",
            {"cold_start", "experts.sums", "merge", "evaluate"},
        ),
        ("seed=1", {"cold_start", "experts.sums", "experts.words", "merge", "evaluate"}),
        ("domains.sums.loop.checkpoint_every=3", set()),
        ("stages.experts.loop={steps: 2}", set()),  # as its domains state it
        ("stages.experts.loop={steps: 3}", {"experts.sums", "experts.words"}),
        ("stages.experts.guards.drift.action=off", set()),
        ("stages.merge.after=[experts.sums]", set()),
        ("stages.experts.was='other.{domain}'", set()),
        ("logging.trackers=[]", set()),
        ("name=other", set()),
    ],
)
def test_a_change_touches_only_the_stages_that_read_it(
    config: Path, override: str, changed: set[str]
) -> None:
    before, after = compile_graph(load(config)), compile_graph(load(config, [override]))
    pairs = zip(before, after, strict=True)
    assert {old.name for old, new in pairs if old.reads != new.reads} == changed


def test_domains_differ_in_their_kl_and_a_change_of_one_leaves_the_others_lineage(
    config: Path, run: RunDirectory
) -> None:
    domains = [
        "domains.sums.objective.kl={coefficient: 0.1, estimator: k2}",
        "domains.words.objective.kl={coefficient: 0.001, estimator: unbiased_k3}",
    ]
    before = load(config, domains)
    assert [each.objective.kl.estimator for each in before.domains.values()] == [
        "k2",
        "unbiased_k3",
    ]
    after = load(config, [*domains, "domains.words.objective.kl.coefficient=0.002"])
    stages = zip(compile_graph(before), compile_graph(after), strict=True)
    found = {
        old.name: list(
            changes(Run(run.path, before).lineage(old), Run(run.path, after).lineage(new))
        )
        for old, new in stages
    }
    key = "objective.kl.coefficient"
    assert {name: said for name, said in found.items() if said} == {
        "experts.words": [f"{key} was 0.001 and is now 0.002"]
    }


def test_the_problems_of_stages_change_with_the_datasets_alone(config: Path) -> None:
    def data(override: str) -> list[dict[str, Any]]:
        return [problems(stage.reads) for stage in compile_graph(load(config, [override]))]

    assert data("seed=1") == data("seed=2")
    one, other = (data(f"domains.sums.prompts.dataset={name}") for name in DATASETS)
    assert one != other


def test_an_expert_may_grow_from_another(config: Path) -> None:
    stages = compile_graph(load(config, ONE_AFTER_ANOTHER))
    names = [stage.name for stage in stages]
    assert names[:3] == ["cold_start", "experts.words", "experts.sums"]
    assert stages[2].parent == "experts.words"
    assert stages[3].parent == "cold_start"
    assert stages[3].teachers == {"sums": "experts.sums", "words": "experts.words"}


def test_rounds_grow_from_the_merge_before(config: Path) -> None:
    once = compile_graph(load(config))[:4]
    extending(config, "two-rounds", "cold_start", "merge", "merge_2")
    stages = {stage.name: stage for stage in compile_graph(load(config))}
    first = ["cold_start", "experts.sums", "experts.words", "merge"]
    second = ["round_2.experts.sums", "round_2.experts.words", "round_2.merge"]
    assert list(stages) == [*first, *second, "evaluate", "export"]
    assert {stages[name].parent for name in second} == {"merge"}
    assert stages["round_2.merge"].teachers == {"sums": second[0], "words": second[1]}
    assert list(stages["evaluate"].models) == [*first, *second]
    assert stages["export"].parent == "round_2.merge"
    assert [each.reads for each in once] == [stages[name].reads for name in first]


def test_a_later_round_may_start_over(config: Path) -> None:
    extending(config, "two-rounds", "cold_start", "merge", "merge_2")
    again = "stages={again: {kind: grpo, from: experts, domains: [words], as: again.words}}"
    overrides = ["stages.experts_2.from=cold_start", again]
    stages = {stage.name: stage for stage in compile_graph(load(config, overrides))}
    assert stages["round_2.experts.sums"].parent == "cold_start"
    assert stages["again.words"].parent == "experts.words"


def test_experts_may_stay_unmerged(config: Path) -> None:
    without = "stages={merge: null, export: null}"
    names = [stage.name for stage in compile_graph(load(config, [without]))]
    assert names == ["cold_start", "experts.sums", "experts.words", "evaluate"]


@pytest.fixture
def with_baseline(config: Path) -> RunSettings:
    """A run that trains one policy on all domains beside the experts, and has every gate."""
    gates = [f"stages.{name}.gate={{}}" for name in ("experts", "merge")]
    return load(config, [MIXED, *gates])


def test_the_baseline_is_trained_on_all_domains_and_evaluated(with_baseline: RunSettings) -> None:
    stages = {stage.name: stage for stage in compile_graph(with_baseline)}
    mixed = stages["mixed"]
    assert (mixed.parent, mixed.steps, mixed.domain) == ("cold_start", 2, None)
    assert mixed.trains
    assert mixed.needs_engine
    own = ("prompts.dataset", "rewards.exact.kind", "curriculum.name")
    assert {f"domains.{d}.{key}" for d in ("sums", "words") for key in own} <= mixed.reads.keys()
    assert "mixed" in stages["evaluate"].models
    assert "mixed" not in stages["merge"].inputs


def test_every_setting_is_read_by_a_stage_or_said_to_change_nothing(
    with_baseline: RunSettings,
) -> None:
    tree = with_baseline.model_dump(mode="json")
    blocks = tree.pop("stages")
    stages = compile_graph(with_baseline)
    # What a stage trains by is stated in its domain or in its block, and read under no key of
    # either.
    training = {
        f"domains.{domain}.{key}"
        for stage in stages
        for domain in stage.domains
        for key in stage.reads
        if not key.startswith(("domains.", "model.", "engine.", "evaluation.", "seed"))
    }
    keys = {key for key, _ in flatten(tree)}
    read = {key for stage in stages for key in stage.reads} | (training & keys)
    neutral = {key for key in keys if any(matches(key, each) for each in NON_INVALIDATING_KEYS)}
    assert keys - read - neutral == set()
    assert not read & neutral
    for name, block in blocks.items():
        own = {key for stage in stages if stage.block == name for key in stage.reads}
        for key, value in flatten(block):
            stated = f"stages.{name}.{key}"
            structure = any(matches(key, each) for each in STRUCTURE)
            changes_nothing = any(matches(stated, each) for each in NON_INVALIDATING_KEYS)
            # The domain's, or none; a merge reads these where a domain's teacher is `self`, and
            # where it has data.
            idle = key.startswith("self_teacher.") or key == "data_share"
            absent = value in (None, {}) or key == "gate.domains" or idle
            assert key in own or structure or changes_nothing or absent, stated
            assert not (key in own and (structure or changes_nothing)), stated


def test_every_kind_is_declared_with_settings_a_module_and_a_script() -> None:
    assert tuple(sorted(KINDS)) == get_args(Kind)
    for name, kind in KINDS.items():
        assert kind.name == name
        assert find_spec(kind.work), kind
        assert (REPOSITORY / "slurm" / f"{kind.script or name}.sbatch").is_file(), kind
        if name == "gate":
            assert kind.settings is None
        else:
            assert kind.settings is not None and issubclass(kind.settings, StageSettings)
            assert kind.settings.model_fields["kind"].default == name


def test_every_pattern_names_a_setting(with_baseline: RunSettings) -> None:
    keys = [key for key, _ in flatten(with_baseline.model_dump(mode="json"))]
    patterns = [each.replace("{domain}", "sums") for k in KINDS.values() for each in k.reads]
    for pattern in [*patterns, *NON_INVALIDATING_KEYS]:
        assert any(matches(key, pattern) for key in keys), pattern
    for pattern in NEUTRAL_KEYS:
        assert any(matches(key, f"stages.*.{pattern}") for key in keys), pattern


def test_without_a_cold_start_experts_grow_from_the_initial_weights(
    config: Path, start: Path
) -> None:
    from_weights(config, start)
    reference = "{coefficient: 0.1, reference: initial}"
    asked = [
        MIXED.replace("from: cold_start", "from: initial"),
        *ONE_AFTER_ANOTHER,
        f"stages.second.objective.kl={reference}",
    ]
    stages = {stage.name: stage for stage in compile_graph(load(config, asked))}
    assert next(iter(stages)) == "initial"
    initial = stages["initial"]
    assert (initial.kind, initial.steps, initial.inputs) == ("import", 0, ())
    assert all(key == "kind" or key.startswith("model.") for key in initial.reads)
    for name in ("experts.words", "mixed", "merge"):
        assert stages[name].parent == "initial"
    assert stages["experts.sums"].parent == "experts.words"
    assert stages["experts.sums"].models == {"sums": "initial"}
    assert "initial" in stages["evaluate"].models
    assert "cold_start" not in stages


def test_without_a_cold_start_no_demonstrations_are_asked_for(config: Path, start: Path) -> None:
    prompts = config.with_name("prompts.jsonl")
    prompts.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    files = f"{{source: jsonl, path: {prompts}, answer: answer}}"
    edited(config, "{dataset: chain_sum}", files)
    whole = config.with_name("whole.yaml")
    shutil.copy(config, whole)
    rewards = "domains.sums.rewards={right: {kind: math}}"
    missing = "domains.words.demonstrations={source: jsonl, path: nowhere.jsonl, response: answer}"
    load(from_weights(config, start), [rewards, missing])
    with pytest.raises(ConfigError) as caught:
        load(whole, [rewards, missing])
    assert {violation.key for violation in caught.value.violations} == {
        "domains.sums.demonstrations.source",
        "domains.words.demonstrations.path",
    }


def test_without_a_cold_start_there_must_be_initial_weights(config: Path, start: Path) -> None:
    from_weights(config, start)
    [found] = errors(config, "model.initial_weights=null")
    assert found == (
        "configs/pipelines/experts-merge-from-weights.yaml:4: stages.initial.from: "
        "null imports model.initial_weights, which is not set; name a checkpoint in one of them"
    )
