"""Rules between blocks of settings that are valid by their schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping

from pydantic import ValidationError

from parallel.families import FAMILIES, architecture, family_violations
from parallel.files import CHARACTERS
from parallel.memory import CACHE_BLOCK, cached_tokens
from parallel.settings import (
    TOKENIZER_SIZE,
    EngineSettings,
    LayoutSettings,
    ModelSettings,
    layout_violations,
)
from parallel.weights.needs import engine_violations
from pipeline.config.policy_rules import (
    policy_rules,
    reward_rules,
    rollout_rules,
    sampling_rules,
    schedule_rules,
    step_rules,
    too_few,
    vocabulary_rules,
)
from pipeline.config.violations import hint
from stages.data.formats import FORMATS
from stages.data.settings import (
    FileDemonstrationSettings,
    FilePromptSettings,
    ReasoningGymPromptSettings,
)
from stages.kinds import COLD_START, EXPERT, settings_key
from stages.rewards.reward import RewardPoolSettings
from stages.settings import (
    DomainSettings,
    EvaluationSettings,
    MergeSettings,
    MixedSettings,
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
                f"no such domain: {name}; {hint(name, run.domains)}",
            )
    yield from evaluation_rules(run.evaluation, layout)


def domain_violations(name: str, domain: DomainSettings, pool: RewardPoolSettings) -> Found:
    """Yield the broken rules of a domain outside a run, as (dotted key, message)."""
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
    """Yield the broken rules of an evaluation, as (dotted key, message)."""
    if evaluation.problems < layout.data:
        yield "evaluation.problems", f"{evaluation.problems} is {too_few(layout)}"
    if evaluation.samples_per_problem > 1 and evaluation.temperature == 0:
        yield (
            "evaluation.samples_per_problem",
            f"{evaluation.samples_per_problem} greedy answers to a problem are identical; use 1, "
            "or a temperature above 0",
        )


def graph_rules(run: RunSettings) -> Found:
    """Yield every broken rule of a run's graph as (dotted key, message)."""
    yield from origin_rules(run.domains)
    if run.cold_start is None and run.model.initial_weights is None:
        yield (
            "cold_start",
            "null requires model.initial_weights; name a checkpoint there, or configure a cold "
            "start",
        )
    if run.rounds > 1 and run.merge is None:
        yield "rounds", f"{run.rounds} rounds require a merge, which the next round starts from"


def origin_rules(domains: Mapping[str, DomainSettings]) -> Found:
    """Yield every `from` of a domain that names no stage, or is part of a cycle."""
    known = [COLD_START, *(f"{EXPERT}{name}" for name in domains)]
    origins = {f"{EXPERT}{name}": each.from_ for name, each in domains.items()}
    for name, origin in origins.items():
        key = f"{settings_key(name)}.from"
        if origin is not None and origin not in known:
            yield key, f"no such stage: {origin}; {hint(origin, known)}"
        elif cycle := _cycle(name, origins):
            yield key, f"dependency cycle: {' -> '.join(cycle)}"


def _cycle(name: str, origins: Mapping[str, str | None]) -> list[str]:
    """Return the path from a stage back to itself, or an empty list."""
    path, origin = [name], origins.get(name)
    while origin is not None and origin not in path:
        path.append(origin)
        origin = origins.get(origin)
    return [*path, name] if origin == name else []


def gate_rules(run: RunSettings) -> Found:
    """Yield every broken rule of a run's gates as (dotted key, message)."""
    gates = {f"domains.{name}.gate": each.gate for name, each in run.domains.items()}
    for key, gate in {**gates, "merge.gate": run.merge and run.merge.gate}.items():
        if gate and gate.problems < run.layout.data:
            yield f"{key}.problems", f"{gate.problems} is {too_few(run.layout)}"
    for name, domain in run.domains.items():
        yield from bound_rules(f"domains.{name}", domain)
    namesake = run.domains.get("merge")
    if namesake and namesake.gate and run.merge and run.merge.gate:
        yield (
            "domains.merge",
            "its gate and the merge's gate would both be gates.merge; rename the domain",
        )


def bound_rules(key: str, domain: DomainSettings) -> Found:
    """Yield the gate's limits on metrics that the domain never logs."""
    gate, kl, rollout = domain.gate, domain.objective.kl, domain.rollout
    if gate is None:
        return
    if gate.max_kl is not None and kl.coefficient == 0:
        yield (
            f"{key}.gate.max_kl",
            f"{gate.max_kl:g} limits a metric that is not logged with "
            f"{key}.objective.kl.coefficient = 0; use null, or a coefficient above 0",
        )
    if gate.max_drift is not None and rollout.mode == "sync" and rollout.oversampling == 1:
        yield (
            f"{key}.gate.max_drift",
            f"{gate.max_drift:g} limits a metric that is not logged with {key}.rollout.mode = sync "
            "and no oversampling, where no sample is stale; use null",
        )
    if gate.min_router_agreement is not None and domain.routing.replay != "r3":
        yield (
            f"{key}.gate.min_router_agreement",
            f"{gate.min_router_agreement:g} limits a metric that is not logged with "
            f"{key}.routing.replay = {domain.routing.replay}; use null, or r3",
        )
    if gate.max_router_movement is not None and not domain.objective.ratio.needs_router_shift:
        yield (
            f"{key}.gate.max_router_movement",
            f"{gate.max_router_movement:g} limits a metric that is only logged with "
            f"{key}.objective.ratio.name = rspo; use null",
        )


def tokenizer_rules(model: ModelSettings) -> Found:
    """Check the vocabulary of `characters`; stages check a tokenizer from a directory."""
    if model.tokenizer == CHARACTERS and model.vocabulary_size != TOKENIZER_SIZE:
        yield (
            "model.vocabulary_size",
            f"{model.vocabulary_size} must be {TOKENIZER_SIZE}, the number of token ids of "
            f"tokenizer: {CHARACTERS}",
        )


def data_rules(
    key: str,
    domain: DomainSettings,
    model: ModelSettings | None,
    engine: EngineSettings | None,
    others: Iterable[MergeSettings | MixedSettings | None],
) -> Found:
    """Check a domain's prompts against the other blocks; `others` sample the prompts too."""
    prompts = domain.prompts
    if isinstance(prompts, ReasoningGymPromptSettings) and prompts.dataset not in FORMATS:
        yield f"{key}.prompts.dataset", f"unknown dataset; {hint(prompts.dataset, FORMATS)}"
    if engine and isinstance(prompts, FilePromptSettings) and prompts.max_prompt_tokens:
        samplings = [domain.sampling, *(other.sampling for other in others if other)]
        response = max(sampling.max_response_tokens for sampling in samplings)
        if prompts.max_prompt_tokens + response > engine.max_model_tokens:
            yield (
                f"{key}.prompts.max_prompt_tokens",
                f"{prompts.max_prompt_tokens} prompt and {response} response tokens exceed "
                f"engine.max_model_tokens = {engine.max_model_tokens}",
            )


def demonstration_rules(key: str, domain: DomainSettings, model: ModelSettings | None) -> Found:
    """Check a cold start's demonstrations against the domain's prompts and the model."""
    demonstrations = domain.demonstrations
    if isinstance(demonstrations, FileDemonstrationSettings):
        longest = demonstrations.max_tokens
        if model and longest and longest > model.max_positions:
            yield (
                f"{key}.demonstrations.max_tokens",
                f"{longest} is more than model.max_positions = {model.max_positions}",
            )
    elif not isinstance(domain.prompts, ReasoningGymPromptSettings):
        yield (
            f"{key}.demonstrations.source",
            "generated demonstrations require prompts.source: reasoning_gym, not "
            f"{domain.prompts.source}; use jsonl or parquet, or cold_start: null with "
            "model.initial_weights",
        )


def _family_rules(model: ModelSettings, layout: LayoutSettings) -> Found:
    wrong = list(_architecture_violations(model))
    yield from wrong or family_violations(model, layout)


def _architecture_violations(model: ModelSettings) -> Found:
    try:
        architecture(model)
    except ValidationError as error:
        known = FAMILIES[model.family].further.model_fields
        for each in error.errors():
            key = ".".join(map(str, ("model.architecture", *each["loc"])))
            if each["type"] == "extra_forbidden" and len(each["loc"]) == 1:
                yield key, f"unknown key of {model.family}; {hint(str(each['loc'][0]), known)}"
            else:
                should = each["msg"].removeprefix("Input ")
                yield key, f"{should}, not {json.dumps(each['input'], default=str)}"


def _engine_rules(model: ModelSettings, engine: EngineSettings) -> Found:
    if engine.max_model_tokens > model.max_positions:
        yield (
            "engine.max_model_tokens",
            f"{engine.max_model_tokens} is more than model.max_positions = {model.max_positions}",
        )
    if any(_architecture_violations(model)):
        return
    yield from engine_violations(model, engine.tensor)
    room = cached_tokens(model, engine) // CACHE_BLOCK * CACHE_BLOCK - CACHE_BLOCK
    if room < engine.max_model_tokens:
        yield (
            "engine.kv_cache_mebibytes",
            f"{engine.kv_cache_mebibytes} MiB cache the keys and values of {max(room, 0)} tokens, "
            f"less than engine.max_model_tokens = {engine.max_model_tokens}",
        )


def _name_rules(name: str) -> Found:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", name):
        yield (
            f"domains.{name}",
            "a domain's name must be 1 to 100 letters, digits, _ or -, since it names a directory",
        )


def _step_rules(
    name: str, domain: DomainSettings, *policies: tuple[str, PolicySettings | None]
) -> Found:
    """Check the rewards for the first policy that learns from a domain's step rewards."""
    for key, policy in policies:
        if policy and policy.objective.advantage.needs_step_rewards:
            yield from step_rules(f"domains.{name}.rewards", domain, f"{key}.objective")
            return


def _split_rules(domains: dict[str, DomainSettings]) -> Found:
    """Require one fraction, since the split is by text and two domains may share prompts."""
    first, *others = domains
    shared = domains[first].prompts.held_out_fraction
    for name in others:
        if (own := domains[name].prompts.held_out_fraction) != shared:
            yield (
                f"domains.{name}.prompts.held_out_fraction",
                f"{own} must be {shared}, as in domains.{first}, or one domain could train on "
                "another's evaluation prompts",
            )


def _demonstration_rules(domains: dict[str, DomainSettings], layout: LayoutSettings) -> Found:
    total = sum(domain.demonstrations.sequences_per_step for domain in domains.values())
    if total < layout.data:
        yield (
            "domains",
            f"the sum of demonstrations.sequences_per_step is {total}, {too_few(layout)}",
        )
