"""Rules between blocks: what no block's own schema can say.

A rule runs as soon as the blocks it reads are valid by themselves, so that its violations are
listed together with those of the other blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import ValidationError

from parallel.families import FAMILIES, architecture, family_violations
from parallel.memory import CACHE_BLOCK, cached_tokens
from parallel.settings import (
    EngineSettings,
    LayoutSettings,
    ModelSettings,
    Settings,
    layout_violations,
)
from parallel.weights.needs import engine_violations
from pipeline.config.cores import placement_fault
from pipeline.config.data_files import (
    data_rules,
    demonstration_rules,
    missing_data,
    missing_tokenizer,
    option_rules,
    tokenizer_rules,
)
from pipeline.config.gate_rules import gate_rules
from pipeline.config.graph_rules import graph_rules, has_cold_start
from pipeline.config.policy_rules import (
    policy_rules,
    rollout_rules,
    sampling_rules,
    schedule_rules,
    too_few,
    vocabulary_rules,
)
from pipeline.config.reward_functions import reward_needs, reward_rules, step_rules
from pipeline.config.violations import hint
from pipeline.config.weights_files import weights_rules
from stages.rewards.settings import RewardPoolSettings
from stages.settings import (
    ColdStartSettings,
    DomainSettings,
    EvaluationSettings,
    MergeSettings,
    MixedSettings,
    PolicySettings,
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
        yield from schedule_rules("cold_start", cold_start.optimizer, cold_start.loop)
    for name, domain in domains.items():
        yield from _name_rules(name)
        if domain:
            yield from policy_rules(f"domains.{name}", domain, domain.rewards, layout, engine)
            yield from vocabulary_rules(f"domains.{name}.sampling", domain.sampling, model)
            yield from reward_rules(f"domains.{name}.rewards", domain, pool)
            yield from _step_rules(name, domain, (f"domains.{name}", domain), ("mixed", mixed))
            yield from data_rules(f"domains.{name}", domain, model, engine, (merge, mixed))
            if demonstrated:
                yield from demonstration_rules(f"domains.{name}", domain, model)
            yield from rollout_rules(f"domains.{name}.rollout", domain.rollout, deterministic)
    yield from graph_rules(run, domains)
    yield from gate_rules(domains, merge, layout)
    valid = {name: domain for name, domain in domains.items() if domain}
    if mixed:
        rewards = {name for domain in valid.values() for name in domain.rewards}
        yield from policy_rules("mixed", mixed, rewards, layout, engine)
        yield from vocabulary_rules("mixed.sampling", mixed.sampling, model)
        yield from rollout_rules("mixed.rollout", mixed.rollout, deterministic)
    if valid:
        yield from _split_rules(valid)
    if demonstrated and layout and valid and len(valid) == len(domains):
        yield from _demonstration_rules(valid, layout)
    if merge:
        yield from schedule_rules("merge", merge.optimizer, merge.loop)
        yield from sampling_rules("merge.sampling", merge.sampling, layout, engine)
        yield from vocabulary_rules("merge.sampling", merge.sampling, model)
        yield from rollout_rules("merge.rollout", merge.rollout, deterministic)
        for name in merge.domain_weights.keys() - domains.keys():
            yield (
                f"merge.domain_weights.{name}",
                f"there is no domain {name}; {hint(name, domains)}",
            )
    if evaluation and layout:
        yield from evaluation_rules(evaluation, layout)


def evaluation_rules(evaluation: EvaluationSettings, layout: LayoutSettings) -> Found:
    """What an evaluation cannot do, as (dotted key, message)."""
    if evaluation.problems < layout.data:
        yield "evaluation.problems", f"{evaluation.problems} is {too_few(layout)}"
    if evaluation.samples_per_problem > 1 and evaluation.temperature == 0:
        yield (
            "evaluation.samples_per_problem",
            f"{evaluation.samples_per_problem}: a greedy answer is always the same; have one answer"
            " to a problem, or a temperature above 0",
        )


def surroundings(run: dict[str, Any], domains: Domains) -> Found:
    """What the stages need and do not find, as (dotted key, message).

    Such things may be gone, or not seen from here, when a run that they began is looked at.
    """
    model = run.get("model")
    yield from weights_rules(model)
    yield from missing_tokenizer(model)
    # A domain by itself, which has no model around it, is held to what it says.
    demonstrated = has_cold_start(run) or model is None
    for name, domain in domains.items():
        if domain:
            yield from missing_data(f"domains.{name}", domain, demonstrated)
            yield from option_rules(f"domains.{name}", domain)
            yield from reward_needs(f"domains.{name}.rewards", domain)
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
    domains = run.get("domains")
    if not isinstance(domains, dict):
        return {}
    return {name: _block(DomainSettings, given) for name, given in domains.items()}


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
            f"domains.{name}",
            "a domain's name is made of letters, digits, _ and -, 100 at most, since it names a"
            " folder",
        )


def _step_rules(
    name: str, domain: DomainSettings, *policies: tuple[str, PolicySettings | None]
) -> Found:
    """Those of the first of the policies, which learn from a domain, that compares steps."""
    for key, policy in policies:
        if policy and policy.objective.advantage.needs_step_rewards:
            yield from step_rules(f"domains.{name}.rewards", domain, f"{key}.objective")
            return


def _split_rules(domains: dict[str, DomainSettings]) -> Found:
    """Prompts are split by their text: with one fraction, two domains that share some agree."""
    first, *others = domains
    shared = domains[first].prompts.held_out_fraction
    for name in others:
        if (own := domains[name].prompts.held_out_fraction) != shared:
            yield (
                f"domains.{name}.prompts.held_out_fraction",
                f"{own} should be {shared}, as that of domains.{first}, or one domain could train "
                "on what another is evaluated on",
            )


def _demonstration_rules(domains: dict[str, DomainSettings], layout: LayoutSettings) -> Found:
    total = sum(domain.demonstrations.sequences_per_step for domain in domains.values())
    if total < layout.data:
        yield (
            "domains",
            f"all demonstrations.sequences_per_step together are {total}, {too_few(layout)}",
        )
