"""Messages of broken rules between blocks, word for word, and what valid blocks allow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.validate import dump_resolved, load
from stages.objectives.ratios.sequence import SequenceRatioSettings
from stages.objectives.ratios.token import TokenRatioSettings
from tests.pipeline.violations import edited, errors, judge, own, rewards


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("layout.expert=16", "layout.expert: 16 does not divide model.experts = 8"),
        (
            "layout={ranks: 8, expert: 16}",
            "expert 16 does not divide layout.ranks = 8; use one of [1, 2, 4, 8], or a multiple of "
            "16 as layout.ranks",
        ),
        (
            "layout={ranks: 12, tensor: 2, context: 5}",
            "layout.context: tensor 2 x context 5 does not divide layout.ranks = 12; use one of "
            "[1, 2, 3, 6], or a multiple of 10 as layout.ranks",
        ),
        (
            "layout={ranks: 12, pipeline: 4, expert: 2}",
            "layout.pipeline: expert 2 x pipeline 4 does not divide layout.ranks = 12; use one of "
            "[1, 2], or a multiple of 8 as layout.ranks",
        ),
        (
            "layout={ranks: 7, tensor: 2, context: 2}",
            "layout.context: tensor 2 x context 2 does not divide layout.ranks = 7; use a multiple "
            "of 4 as layout.ranks",
        ),
        (
            "stages.merge.optimizer.precision_aware=true",
            "stages.merge.optimizer.precision_aware: requires model.precision: bf16",
        ),
        (
            "stages.merge.optimizer={precision_aware: true, betas: [0.9, 0.999]}"
            "\tmodel.precision=bf16",
            "stages.merge.optimizer.precision_aware: keeps Adam's second moment in bf16, whose",
        ),
        (
            "stages.merge.optimizer.cpu_offload=0.5\tlayout.distributed_optimizer=false",
            "stages.merge.optimizer.cpu_offload: requires layout.distributed_optimizer: true",
        ),
        (
            "stages.merge.gate={samples_per_problem: 4}\tevaluation.temperature=0",
            "stages.merge.gate.samples_per_problem: 4 greedy answers to a problem are identical",
        ),
        (
            "stages.merge.gate={samples_per_problem: 4}\tdomains.sums.evaluation.temperature=0",
            "stages.merge.gate.samples_per_problem: 4 greedy answers to a problem are identical",
        ),
        ("evaluation.top_k=81", "evaluation.top_k: 81 is more than model.vocabulary_size = 80"),
        (
            "domains.sums.evaluation.top_k=81",
            "domains.sums.evaluation.top_k: 81 is more than model.vocabulary_size = 80",
        ),
        (
            "domains.sums.evaluation.temperature=0\tevaluation.samples_per_problem=2",
            "domains.sums.evaluation.temperature: 2 greedy answers to a problem are identical",
        ),
        ("stages.merge.optimizer.cpu_offload=1.5", "merge.optimizer.cpu_offload: should be less t"),
        ("layout.ranks=66", "stages.cold_start: the sum of demonstrations.sequences_per_step is 6"),
        ("layout.ranks=34", "stages.merge.sampling.prompts_per_step: 32 prompts x 1 samples in 1"),
        ("evaluation.problems=1", "evaluation.problems: 1 is less than the 2 data-parallel ranks"),
        ("model.max_positions=32", "engine.max_model_tokens: 64 is more than model.max_positions"),
        ("engine.tensor=3", "engine.tensor: 3 does not divide model.attention_heads = 4"),
        (
            "engine={tensor: 2, expert_parallel: true}\tmodel={experts: 1, experts_per_token: 1}",
            "engine.expert_parallel: 2 ranks cannot share model.experts = 1; use fewer ranks, or f",
        ),
        ("engine.expert_parallel=true", "has no effect with engine.tensor = 1, whose rank has all"),
        (
            "engine={data: 3}\tmodel.expert_hidden_size=64",
            "engine.data: 3 x engine.tensor = 3 ranks do not divide model.expert_hidden_size = 64;",
        ),
        (
            "engine={data: 2, expert_parallel: true}\tmodel={experts: 1, experts_per_token: 1}",
            "engine.expert_parallel: 2 ranks cannot share model.experts = 1; use fewer ranks, or f",
        ),
        ("engine.weights=fp8", "engine.weights: fp8 quantizes bf16 weights, not model.precision ="),
        (
            "engine.weights=fp8\tmodel.precision=bf16\tdomains.sums.objective.correction="
            "{name: tis, samples: stale}",
            "domains.sums.objective.correction.samples: stale leaves fresh samples uncorrected, wh",
        ),
        (
            "engine.weights=fp8\tmodel.precision=bf16\tdomains.sums.objective.correction="
            "{name: none}",
            "domains.sums.objective.correction: none, but engine.weights: fp8 samples from another",
        ),
        (
            "engine={kv_cache_mebibytes: 1, max_model_tokens: 99}\tmodel.layers=16",
            "engine.kv_cache_mebibytes: 1 MiB cache the keys and values of 96 tokens, less than e",
        ),
        ("domains.sums.sampling.temperature=0.009", "should be greater than or equal to 0.01, not"),
        ("stages.merge.sampling.temperature=2.1", "stages.merge.sampling.temperature: should be l"),
        ("stages.merge.sampling.top_k=81", "stages.merge.sampling.top_k: 81 is more than model.vo"),
        ("domains.sums.loop.steps=" + "[" * 2000, "domains.sums.loop.steps: nested too deeply"),
        ("model.experts_per_token=1", "model.experts_per_token: 1 gives the router no gradient"),
        ("model.architecture={n_group: 2}", "model.architecture.n_group: unknown key of qwen3_moe"),
        (
            "model={family: glm4_moe, architecture: {n_grup: 2}}",
            'model.architecture.n_grup: unknown key of glm4_moe; did you mean "n_group"?',
        ),
        (
            "model={family: glm4_moe, architecture: {n_group: two}}",
            'model.architecture.n_group: should be a valid integer, not "two"',
        ),
        (
            "model={family: qwen3_5_moe_text, layers: 3}",
            "full_attention_interval: 4 leaves none of model.layers = 3 with attention",
        ),
        (
            "model.vocabulary_size=96",
            "model.vocabulary_size: 96 must be 80, the number of token ids",
        ),
        ("domains.sums.sampling.group_size=1", "a group of one has no advantage"),
        ("domains.sums.updates_per_rollout=3", "3 does not divide domains.sums.sampling.prompts_p"),
        (
            "stages.merge.rollout={max_steps_ahead: 1, max_staleness: 2}",
            "stages.merge.rollout.max_staleness: 2 is only read with max_steps_ahead: 0, and",
        ),
        ("stages.merge.rollout.max_staleness=2", "2 has no effect: max_steps_ahead: 0 keeps no s"),
        ("stages.merge.rollout={oversampling: 2}", "stages.merge.rollout.oversampling: unknown ke"),
        ("domains.sums.rollout.mode=asink", "rollout.mode: renamed to max_steps_ahead: 0 for sync"),
        ("domains.sums.rollout={mode: sync, max_steps_ahead: 1}", "mode: renamed to max_steps_ah"),
        ("stages.merge.rollout.sync_in_flight=true", "true has no effect: max_steps_ahead: 0 has"),
        ("stages.merge.rollout={max_steps_ahead: 2, sync_in_flight: false}", "false needs max_ste"),
        ("domains.words.prompts.held_out_fraction=0.5", "0.5 must be 0.25, as in domains.sums, or"),
        (own("stages.nowhere.reward:exact"), "no module stages.nowhere.reward in"),
        (own("stages.data.prompts:exakt"), "prompts.py defines no exakt"),
        (
            rewards("{kind: math, weight: 0}"),
            "domains.sums.rewards: every weight is 0, so that all",
        ),
        (
            rewards("{kind: overlong, max_tokens: 3, buffer_tokens: 4}"),
            "domains.sums.rewards.a.buffer_tokens: 4 is more than max_tokens = 3",
        ),
        (
            rewards("{kind: overlong, max_tokens: 25, buffer_tokens: 4}"),
            "domains.sums.rewards.a.max_tokens: 25 is more than the domain's sampling."
            "max_response_tokens = 24",
        ),
        (
            "domains.sums.sampling.group_size=1000000000",
            "group_size: should be less than or equal to 1000000, not 1000000000",
        ),
        (
            "stages.merge.sampling={prompts_per_step: 2000, group_size: 1000}",
            "stages.merge.sampling.prompts_per_step: 2000 prompts x 1000 samples are 2000000 per s",
        ),
        ("stages.merge.loop.steps=1000000000000", "steps: should be less than or equal to 100000"),
        ("rewards.workers=1000000", "rewards.workers: should be less than or equal to 1024, not"),
        ("stages.merge.teachers=expert", 'merge.teachers: no such stage: expert; did you mean "ex'),
        ("stages.export.from=experts", "export.from: experts stands for 2 stages: name one of e"),
        ("stages.export.from=evaluate", "evaluate leaves results, and checkpoints are needed here"),
        ("stages.export.after=[experts]", "export.after: experts stands for 2 stages: name one o"),
        ("stages.experts.for_each=null", "stages.experts.optimizer: required with several domains"),
        ("engine.count=1000000", "engine.count: should be less than or equal to 10000, not"),
        (
            rewards("{kind: length, at_least: 4, at_most: 3}"),
            "domains.sums.rewards.a.at_least: 4 is more than at_most = 3",
        ),
        (
            rewards("{kind: length, at_least: -1}"),
            "domains.sums.rewards.a.at_least: should be greater than or equal to 0, not -1",
        ),
        (rewards("{kind: format, pattern: '('}"), "a.pattern: should be a regular expression ("),
        (rewards("{kind: format}"), "domains.sums.rewards.a.pattern: required key is missing"),
        (rewards("{weight: 1}"), "domains.sums.rewards.a.kind: required key is missing"),
        (
            rewards("{kind: mth}"),
            "domains.sums.rewards.a.kind: should be 'code', 'format', 'instruction', ",
        ),
        (rewards("{kind: math, wight: 1}"), 'a.wight: unknown key; did you mean "weight"?'),
        (rewards("1"), "domains.sums.rewards.a: should be a mapping of keys to values, not 1"),
        (
            rewards("{kind: language, scripts: [elvish]}"),
            "domains.sums.rewards.a.scripts.0: should",
        ),
        ("domains.sums.rewards={}", "domains.sums.rewards: should have at least 1 item"),
        ("domains.sums.rewards={a b: {kind: math}}", "a reward's name must be letters, digits, _"),
        (judge(lowest=10), "domains.sums.rewards.a.lowest: 10 must be less than highest = 10"),
        (judge(verdict="good"), "a.verdict: should have a group, (...), which is the score"),
        (judge(base_url="http://"), "a.base_url: string should match pattern"),
        (judge(base_url="http://u:pw@x/v1"), "a.base_url: must have no user and no password (@)"),
        (judge(base_url="http://key@x"), "a.base_url: must have no user and no password (@)"),
        (judge(base_url="http://x/v1?key=1"), "a.base_url: must have no query (?) and no fragm"),
        (judge(base_url="http://x/v1#a"), "a.base_url: must have no query (?) and no fragment (#)"),
        (judge(base_url="http://[bad/v1"), "a.base_url: has no valid host: a name, an IPv4 addre"),
        (judge(base_url="http://[x]/v1"), "a.base_url: has no valid host: a name, an IPv4 addre"),
        (judge(base_url="http://a..b/v1"), "a.base_url: has no valid host: a name, an IPv4 addre"),
        (judge(base_url="http://-a/v1"), "a.base_url: has no valid host: a name, an IPv4 addre"),
        (judge(base_url="http://1.2.3.999/v1"), "a.base_url: has no valid host: a name, an IPv4"),
        (judge(base_url="http://:80/v1"), "a.base_url: has no valid host: a name, an IPv4 addre"),
        (judge(base_url="http://x:65536/v1"), "a.base_url: must have a port from 1 to 65535"),
        (judge(base_url="http://x:0/v1"), "a.base_url: must have a port from 1 to 65535"),
        (judge(base_url="http://x:eighty/v1"), "a.base_url: must have a port from 1 to 65535"),
        (judge(base_url="http://b\u00fccher/v1"), "a.base_url: must be printable ASCII: xn--NAME"),
        (judge(base_url="http://x/\u007fv1"), "a.base_url: must be printable ASCII: xn--NAME"),
        (judge(attempts=99), "a.attempts: should be less than or equal to 16, not 99"),
        (
            rewards("{kind: json_schema, default_schema: {type: 7}}"),
            "a.default_schema: not a JSON schema: 7 is not valid under any of the given schemas at",
        ),
        (
            "domains.sums.prompts.dataset=chain_som",
            'dataset: no such dataset: chain_som; did you mean "chain_',
        ),
        (
            "domains.sums.optimizer.betas=[0.9, 1]",
            "optimizer.betas.1: should be less than 1, not 1",
        ),
        (judge(attempts=5), "a.timeout_seconds: 300 must be more than the 315 seconds that 5"),
        (rewards("{kind: code}"), "rewards.a.kind: problems of reasoning_gym have no tests; use j"),
        (
            rewards("{kind: code, timeout_seconds: 90}"),
            "a.timeout_seconds: 90 must be more than the 90 seconds that tests_seconds = 60 and",
        ),
        (
            rewards("{kind: code, timeout_seconds: null}"),
            "rewards.timeout_seconds: 60 must be more than the 90 seconds that tests_seconds =",
        ),
        (
            rewards("{kind: code, wall_seconds: 61}"),
            "a.wall_seconds: 61 for one run is more than tests_seconds = 60 for all of them",
        ),
        (
            rewards("{kind: code, memory_mebibytes: 4097}"),
            "a.memory_mebibytes: 4097 is more than rewards.memory_mebibytes = 4096, the limit",
        ),
        (judge(rubric="good?"), "domains.sums.rewards.a.rubric: string should match pattern"),
        (
            judge(api_key_file="nowhere"),
            "domains.sums.rewards.a.api_key_file: no such file: nowhere",
        ),
        (judge(api_key_variable="NOT_SET"), "environment variable NOT_SET is not set"),
        ("rewards.max_failed_fraction=1", "rewards.max_failed_fraction: should be less than 1"),
        (
            "domains.sums.objective.ratio.clip_low=1.5",
            "domains.sums.objective.ratio.clip_low: should be less than or equal to 1, not 1.5",
        ),
        (
            "domains.sums.objective.ratio={name: token, clip_low: 2}",
            "domains.sums.objective.ratio.clip_low: should be less than or equal to 1, not 2",
        ),
        (
            "domains.sums.reward=a:b",
            "domains.sums.reward: renamed to rewards: {NAME: {kind: python, function: package.",
        ),
        ("stages.merge.optimizer.warmup_steps=2", "2 must be less than the 2 updates of stages.me"),
        ("domains.sums.optimizer.warmup_steps=2", "2 must be less than the 2 updates of domains"),
    ],
)
def test_rules_between_blocks(config: Path, override: str, message: str) -> None:
    assert any(message in error for error in errors(config, *override.split("\t")))


def test_several_rewards_round_trip(config: Path) -> None:
    settings = load(config, ["domains.sums.rewards={right: {kind: math}, b: {kind: length}}"])
    assert [reward.unfinished for reward in settings.domains["sums"].rewards.values()] == [
        "zero",
        "score",
    ]
    assert list(settings.domains["words"].rewards) == ["exact"]
    config.write_text(dump_resolved(settings))
    assert load(config) == settings


def test_a_deterministic_run_rejects_what_is_not_reproducible(config: Path) -> None:
    found = errors(
        config,
        "deterministic=true",
        "stages.merge.rollout.max_steps_ahead=2",
        "domains.sums.rollout={max_steps_ahead: 1, oversampling: 1.5}",
    )
    assert [error.partition(" is not reproducible bit for bit")[0] for error in found] == [
        "command line: domains.sums.rollout.max_steps_ahead: 1",
        "command line: domains.sums.rollout.oversampling: 1.5 takes the groups that finish first, "
        "which",
        "command line: stages.merge.rollout.max_steps_ahead: 2",
    ]
    load(config, ["deterministic=true", "domains.sums.rollout.dynamic_sampling=2"])
    load(config, ["stages.merge.rollout.max_steps_ahead=4"])
    load(config, ["domains.sums.rollout={oversampling: 1.5, max_staleness: 2}"])


@pytest.mark.parametrize(
    ("former", "rollout", "prefetched", "bound", "collects_before_sync"),
    [
        ("{mode: sync}", "{max_steps_ahead: 0}", 0, 1, False),
        ("{mode: overlap}", "{max_steps_ahead: 1}", 1, 1, True),
        ("{mode: async}", "{max_steps_ahead: 1, sync_in_flight: true}", 1, 1, False),
        ("{mode: async, max_staleness: 4}", "{max_steps_ahead: 4}", 4, 4, False),
        ("{max_staleness: 1}", "{}", 0, 1, False),
    ],
)
def test_modes_of_earlier_versions_are_read_as_steps_ahead(
    former: str, rollout: str, prefetched: int, bound: int, collects_before_sync: bool, config: Path
) -> None:
    """As they were: `prefetch`, `max_staleness` and `drains` followed from `mode` alone."""
    settings = load(config, [f"domains.sums.rollout={former}"])
    assert settings == load(config, [f"domains.sums.rollout={rollout}"])
    found = settings.domains["sums"].rollout
    assert (found.max_steps_ahead, found.staleness_bound) == (prefetched, bound)
    assert found.collects_before_sync == collects_before_sync


def test_an_override_may_state_keys_of_earlier_versions(config: Path) -> None:
    stated = ("domains.sums.rollout.mode=async", "domains.sums.rollout.max_staleness=4")
    assert load(config, stated).domains["sums"].rollout.max_steps_ahead == 4
    assert load(config, ["stages.experts.seeded_as=first"]).stages["experts"].was == "first"
    [error] = errors(config, "domains.sums.reward=mine:reward")
    assert error.startswith("command line: domains.sums.reward: renamed to rewards: {NAME: {kind: ")


def test_every_rank_and_update_needs_a_sample(config: Path) -> None:
    sampling = "domains.sums.sampling={prompts_per_step: 2, group_size: 2}"
    several = [sampling, "domains.sums.updates_per_rollout=2"]
    load(config, [*several, "domains.sums.optimizer.warmup_steps=3"])
    assert errors(config, *several, "layout.ranks=4") == [
        "command line: domains.sums.sampling.prompts_per_step: 2 prompts x 2 samples in 2 updates "
        "are 2 per update, less than the 4 data-parallel ranks of layout; each needs at least one"
    ]
    load(config, ["layout={ranks: 6, expert: 2}"])
    load(config, [*several, "layout={ranks: 8, tensor: 2, pipeline: 2}"])


@pytest.mark.parametrize(
    ("override", "ratio"),
    [
        ("domains.sums.objective.ratio.name=token", TokenRatioSettings(clip_low=0.2)),
        ("domains.sums.objective.ratio.clip_low=1e-3", SequenceRatioSettings(clip_low=1e-3)),
        ("domains.sums.objective.ratio={}", SequenceRatioSettings(clip_high=4e-4)),
    ],
)
def test_each_ratio_has_its_own_clip_defaults(config: Path, override: str, ratio: object) -> None:
    settings = load(config, [override])
    assert settings.domains["sums"].objective.ratio == ratio
    config.write_text(dump_resolved(settings))
    assert load(config) == settings


def test_a_judges_key_file_is_relative_to_the_file_that_names_it(config: Path) -> None:
    directory = config.parent / "domains"
    directory.mkdir()
    (directory / "key").write_text("secret")
    judge = "{kind: judge, base_url: 'http://x/v1', model: m, rubric: '{response}?', "
    (directory / "_base.yaml").write_text(f"rewards: {{a: {judge}api_key_file: key}}}}\n")
    edited(
        config,
        "prompts: {dataset: chain_sum}",
        f"extends: domains/_base.yaml\n    rewards: {{b: {judge}api_key_file: domains/key}}}}"
        "\n    prompts: {dataset: chain_sum}",
    )
    rewards = load(config).domains["sums"].rewards
    files = [rewards[name].api_key_file for name in "ab"]  # type: ignore[union-attr]
    assert files == [directory / "key"] * 2
    (directory / "key").unlink()
    missing = f"a.api_key_file: no such file: {directory / 'key'}".replace(f"{config.parent}/", "")
    assert any(missing in each for each in errors(config))


def test_validate_warns_of_a_key_sent_unencrypted(
    config: Path, braid: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    for url, count in (("http://node7/v1", 1), ("http://127.0.0.1:80/v1", 0), ("https://x/v1", 0)):
        given = judge(base_url=url, api_key_variable="A_KEY")
        line = "domains.sums.rewards.a.base_url: the key goes to node7 unencrypted; use https\n"
        code, _, err = braid("validate", str(config), given)
        assert (code, err) == (0, f"warning: {line}" * count)


@pytest.mark.parametrize(
    "url",
    [
        "https://api.example.com/v1",
        "http://localhost:8000/v1",
        "http://10.0.0.7:65535/v1",
        "http://[2001:db8::1]:80/a%20b/v1/",
        "http://node_7.cluster.local./v1",
        "https://judge/@team/v1",
    ],
)
def test_valid_base_urls_of_a_judge(config: Path, url: str) -> None:
    load(config, [judge(base_url=url)])


def test_the_merge_samples_one_response_per_prompt(config: Path) -> None:
    merge = load(config, ["stages.merge.sampling.prompts_per_step=16"]).stages["merge"]
    assert merge.sampling.group_size == 1


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ((), []),  # the engine's samples have at most 64 tokens
        (
            ("engine.max_model_tokens=256", "stages.merge.loop.micro_batch_tokens=255"),
            ["stages.merge.loop.micro_batch_tokens: 255 tokens are less than a sample"],
        ),
        (
            ("engine.max_model_tokens=256", "domains.sums.loop.micro_batch_tokens=64"),
            ["domains.sums.loop.micro_batch_tokens: 64 tokens are less than a sample"],
        ),
        # Four devices share a row.
        (
            (
                "engine.max_model_tokens=256",
                "layout={ranks: 4, context: 4}",
                "domains.sums.loop.micro_batch_tokens=64",
                "stages.merge.loop.micro_batch_tokens=63",
            ),
            [
                "stages.merge.loop.micro_batch_tokens: 63 tokens on each of layout.context = 4"
                " ranks are less than a sample"
            ],
        ),
        # Demonstrations are not the engine's.
        (("engine.max_model_tokens=256", "stages.cold_start.loop.micro_batch_tokens=64"), []),
    ],
)
def test_rows_shorter_than_a_sample_are_a_warning(
    braid: Callable[..., tuple[int, str, str]],
    config: Path,
    overrides: tuple[str, ...],
    keys: list[str],
) -> None:
    code, _, err = braid("validate", config, *overrides)
    warned = [line for line in err.splitlines() if "micro_batch_tokens" in line]
    assert code == 0 and len(warned) == len(keys), err
    assert all(key in line for key, line in zip(keys, warned, strict=True)), err
