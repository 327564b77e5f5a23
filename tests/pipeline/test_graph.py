"""The settings that stages read: a change touches the stages that depend on it and no other."""

from __future__ import annotations

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
from stages.kinds import KINDS, NON_INVALIDATING_KEYS, Kind, flatten, matches
from stages.settings import RunSettings
from tests.pipeline.violations import errors, violation

DATASETS = ("number_sorting", "spell_backward")
MIXED = "mixed={optimizer: {learning_rate: 1e-3}, loop: {steps: 2}}"


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
        ("logging.wandb=disabled", set()),
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
    key = "domains.words.objective.kl.coefficient"
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
    stages = compile_graph(load(config, ["domains.sums.from=experts.words"]))
    names = [stage.name for stage in stages]
    assert names[:3] == ["cold_start", "experts.words", "experts.sums"]
    assert stages[2].parent == "experts.words"
    assert stages[3].parent == "cold_start"


def test_rounds_grow_from_the_merge_before(config: Path) -> None:
    stages = {stage.name: stage for stage in compile_graph(load(config, ["rounds=2"]))}
    first = ["cold_start", "experts.sums", "experts.words", "merge"]
    second = ["round_2.experts.sums", "round_2.experts.words", "round_2.merge"]
    assert list(stages) == [*first, *second, "evaluate", "export"]
    assert {stages[name].parent for name in second} == {"merge"}
    assert stages["round_2.merge"].teachers == {"sums": second[0], "words": second[1]}
    assert list(stages["evaluate"].models) == [*first, *second]
    assert stages["export"].parent == "round_2.merge"
    assert [each.reads for each in compile_graph(load(config))[:4]] == [
        stages[name].reads for name in first
    ]


def test_a_later_round_may_start_over(config: Path) -> None:
    overrides = ["rounds=2", "domains.sums.from=cold_start", "domains.words.from=experts.sums"]
    stages = {stage.name: stage for stage in compile_graph(load(config, overrides))}
    assert stages["round_2.experts.sums"].parent == "cold_start"
    assert stages["round_2.experts.words"].parent == "round_2.experts.sums"


def test_experts_may_stay_unmerged(config: Path) -> None:
    names = [stage.name for stage in compile_graph(load(config, ["merge=null"]))]
    assert names == ["cold_start", "experts.sums", "experts.words", "evaluate"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["domains.sums.from=experts.sum"], 'no such stage: experts.sum; did you mean "experts.s'),
        (["domains.sums.from=merge"], "domains.sums.from: no such stage: merge"),
        (["domains.sums.from=experts.sums"], "dependency cycle: experts.sums -> experts.sums"),
        (
            ["domains.sums.from=experts.words", "domains.words.from=experts.sums"],
            "dependency cycle: experts.sums -> experts.words -> experts.sums",
        ),
        (["rounds=2", "merge=null"], "rounds: 2 rounds require a merge"),
    ],
)
def test_what_no_graph_can_be_made_of_is_refused(
    config: Path, overrides: list[str], message: str
) -> None:
    assert message in "\n".join(errors(config, *overrides))


@pytest.fixture
def with_baseline(config: Path) -> RunSettings:
    """A run that trains one policy on all domains beside the experts, and has every gate."""
    gates = [f"{key}.gate={{}}" for key in ("domains.sums", "domains.words", "merge")]
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
    settings = with_baseline
    keys = [key for key, _ in flatten(settings.model_dump(mode="json"))]
    read = {key for stage in compile_graph(settings) for key in stage.reads}
    neutral = {key for key in keys if any(matches(key, each) for each in NON_INVALIDATING_KEYS)}
    assert read | neutral == set(keys)
    assert not read & neutral


def test_every_kind_is_declared_with_its_module() -> None:
    assert tuple(KINDS) == get_args(Kind)
    for kind in KINDS.values():
        assert find_spec(kind.module), kind


def test_every_pattern_names_a_setting(with_baseline: RunSettings) -> None:
    settings = with_baseline
    keys = [key for key, _ in flatten(settings.model_dump(mode="json"))]
    of = {"domain": "sums", "gated": "merge"}
    patterns = [pattern.format(**of) for kind in KINDS.values() for pattern in kind.reads]
    for pattern in [*patterns, *NON_INVALIDATING_KEYS]:
        assert any(matches(key, pattern) for key in keys), pattern


@pytest.fixture
def without(start: Path) -> list[str]:
    """Overrides of a run that starts from a Hugging Face checkpoint, without a cold start."""
    return [f"model.initial_weights={start}", "cold_start=null"]


def test_without_a_cold_start_experts_grow_from_the_initial_weights(
    config: Path, without: list[str]
) -> None:
    reference = "{coefficient: 0.1, reference: cold_start}"
    asked = [
        *without,
        "rounds=2",
        "domains.sums.from=cold_start",
        "domains.words.from=experts.sums",
        f"domains.sums.objective.kl={reference}",
        MIXED,
    ]
    stages = {stage.name: stage for stage in compile_graph(load(config, asked))}
    assert next(iter(stages)) == "initial"
    initial = stages["initial"]
    assert (initial.kind, initial.steps, initial.inputs) == ("import", 0, ())
    assert all(key.startswith("model.") for key in initial.reads)
    for name in ("experts.sums", "round_2.experts.sums", "mixed", "merge"):
        assert stages[name].parent == "initial"
    assert stages["experts.sums"].models == {"cold_start": "initial"}
    assert stages["experts.words"].parent == "experts.sums"
    assert "initial" in stages["evaluate"].models
    assert "cold_start" not in {name for stage in stages.values() for name in stage.inputs}


def test_without_a_cold_start_no_demonstrations_are_asked_for(
    config: Path, without: list[str]
) -> None:
    prompts = config.with_name("prompts.jsonl")
    prompts.write_text("{}\n")
    files = f"{{source: jsonl, path: {prompts}, answer: answer}}"
    config.write_text(config.read_text().replace("{dataset: chain_sum}", files))
    rewards = "domains.sums.rewards={right: {kind: math}}"
    missing = "domains.words.demonstrations={source: jsonl, path: nowhere.jsonl, response: answer}"
    load(config, [*without, rewards, missing])
    with pytest.raises(ConfigError) as caught:
        load(config, [rewards, missing])
    assert {violation.key for violation in caught.value.violations} == {
        "domains.sums.demonstrations.source",
        "domains.words.demonstrations.path",
    }


def test_without_a_cold_start_there_must_be_initial_weights(config: Path) -> None:
    assert violation(config, "cold_start=null") == (
        "command line: cold_start: null requires model.initial_weights; name a checkpoint "
        "there, or configure a cold start"
    )
