"""Rules between blocks: what no block's own schema can say.

A rule runs as soon as the blocks it reads are valid by themselves, so that its violations are
listed together with those of the other blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from parallel.families import FAMILIES, architecture, family_violations
from parallel.memory import CACHE_BLOCK, cached_tokens
from parallel.settings import (
    MOST,
    EngineSettings,
    LayoutSettings,
    ModelSettings,
    OptimizerSettings,
    Settings,
    layout_violations,
)
from parallel.weights.engine import engine_violations
from pipeline.cores import placement_fault
from pipeline.credit_checks import credit_rules
from pipeline.data_checks import (
    data_rules,
    demonstration_rules,
    missing_data,
    missing_tokenizer,
    tokenizer_rules,
)
from pipeline.gate_checks import gate_rules
from pipeline.graph_checks import graph_rules, has_cold_start
from pipeline.rewards import reward_needs, reward_rules, step_rules
from pipeline.violations import hint, shown
from stages.domains.rewards.settings import RewardPoolSettings
from stages.objectives.settings import ObjectiveSettings
from stages.settings import (
    ColdStartSettings,
    DomainSettings,
    EvaluationSettings,
    LoopSettings,
    MergeRolloutSettings,
    MergeSettings,
    MixedSettings,
    PolicySettings,
    RolloutSettings,
    SamplingSettings,
)

Found = Iterator[tuple[str, str]]
Block = TypeVar("Block", bound=Settings)


Domains = dict[str, DomainSettings | None]


def violations(run: dict[str, Any], domains: Domains) -> Found:
    """Every broken rule as (dotted key, message); `domains` are those that `domains_of` finds."""
    model = _block(ModelSettings, run.get("model"))
    layout = _block(LayoutSettings, run.get("layout", {}))
    engine = _block(EngineSettings, run.get("engine", {}))
    cold_start = _block(ColdStartSettings, run.get("cold_start"))
    merge = _block(MergeSettings, run.get("merge"))
    mixed = _block(MixedSettings, run.get("mixed"))
    evaluation = _block(EvaluationSettings, run.get("evaluation", {}))
    pool = _block(RewardPoolSettings, run.get("rewards", {}))
    deterministic = run.get("deterministic") is True
    demonstrated = has_cold_start(run)

    if model:
        yield from tokenizer_rules(model)
    if model and layout:
        yield from layout_violations(model, layout)
        yield from _family_rules(model, layout)
    if model and engine:
        yield from _engine_rules(model, engine)
    if cold_start:
        yield from _schedule_rules("cold_start", cold_start.optimizer, cold_start.loop)
    for name, domain in domains.items():
        yield from _name_rules(name)
        if domain:
            yield from _policy_rules(f"experts.{name}", domain, domain.rewards, layout, engine)
            yield from _vocabulary_rules(f"experts.{name}.sampling", domain.sampling, model)
            yield from credit_rules(f"experts.{name}.objective", domain.objective)
            yield from reward_rules(f"experts.{name}.rewards", domain, pool)
            yield from _step_rules(name, domain, (f"experts.{name}", domain), ("mixed", mixed))
            yield from data_rules(f"experts.{name}", domain, model, engine, (merge, mixed))
            if demonstrated:
                yield from demonstration_rules(f"experts.{name}", domain, model)
            yield from _rollout_rules(f"experts.{name}.rollout", domain.rollout, deterministic)
    yield from graph_rules(run, domains)
    yield from gate_rules(domains, merge, layout)
    valid = {name: domain for name, domain in domains.items() if domain}
    if mixed:
        rewards = {name for domain in valid.values() for name in domain.rewards}
        yield from _policy_rules("mixed", mixed, rewards, layout, engine)
        yield from _vocabulary_rules("mixed.sampling", mixed.sampling, model)
        yield from credit_rules("mixed.objective", mixed.objective)
        yield from _rollout_rules("mixed.rollout", mixed.rollout, deterministic)
    if valid:
        yield from _split_rules(valid)
    if demonstrated and layout and valid and len(valid) == len(domains):
        yield from _demonstration_rules(valid, layout)
    if merge:
        yield from _schedule_rules("merge", merge.optimizer, merge.loop)
        yield from _sampling_rules("merge.sampling", merge.sampling, layout, engine)
        yield from _vocabulary_rules("merge.sampling", merge.sampling, model)
        yield from _rollout_rules("merge.rollout", merge.rollout, deterministic)
    if evaluation and layout and evaluation.problems < layout.data:
        yield "evaluation.problems", f"{evaluation.problems} is {_too_few(layout)}"


def surroundings(run: dict[str, Any], domains: Domains) -> Found:
    """What the stages need and do not find, as (dotted key, message).

    Such things may be gone, or not seen from here, when a run that they began is looked at.
    """
    model = run.get("model")
    weights = model.get("initial_weights") if isinstance(model, dict) else None
    if isinstance(weights, str) and not Path(weights).is_dir():
        yield "model.initial_weights", f"no such folder: {shown(Path(weights))}"
    yield from missing_tokenizer(model)
    # A domain by itself, which has no model around it, is held to what it says.
    demonstrated = has_cold_start(run) or model is None
    for name, domain in domains.items():
        if domain:
            yield from missing_data(f"experts.{name}", domain, demonstrated)
            yield from reward_needs(f"experts.{name}.rewards", domain)
    engine = _block(EngineSettings, run.get("engine", {}))
    if engine and (lack := placement_fault(engine)):
        yield "engine.placement", lack


def _block(settings: type[Block], given: Any) -> Block | None:
    try:
        return settings.model_validate_json(json.dumps(given, default=str), strict=True)
    except ValidationError:
        return None


def domains_of(run: dict[str, Any]) -> Domains:
    """The run's domains by their names; None stands for one that is not valid by itself."""
    experts = run.get("experts")
    if not isinstance(experts, dict):
        return {}
    return {name: _block(DomainSettings, given) for name, given in experts.items()}


def _too_few(layout: LayoutSettings) -> str:
    return f"less than the {layout.data} data-parallel ranks of layout, and each needs one"


def _family_rules(model: ModelSettings, layout: LayoutSettings) -> Found:
    faults = list(_architecture_faults(model))
    yield from faults or family_violations(model, layout)


def _architecture_faults(model: ModelSettings) -> Found:
    try:
        architecture(model)
    except ValidationError as error:
        known = FAMILIES[model.family].further.model_fields
        for fault in error.errors():
            key = ".".join(map(str, ("model.architecture", *fault["loc"])))
            if fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1:
                yield key, f"unknown key of {model.family}; {hint(str(fault['loc'][0]), known)}"
            else:
                should = fault["msg"].removeprefix("Input ")
                yield key, f"{should}, not {json.dumps(fault['input'], default=str)}"


def _engine_rules(model: ModelSettings, engine: EngineSettings) -> Found:
    if engine.max_model_tokens > model.max_positions:
        yield (
            "engine.max_model_tokens",
            f"{engine.max_model_tokens} is more than model.max_positions = {model.max_positions}",
        )
    if list(_architecture_faults(model)):
        return
    yield from engine_violations(model, engine.tensor)
    room = cached_tokens(model, engine) // CACHE_BLOCK * CACHE_BLOCK - CACHE_BLOCK
    if room < engine.max_model_tokens:
        yield (
            "engine.kv_cache_mebibytes",
            f"{engine.kv_cache_mebibytes} hold the keys and values of {max(room, 0)} tokens, less "
            f"than engine.max_model_tokens = {engine.max_model_tokens}",
        )


def _name_rules(name: str) -> Found:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", name):
        yield (
            f"experts.{name}",
            "a domain's name is made of letters, digits, _ and -, 100 at most, since it names a"
            " folder",
        )


def _policy_rules(
    key: str,
    policy: PolicySettings,
    rewards: Collection[str],
    layout: LayoutSettings | None,
    engine: EngineSettings | None,
) -> Found:
    """Those of a policy that learns from rewards of these names."""
    updates = policy.updates_per_rollout
    yield from _schedule_rules(key, policy.optimizer, policy.loop, updates)
    yield from _sampling_rules(f"{key}.sampling", policy.sampling, layout, engine, updates)
    yield from _objective_rules(f"{key}.objective", policy.objective, policy.sampling)
    yield from _stop_rules(f"{key}.stop", policy, rewards)
    yield from _group_rules(key, policy)
    if policy.sampling.prompts_per_step % updates:
        yield (
            f"{key}.updates_per_rollout",
            f"{updates} does not divide {key}.sampling.prompts_per_step = "
            f"{policy.sampling.prompts_per_step}, and every update takes as many whole groups",
        )


def _step_rules(
    name: str, domain: DomainSettings, *policies: tuple[str, PolicySettings | None]
) -> Found:
    """Those of the first of the policies, which learn from a domain, that compares steps."""
    for key, policy in policies:
        if policy and policy.objective.advantage.name == "process":
            yield from step_rules(f"experts.{name}.rewards", domain, f"{key}.objective")
            return


def _group_rules(key: str, policy: PolicySettings) -> Found:
    """A critic compares with its values, everything else within a group."""
    alone = policy.sampling.group_size < 2
    advantage = policy.objective.advantage
    if advantage.name != "gae":
        if alone:
            yield (
                f"{key}.sampling.group_size",
                "a group of one has no advantage, since it is its own mean; use 2 or more, or the "
                "advantage gae",
            )
        return
    steps, warmup = policy.loop.steps, advantage.critic.warmup_steps
    if warmup >= steps:
        yield (
            f"{key}.objective.advantage.critic.warmup_steps",
            f"{warmup} should be less than {key}.loop.steps = {steps}, or the policy never learns",
        )
    if alone and policy.rollout.dynamic_sampling:
        yield (
            f"{key}.rollout.dynamic_sampling",
            f"{policy.rollout.dynamic_sampling} replaces every prompt, since the samples of a group"
            " of one all earn the same; use 0",
        )
    yield from _schedule_rules(
        f"{key}.objective.advantage.critic",
        advantage.critic.optimizer,
        policy.loop,
        policy.updates_per_rollout,
        loop_key=f"{key}.loop",
    )


def _objective_rules(key: str, objective: ObjectiveSettings, sampling: SamplingSettings) -> Found:
    advantage, kl, correction = objective.advantage, objective.kl, objective.correction
    if advantage.name == "gfpo" and advantage.keep > sampling.group_size:
        yield (
            f"{key}.advantage.keep",
            f"{advantage.keep} is more than the sampling.group_size = {sampling.group_size} that "
            "there are to keep",
        )
    if kl.target is not None and kl.coefficient == 0:
        yield (
            f"{key}.kl.target",
            f"{kl.target:g} is never reached from kl.coefficient = 0, which is multiplied; begin "
            "above 0",
        )
    if correction.name == "icepop" and correction.low >= correction.high:
        yield (
            f"{key}.correction.low",
            f"{correction.low:g} should be less than high = {correction.high:g}",
        )


def _stop_rules(key: str, policy: PolicySettings, rewards: Collection[str]) -> Found:
    if policy.stop is None:
        return
    reward = policy.stop.metric.removeprefix("reward/")
    if "/" in policy.stop.metric and reward not in rewards:
        yield f"{key}.metric", f"there is no reward {reward}; {hint(reward, rewards)}"
    if policy.stop.window > policy.loop.steps:
        yield (
            f"{key}.window",
            f"{policy.stop.window} is more than loop.steps = {policy.loop.steps}, and only a full "
            "window ends the stage",
        )


def _split_rules(domains: dict[str, DomainSettings]) -> Found:
    """Prompts are split by their text: with one fraction, two domains that share some agree."""
    first, *others = domains
    shared = domains[first].prompts.held_out_fraction
    for name in others:
        if (own := domains[name].prompts.held_out_fraction) != shared:
            yield (
                f"experts.{name}.prompts.held_out_fraction",
                f"{own} should be {shared}, as that of experts.{first}, or one domain could train "
                "on what another is evaluated on",
            )


def _demonstration_rules(domains: dict[str, DomainSettings], layout: LayoutSettings) -> Found:
    total = sum(domain.demonstrations.sequences_per_step for domain in domains.values())
    if total < layout.data:
        yield (
            "experts",
            f"all demonstrations.sequences_per_step together are {total}, {_too_few(layout)}",
        )


def _sampling_rules(
    key: str,
    sampling: SamplingSettings,
    layout: LayoutSettings | None,
    engine: EngineSettings | None,
    updates: int = 1,
) -> Found:
    if engine and sampling.max_response_tokens >= engine.max_model_tokens:
        yield (
            f"{key}.max_response_tokens",
            f"{sampling.max_response_tokens} leaves no room for a prompt: it should be less than "
            f"engine.max_model_tokens = {engine.max_model_tokens}",
        )
    drawn = sampling.prompts_per_step * sampling.group_size
    if drawn > MOST:
        yield (
            f"{key}.prompts_per_step",
            f"{sampling.prompts_per_step} prompts x {sampling.group_size} samples are {drawn} a "
            f"step; at most {MOST} can be held",
        )
    samples = drawn // updates
    if layout and samples < layout.data:
        yield (
            f"{key}.prompts_per_step",
            f"{sampling.prompts_per_step} prompts x {sampling.group_size} samples in {updates} "
            f"updates make {samples} an update, {_too_few(layout)}",
        )


def _vocabulary_rules(key: str, sampling: SamplingSettings, model: ModelSettings | None) -> Found:
    if model and sampling.top_k > model.vocabulary_size:
        yield (
            f"{key}.top_k",
            f"{sampling.top_k} is more than model.vocabulary_size = {model.vocabulary_size}; use 0 "
            "for all tokens",
        )


def _rollout_rules(key: str, rollout: MergeRolloutSettings, deterministic: bool) -> Found:
    oversampling = rollout.oversampling if isinstance(rollout, RolloutSettings) else 1.0
    if deterministic and rollout.mode != "sync":
        yield (
            f"{key}.mode",
            f"{rollout.mode} cannot be repeated bit by bit, since samples are drawn while the "
            "weights change; use sync, or deterministic: false",
        )
    if deterministic and oversampling > 1:
        yield (
            f"{key}.oversampling",
            f"{oversampling:g} takes what ends first, which cannot be repeated bit by bit; use 1, "
            "or deterministic: false",
        )
    if rollout.max_staleness > 1 and rollout.mode == "overlap":
        yield (
            f"{key}.max_staleness",
            f"{rollout.max_staleness} should be 1: overlap draws each step's samples with the "
            "weights before; async may fall further behind",
        )
    if rollout.max_staleness > 1 and rollout.mode == "sync" and oversampling == 1:
        yield (
            f"{key}.max_staleness",
            f"{rollout.max_staleness} changes nothing: sync leaves no sample for a later step, "
            "unless oversampling is above 1",
        )


def _schedule_rules(
    key: str,
    optimizer: OptimizerSettings,
    loop: LoopSettings,
    updates_per_step: int = 1,
    loop_key: str | None = None,
) -> Found:
    updates = loop.steps * updates_per_step
    if optimizer.warmup_steps >= updates:
        yield (
            f"{key}.optimizer.warmup_steps",
            f"{optimizer.warmup_steps} should be less than the {updates} updates of "
            f"{loop_key or f'{key}.loop'}.steps = {loop.steps}, or the learning rate never arrives",
        )
