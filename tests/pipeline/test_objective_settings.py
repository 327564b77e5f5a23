"""Every objective is selected by name, and contradictory settings are errors."""

from __future__ import annotations

import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from parallel.files import Checkpoint
from pipeline import cli
from pipeline.config.read import ConfigError
from pipeline.config.validate import dump_resolved, load
from pipeline.estimate.stage_memory import compared_with
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage, compile_graph
from pipeline.run.lineage import changes, lineage_from
from stages.objectives.advantages.gae import GaeSettings
from stages.objectives.kl import KLSettings
from stages.objectives.loss import REGISTRIES, ObjectiveSettings
from stages.objectives.registry import ADVANTAGES, AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, RATIOS
from stages.settings import RunSettings
from tests.pipeline.violations import MIXED, TRAINED, edited, errors, violation, with_mixed

EXPERT = "domains.sums.objective"


NAMED = [
    (registry.key.removeprefix("objective."), each.settings)
    for registry in REGISTRIES
    for each in registry.values()
    if each.settings is not None and registry.key.startswith("objective.")
]

RATIO = f"{EXPERT}.ratio.name=token"
STEPS = (
    "domains.sums.rewards={steps: {kind: python, function: stages.data.prompts:is_held_out,"
    " unfinished: score, timed_out: null}}"
)


@pytest.mark.parametrize(("key", "kind"), NAMED, ids=lambda value: getattr(value, "__name__", ""))
def test_every_name_selects_its_settings(config: Path, key: str, kind: type) -> None:
    name = kind.model_fields["name"].default  # type: ignore[attr-defined]
    level = [f"{EXPERT}.correction.level=sequence"] if key == "ratio" else []
    settings = load(config, [RATIO, STEPS, f"{EXPERT}.{key}.name={name}", *level])
    assert getattr(settings.domains["sums"].objective, key) == kind()
    config.write_text(dump_resolved(settings))
    assert load(config) == settings


def test_every_choice_has_a_function() -> None:
    def choices(block: Any, field: str) -> tuple[str, ...]:
        return typing.get_args(block.model_fields[field].annotation)

    assert choices(KLSettings, "estimator") == (*KL_ESTIMATORS, "full")
    assert choices(ObjectiveSettings, "aggregation") == tuple(AGGREGATIONS)


def one_of(names: Iterable[str]) -> str:
    """Return names as a message lists them: 'a', 'b' or 'c'."""
    *earlier, last = (f"'{name}'" for name in sorted(names))
    return f"{', '.join(earlier)} or {last}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "advantage.name=grop",
            f'advantage.name: should be {one_of(ADVANTAGES)}, not "grop"',
        ),
        (
            "ratio.name=rpso",
            f'ratio.name: should be {one_of(RATIOS)}, not "rpso"',
        ),
        (
            "correction.name=ice",
            f'correction.name: should be {one_of(CORRECTIONS)}, not "ice"',
        ),
        (
            "aggregation=mean",
            "aggregation: should be 'sequence_mean', 'token_mean', 'constant' or 'lambda', not "
            '"mean"',
        ),
        ("advantage={name: dr_grpo, std: sample}", "advantage.std: unknown key; known: name"),
        ("advantage={name: gfpo, keep: 1}", "advantage.keep: should be greater than or equal to 2"),
        (
            "advantage={name: gfpo, keep: 99}",
            "advantage.keep: 99 is more than sampling.group_size = 8",
        ),
        ("advantage={name: gae, lambda: 1.5}", "advantage.lambda: should be less than or equal"),
        (
            "advantage={name: gae, lamda: 1}",
            'advantage.lamda: unknown key; did you mean "lambda"?',
        ),
        (
            "advantage={name: gae, lambda_: 1}",
            'advantage.lambda_: unknown key; did you mean "lambda"?',
        ),
        (
            "advantage={name: gae, critic: {warmup_steps: 2}}",
            "advantage.critic.warmup_steps: 2 must be less than domains.sums.loop.steps = 2",
        ),
        (
            "advantage={name: gae, critic: {optimizer: {learning_rate: 1, warmup_steps: 2}}}",
            "advantage.critic.optimizer.warmup_steps: 2 must be less than the 2 updates of "
            "domains.sums.loop.steps = 2",
        ),
        ("kl.target=0.01", "kl.target: 0.01 is never reached from kl.coefficient = 0"),
        (
            "ratio={name: cispo, cap: 0.5, floor: 0.8}",
            "ratio.floor: 0.8 must be at most cap = 0.5",
        ),
        (
            "correction={name: icepop, low: 5, high: 5}",
            "correction.low: 5 must be less than high = 5",
        ),
    ],
)
def test_a_wrong_objective_is_reported(config: Path, override: str, message: str) -> None:
    found = violation(config, RATIO, f"{EXPERT}.{override}")
    assert found.startswith(f"command line: {EXPERT}.{message}")


@pytest.mark.parametrize("ratio", ["sequence", "geometric", "rspo"])
@pytest.mark.parametrize("advantage", ["process", "gae"])
def test_a_response_level_ratio_contradicts_a_token_level_advantage(
    config: Path, advantage: str, ratio: str
) -> None:
    objective = f"objective={{advantage: {{name: {advantage}}}, ratio: {{name: {ratio}}}}}"
    message = f"objective.ratio.name: {ratio} gives all tokens of a response one gradient, which"
    assert violation(config, STEPS, f"domains.sums.{objective}").startswith(
        f"command line: domains.sums.{message} undoes the advantage {advantage} of each; use token"
    )


@pytest.mark.parametrize("ratio", sorted(RATIOS))
def test_a_correction_by_token_needs_a_ratio_that_takes_it(config: Path, ratio: str) -> None:
    name = f"domains.sums.objective.ratio.name={ratio}"
    by_token = [f"domains.sums.objective.correction={{name: {each}}}" for each in ("tis", "icepop")]
    free = ["name: none", "level: sequence", "name: icepop, level: sequence"]
    for correction in (f"domains.sums.objective.correction={{{each}}}" for each in free):
        load(config, [name, correction])
    for correction in by_token:
        if ratio not in ("geometric", "rspo"):
            load(config, [name, correction])
            continue
        assert (
            f"domains.sums.objective.correction.level: token has no meaning under ratio {ratio},"
            " which is defined for whole responses; use sequence, or another ratio such as"
        ) in violation(config, name, correction)


def test_process_requires_step_rewards(config: Path) -> None:
    process = f"{EXPERT}.advantage.name=process"
    start = f"domains.sums.rewards: {EXPERT}.advantage process requires step rewards, "
    assert f"{start}which only kind: python has" in violation(config, RATIO, process)
    cut_off = violation(config, RATIO, process, STEPS.replace("score", "zero"))
    assert cut_off.startswith(
        f"command line: {start}and a truncated or timed-out response has none;"
    )
    late = violation(config, RATIO, process, STEPS.replace("timed_out: null", "timed_out: 0"))
    assert late == cut_off
    load(config, [RATIO, process, STEPS])
    objective = "stages.mixed.objective={advantage: {name: process}, ratio: {name: token}}"
    assert "words.rewards: stages.mixed.objective.advantage process" in violation(
        config, MIXED, objective, STEPS
    )


def test_a_critic_allows_groups_of_one(config: Path) -> None:
    critic = f"{EXPERT}.advantage={{name: gae, gamma: 0.9, lambda: 0.8}}"
    config.write_text(dump_resolved(load(config, [RATIO])))
    alone = "domains.sums.sampling.group_size=1"
    settings = load(config, [critic, alone])
    advantage = settings.domains["sums"].objective.advantage
    assert isinstance(advantage, GaeSettings)
    assert (advantage.gamma, advantage.lambda_) == (0.9, 0.8)
    assert load(config, [critic, alone, f"{EXPERT}.advantage.lambda=0.7"])
    config.write_text(dump_resolved(settings))
    assert "lambda: 0.8" in config.read_text()
    assert load(config) == settings
    with pytest.raises(ConfigError, match="dynamic_sampling: 2 replaces every prompt"):
        load(config, ["domains.sums.rollout={dynamic_sampling: 2, dynamic_sampling_by: solved}"])


@pytest.mark.parametrize(
    "advantage",
    ["{name: reinforce_pp}", "{name: gae}", "{name: reinforce_pp_baseline, over: tokens}"],
)
def test_dynamic_sampling_by_advantages_needs_those_of_a_group(
    config: Path, advantage: str
) -> None:
    given = [RATIO, f"{EXPERT}.advantage={advantage}", "domains.sums.rollout.dynamic_sampling=2"]
    name = advantage.strip("{}").split(",")[0].removeprefix("name: ")
    assert (
        "domains.sums.rollout.dynamic_sampling_by: advantages replaces no prompt, since advantage"
        f" {name} teaches from zero-variance groups too; use solved, or dynamic_sampling: 0"
    ) in violation(config, *given)
    load(config, [*given, "domains.sums.rollout.dynamic_sampling_by=solved"])
    load(config, [*given, f"{EXPERT}.mask_truncated=true"])  # all truncated: nothing is learned
    load(config, [given[0], f"{EXPERT}.advantage.name=reinforce_pp_baseline", given[2]])


@pytest.mark.parametrize(
    ("kl", "models"),
    [
        ("{coefficient: 0.1, reference: first}", {"sums": "first"}),
        ("{coefficient: 0.0, reference: first}", {}),
        ("{coefficient: 0.1, reference: cold_start}", {}),  # its parent, which it loads anyway
        ("{coefficient: 0.1, reference: ema}", {}),
        ("{coefficient: 0.1, reference: parent}", {}),
    ],
)
def test_a_reference_is_an_input_of_its_stage(
    config: Path, kl: str, models: dict[str, str]
) -> None:
    first = f"stages={{first: {{kind: sft, {TRAINED[1:]}}}"
    settings = load(config, [first, "stages.cold_start.from=first", f"{EXPERT}.kl={kl}"])
    stage = next(each for each in compile_graph(settings) if each.name == "experts.sums")
    assert stage.models == models
    assert stage.inputs == ("cold_start", *models.values())


PENALTY = "objective.kl={coefficient: 0.1, reference: experts}"


def mixed_of(config: Path, *overrides: str) -> tuple[Stage, RunSettings]:
    """Return a stage that trains on both domains, from the merge of their experts."""
    settings = load(config, [MIXED, "stages.mixed.from=merge", *overrides])
    return next(each for each in compile_graph(settings) if each.name == "mixed"), settings


@pytest.mark.parametrize("reference", ["experts", "'experts.{domain}'"])
def test_a_block_is_the_reference_of_each_domain_s_own_stage(config: Path, reference: str) -> None:
    """A stage on several domains, as with `teachers`."""
    own = {"sums": "experts.sums", "words": "experts.words"}
    kl = PENALTY.replace("experts", reference)
    for stated in ([f"stages.mixed.{kl}"], [f"domains.{name}.{kl}" for name in own]):
        cold = [] if len(stated) == 1 else ["stages.experts.objective={}"]  # else its own reference
        stage, settings = mixed_of(config, *stated, *cold)
        assert stage.models == own
        assert stage.inputs == ("merge", *own.values())
        assert compared_with(stage, settings) == (2, 0)


def test_domains_may_differ_in_the_stage_that_is_their_reference(config: Path) -> None:
    """A reference that the stage starts from is loaded once, by whatever name."""
    kl = "{coefficient: 0.1, reference: cold_start}"
    others = f"domains.words.objective.kl={kl}", "stages.mixed.from=experts.sums"
    stage, settings = mixed_of(
        config, *others, f"domains.sums.{PENALTY}", "stages.experts.objective={}"
    )
    assert (stage.parent, stage.models) == ("experts.sums", {"words": "cold_start"})
    assert compared_with(stage, settings) == (2, 0)


def test_a_stage_with_references_by_domain_is_stale_where_one_of_them_changes(
    config: Path, run: RunDirectory
) -> None:
    stage, _ = mixed_of(config, f"stages.mixed.{PENALTY}")
    found = {name: Checkpoint(run.path, 1, name, {}) for name in stage.sources}
    before = lineage_from(stage, found, {})
    assert before.roles["models.words"] == "experts.words"
    found["experts.words"] = Checkpoint(run.path, 1, "other", {})
    assert [*changes(before, lineage_from(stage, found, {}))] == [
        "the checkpoint of experts.words changed"
    ]


def test_a_reference_without_a_stage_of_the_domain_is_an_error_at_its_key(config: Path) -> None:
    said = "    objective: {kl: {coefficient: 0.1, reference: experts}}"
    edited(config, "{dataset: chain_sum}\n", "{dataset: chain_sum}\n" + said + "\n")
    edited(config, "for_each: domain}", "for_each: domain, objective: {}}")
    line = config.read_text().splitlines().index(said) + 1
    third = "domains={third: {prompts: {dataset: chain_sum}, optimizer: {learning_rate: 1}, "
    several = (f"{third}loop: {{steps: 1}}}}}}", "stages.experts.domains=[words, third]")
    assert errors(config, MIXED, *several, "stages.merge.domains=[words, third]") == [
        f"small.yaml:{line}: domains.sums.objective.kl.reference: experts has no stage of the "
        "domain sums; it has experts.words, experts.third"
    ]
    assert errors(config, "domains.sums.objective.kl.reference=expert", MIXED) == [
        "command line: domains.sums.objective.kl.reference: no such stage: expert; did you mean "
        '"experts"?'
    ]


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("domains.sums.routing.replay=none", "routing.replay is none"),
        ("model.precision=bf16", "model.precision is bf16"),
        ("domains.sums.objective.correction={samples: stale}", None),
        ("domains.sums.objective.correction={name: none}", None),
    ],
)
def test_a_correction_of_all_samples_is_reported(
    config: Path, override: str, why: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["validate", str(config), override]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "pi_old / mu" in line]
    assert bool(lines) == (why is not None)
    # Its domain's line.
    start = f"warning: {config}:14: domains.sums.objective.correction: all samples are"
    assert not lines or lines[0].startswith(start)
    assert all(why is not None and f"since {why};" in line for line in lines)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["domains.words.objective.advantage={name: gfpo, keep: 9}"],
            "domains.words.objective.advantage.keep: 9 ",
        ),
        (
            ["domains.words.objective.kl.target=0.1"],
            "domains.words.objective.kl.target: 0.1 is never reached",
        ),
        (
            ["stages.mixed.gate={max_kl: 0.1}"],
            "stages.mixed.gate.max_kl: 0.1 limits a metric that is not logged with"
            " domains.sums.objective.kl.coefficient = 0",
        ),
        (["stages.mixed.gate={max_kl: 0.1}", "domains.words.objective.kl.coefficient=0.1"], None),
    ],
)
def test_every_domain_s_objective_is_checked_in_a_stage_on_several(
    config: Path, overrides: list[str], message: str | None
) -> None:
    """Also a domain's that is not the first, by the group size of the stage."""
    alone = [*overrides, "stages={experts: null, merge: null, export: null}"]
    if message is None:
        load(with_mixed(config), alone)
        return
    assert message in violation(with_mixed(config), *alone)


def reads_of_mixed(config: Path, *overrides: str) -> dict[str, Any]:
    """Return what a stage on both domains reads."""
    graph = compile_graph(load(config, [MIXED, *overrides]))
    return next(each for each in graph if each.name == "mixed").reads


def test_a_stage_on_several_domains_reads_one_objective_or_each_domain_s(config: Path) -> None:
    """A stage's own replaces the domains', and only unlike ones have names."""
    stated = reads_of_mixed(config, "stages.mixed.objective={entropy_bonus: 0.25}")
    assert stated["objective.entropy_bonus"] == 0.25
    alike = reads_of_mixed(config)
    assert alike["objective.entropy_bonus"] == 0.0
    assert not [key for key in alike if key.startswith("objectives.")]
    unlike = reads_of_mixed(config, "domains.words.objective.entropy_bonus=0.25")
    assert not [key for key in unlike if key.startswith("objective.")]
    names = ("sums", "words")
    assert [unlike[f"objectives.{name}.entropy_bonus"] for name in names] == [0.0, 0.25]


def test_a_critic_on_several_domains_is_an_error_where_it_is_stated(config: Path) -> None:
    gae = "objective={advantage: {name: gae}, ratio: {name: token}}"
    why = "objective.advantage.name: gae trains a critic, for one domain alone; stages.mixed has 2"
    [*found] = errors(config, MIXED, f"stages.mixed.{gae}")
    assert set(found) == {f"command line: stages.mixed.{why}"}
    assert f"command line: domains.words.{why}" in errors(config, MIXED, f"domains.words.{gae}")


def test_a_critic_s_warmup_counts_every_update_of_a_step(config: Path) -> None:
    updates = "domains.sums.updates_per_rollout=2"
    for steps in (3, 4):
        critic = f"{{optimizer: {{learning_rate: 1, warmup_steps: {steps}}}}}"
        given = [RATIO, updates, f"{EXPERT}.advantage={{name: gae, critic: {critic}}}"]
        if steps == 3:
            load(config, given)
        else:
            assert "4 must be less than the 4 updates of" in violation(config, *given)
