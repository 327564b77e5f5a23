"""Rules between blocks, checked on settings that are valid by their schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from pydantic import ValidationError

from parallel.families import FAMILIES, architecture, family_violations
from parallel.memory import CACHE_BLOCK, cached_tokens
from parallel.settings import (
    EngineSettings,
    LayoutSettings,
    ModelSettings,
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
from pipeline.config.gate_rules import bound_rules, gate_rules
from pipeline.config.graph_rules import graph_rules, origin_rules
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
    DomainSettings,
    EvaluationSettings,
    PolicySettings,
    RunSettings,
)

Found = Iterator[tuple[str, str]]


def violations(run: RunSettings) -> Found:
    """Yield every broken rule of a run's settings as (dotted key, message)."""
    model, layout, engine, merge, mixed = run.model, run.layout, run.engine, run.merge, run.mixed
    yield from tokenizer_rules(model)
    yield from layout_violations(model, layout)
    yield from _family_rules(model, layout)
    yield from _engine_rules(model, engine)
    if run.cold_start:
        yield from schedule_rules("cold_start", run.cold_start.optimizer, run.cold_start.loop)
    for name, domain in run.domains.items():
        yield from _domain_rules(name, domain, run.rewards, run)
    yield from graph_rules(run)
    yield from gate_rules(run)
    if mixed:
        rewards = {name for domain in run.domains.values() for name in domain.rewards}
        yield from policy_rules("mixed", mixed, rewards, layout, engine)
        yield from vocabulary_rules("mixed.sampling", mixed.sampling, model)
        yield from rollout_rules("mixed.rollout", mixed.rollout, run.deterministic)
    yield from _split_rules(run.domains)
    if run.cold_start:
        yield from _demonstration_rules(run.domains, layout)
    if merge:
        yield from schedule_rules("merge", merge.optimizer, merge.loop)
        yield from sampling_rules("merge.sampling", merge.sampling, layout, engine)
        yield from vocabulary_rules("merge.sampling", merge.sampling, model)
        yield from rollout_rules("merge.rollout", merge.rollout, run.deterministic)
        for name in merge.domain_weights.keys() - run.domains.keys():
            yield (
                f"merge.domain_weights.{name}",
                f"there is no domain {name}; {hint(name, run.domains)}",
            )
    yield from evaluation_rules(run.evaluation, layout)


def domain_violations(name: str, domain: DomainSettings, pool: RewardPoolSettings) -> Found:
    """Yield the broken rules of a domain without a run, as (dotted key, message)."""
    yield from _domain_rules(name, domain, pool, None)
    yield from origin_rules({name: domain})
    yield from bound_rules(f"domains.{name}", domain)


def _domain_rules(
    name: str, domain: DomainSettings, pool: RewardPoolSettings, run: RunSettings | None
) -> Found:
    key = f"domains.{name}"
    model, layout, engine = (run.model, run.layout, run.engine) if run else (None, None, None)
    merge, mixed = (run.merge, run.mixed) if run else (None, None)
    yield from _name_rules(name)
    yield from policy_rules(key, domain, domain.rewards, layout, engine)
    yield from vocabulary_rules(f"{key}.sampling", domain.sampling, model)
    yield from reward_rules(f"{key}.rewards", domain, pool)
    yield from _step_rules(name, domain, (key, domain), ("mixed", mixed))
    yield from data_rules(key, domain, model, engine, (merge, mixed))
    if run and run.cold_start:
        yield from demonstration_rules(key, domain, model)
    yield from rollout_rules(f"{key}.rollout", domain.rollout, bool(run and run.deterministic))


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


def surroundings(run: RunSettings) -> Found:
    """Yield what the stages need and do not find here, as (dotted key, message).

    A run that has started is read without it: such things may be gone, or not visible from here.
    """
    yield from weights_rules(run.model)
    yield from missing_tokenizer(run.model)
    for name, domain in run.domains.items():
        yield from domain_surroundings(name, domain, demonstrated=run.cold_start is not None)
    if lack := placement_fault(run.engine):
        yield "engine.placement", lack


def domain_surroundings(name: str, domain: DomainSettings, *, demonstrated: bool = True) -> Found:
    """Yield what a domain needs and does not find here, as (dotted key, message)."""
    yield from missing_data(f"domains.{name}", domain, demonstrated)
    yield from option_rules(f"domains.{name}", domain)
    yield from reward_needs(f"domains.{name}.rewards", domain)


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
