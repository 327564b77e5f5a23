"""Guards may change in a started run, the stop rule may not; an early end counts as done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.config.validate import dump_resolved, load
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import compile_graph
from pipeline.run.lineage import write_manifest
from pipeline.run.run import Run, missing_output
from stages.data.settings import FrontierSettings, NoCurriculumSettings
from stages.directory import ended_early
from stages.guards.settings import StopSettings
from tests.pipeline.violations import MIXED, errors, violation

EXPERT, KEY = "experts.sums", "domains.sums"
STOP = f"{KEY}.stop={{at_least: 0.9, window: 1}}"


def test_settings_survive_a_round_trip(config: Path) -> None:
    settings = load(
        config,
        [
            f"{KEY}.guards.zero_variance={{action: off}}",
            f"{KEY}.guards.reward_collapse.window=3",
            f"{KEY}.stop.at_least=0.9",
            f"{KEY}.stop.window=2",
            f"{KEY}.curriculum={{name: frontier, field: level}}",
        ],
    )
    expert = settings.domains["sums"]
    assert expert.guards.zero_variance.action == "off"
    assert expert.guards.reward_collapse.window == 3
    assert expert.stop == StopSettings(at_least=0.9, window=2)
    assert expert.curriculum == FrontierSettings(field="level")
    words = settings.domains["words"]
    assert (words.stop, words.curriculum) == (None, NoCurriculumSettings())
    config.write_text(dump_resolved(settings))
    assert load(config) == settings


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("guards.entropy={}", 'guards.entropy: unknown key; did you mean "entropy_collapse"?'),
        ("guards.flat_groups.action=off", "guards.flat_groups: renamed to zero_variance"),
        ("guards.drift.patience=0", "guards.drift.patience: should be greater than 0, not 0"),
        ("guards.drift.action=on", "guards.drift.action: should be 'warn', 'stop' or 'off', not"),
        ("guards.drift.threshold=2", "guards.drift.threshold: should be less than or equal to 1"),
        ("stop={metric: loss, at_least: 1}", "stop.metric: string should match pattern"),
        ("stop.window=1", "stop.at_least: required key is missing"),
        (
            "stop={metric: reward/exakt, at_least: 1, window: 1}",
            'stop.metric: no such reward: exakt; did you mean "exact"?',
        ),
        ("stop={at_least: 1}", "stop.window: 10 is more than loop.steps = 2; only a full"),
        ("curriculum.name=frontiers", "curriculum.name: should be 'none' or 'frontier', not"),
        (
            "curriculum={name: frontier, candidates: 1}",
            "curriculum.candidates: should be greater than or equal to 2, not 1",
        ),
        ("curriculum={candidates: 3}", "curriculum.candidates: unknown key; known: name"),
    ],
)
def test_a_wrong_setting_is_reported(config: Path, override: str, message: str) -> None:
    assert f"{KEY}.{message}" in violation(config, f"{KEY}.{override}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "sampling.group_size=1",
            "stages.mixed.sampling.group_size: a group of one has no advantage",
        ),
        (
            "stop.metric=reward/exakt",
            "stages.mixed.stop.metric: no such reward: exakt; did you mean",
        ),
        (
            "optimizer.warmup_steps=2",
            "stages.mixed.optimizer.warmup_steps: 2 must be less than the 2",
        ),
        (
            "prompts.dataset=chain_sum",
            "stages.mixed.prompts: stages of kind grpo have no such key; only of sample",
        ),
    ],
)
def test_the_mixed_baseline_obeys_the_rules_of_a_domain(
    config: Path, override: str, message: str
) -> None:
    mixed = (MIXED, "stages.mixed.stop={at_least: 1, window: 2}")
    load(config, mixed)
    first, *_ = errors(config, *mixed, f"stages.mixed.{override}")
    assert first.startswith(f"command line: {message}")


def test_a_mixed_stage_may_stop_by_a_reward_of_any_of_its_domains(config: Path) -> None:
    other = "domains.words.rewards={right: {kind: math}}"
    for reward in ("exact", "right"):  # of the first domain, and of the second
        stop = f"stages.mixed.stop={{metric: reward/{reward}, at_least: 1, window: 2}}"
        load(config, [MIXED, other, stop])


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        (f"{KEY}.guards.drift.threshold=0.5", set()),
        (STOP, {EXPERT}),
        (f"{KEY}.curriculum.name=frontier", {EXPERT}),
    ],
)
def test_guards_change_no_digest(config: Path, override: str, changed: set[str]) -> None:
    before, after = compile_graph(load(config)), compile_graph(load(config, [override]))
    pairs = zip(before, after, strict=True)
    assert {old.name for old, new in pairs if old.reads != new.reads} == changed


def test_an_early_end_is_done_until_the_stop_rule_changes(config: Path, run: RunDirectory) -> None:
    settings = load(config, [STOP])
    stages = {stage.name: stage for stage in compile_graph(settings)}
    for name in ("cold_start", EXPERT):
        directory = run.stage(name)
        write_manifest(directory, Run(run.path, settings).lineage(stages[name]))
        run.ledger.append(name, "done", "", 1)
        checkpoint = directory.path / "checkpoints" / ("step_1" if name == EXPERT else "step_2")
        checkpoint.mkdir(parents=True)
        (checkpoint / "checksums.json").write_text(json.dumps({"digest": name, "files": {}}))
    expert = run.stage(EXPERT)
    assert (
        missing_output(stages[EXPERT], expert, expert.newest_checkpoint())
        == "its newest checkpoint is at step 1 of 2"
    )
    (checkpoint / "state.json").write_text(json.dumps({"step": 1, "ended": "good enough"}))
    assert missing_output(stages[EXPERT], expert, expert.newest_checkpoint()) is None
    assert ended_early(expert.newest_checkpoint()) == "good enough"
    found = Run(run.path, settings).states
    assert (found[EXPERT].state, found[EXPERT].step) == ("done", 1)
    assert found["merge"].state == "pending"
    without = load(config)
    found = Run(run.path, without).states
    assert found[EXPERT].state == "stale"
    assert "stop.at_least was 0.9 and is now null" in found[EXPERT].cause
