"""Rules between blocks, checked on settings that are valid by their schema."""

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
from stages.data.sources.settings import (
    FileDemonstrationSettings,
    FilePromptSettings,
    ReasoningGymPromptSettings,
)
from stages.kinds import COLD_START, EXPERT, settings_key
from stages.rewards.settings import RewardPoolSettings
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


def graph_rules(run: RunSettings) -> Found:
    """Yield every broken rule of a run's graph as (dotted key, message)."""
    yield from origin_rules(run.domains)
    if run.cold_start is None and run.model.initial_weights is None:
        yield (
            "cold_start",
            "null needs a model that can already answer: name one as model.initial_weights, or "
            "describe a cold start",
        )
    if run.rounds > 1 and run.merge is None:
        yield "rounds", f"{run.rounds} rounds need a merge, from which the next one grows"


def origin_rules(domains: Mapping[str, DomainSettings]) -> Found:
    """Yield every `from` of a domain that names no stage, or leads back to itself."""
    known = [COLD_START, *(f"{EXPERT}{name}" for name in domains)]
    origins = {f"{EXPERT}{name}": each.from_ for name, each in domains.items()}
    for name, origin in origins.items():
        key = f"{settings_key(name)}.from"
        if origin is not None and origin not in known:
            yield key, f"no such stage: {origin}; {hint(origin, known)}"
        elif circle := _circle(name, origins):
            yield key, f"grows out of itself: {' from '.join(circle)}"


def _circle(name: str, origins: Mapping[str, str | None]) -> list[str]:
    """The way from a stage back to itself, or nothing."""
    way, origin = [name], origins.get(name)
    while origin is not None and origin not in way:
        way.append(origin)
        origin = origins.get(origin)
    return [*way, name] if origin == name else []


def gate_rules(run: RunSettings) -> Found:
    """Yield every broken rule of a run's gates as (dotted key, message)."""
    gates = {f"domains.{name}.gate": each.gate for name, each in run.domains.items()}
    for key, gate in {**gates, "merge.gate": run.merge and run.merge.gate}.items():
        if gate and gate.problems < run.layout.data:
            yield (
                f"{key}.problems",
                f"{gate.problems} is less than the {run.layout.data} data-parallel ranks of layout,"
                " and each needs one",
            )
    for name, domain in run.domains.items():
        yield from bound_rules(f"domains.{name}", domain)
    namesake = run.domains.get("merge")
    if namesake and namesake.gate and run.merge and run.merge.gate:
        yield (
            "domains.merge",
            "its gate and that of the merge are both gates.merge; rename the domain",
        )


def bound_rules(key: str, domain: DomainSettings) -> Found:
    """Bounds of metrics that the expert never logs."""
    gate, kl, rollout = domain.gate, domain.objective.kl, domain.rollout
    if gate is None:
        return
    if gate.max_kl is not None and kl.coefficient == 0:
        yield (
            f"{key}.gate.max_kl",
            f"{gate.max_kl:g} bounds a metric that is not logged with "
            f"{key}.objective.kl.coefficient = 0; use null, or a coefficient above 0",
        )
    if gate.max_drift is not None and rollout.mode == "sync" and rollout.oversampling == 1:
        yield (
            f"{key}.gate.max_drift",
            f"{gate.max_drift:g} bounds a metric that is not logged with {key}.rollout.mode = sync "
            "and no oversampling, where no sample is old; use null",
        )
    if gate.min_router_agreement is not None and domain.routing.replay != "r3":
        yield (
            f"{key}.gate.min_router_agreement",
            f"{gate.min_router_agreement:g} bounds a metric that is not logged with "
            f"{key}.routing.replay = {domain.routing.replay}; use null, or r3",
        )
    if gate.max_router_movement is not None and not domain.objective.ratio.needs_router_shift:
        yield (
            f"{key}.gate.max_router_movement",
            f"{gate.max_router_movement:g} bounds a metric that is logged with "
            f"{key}.objective.ratio.name = rspo alone; use null",
        )


def tokenizer_rules(model: ModelSettings) -> Found:
    """A folder's tokenizer is loaded, and held to the model, by the stages that use it."""
    if model.tokenizer == CHARACTERS and model.vocabulary_size != TOKENIZER_SIZE:
        yield (
            "model.vocabulary_size",
            f"{model.vocabulary_size} should be {TOKENIZER_SIZE}, the number of ids of the "
            "tokenizer",
        )


def data_rules(
    key: str,
    domain: DomainSettings,
    model: ModelSettings | None,
    engine: EngineSettings | None,
    others: Iterable[MergeSettings | MixedSettings | None],
) -> Found:
    """What a domain's prompts ask of the other blocks; `others` sample them too."""
    prompts = domain.prompts
    if isinstance(prompts, ReasoningGymPromptSettings) and prompts.dataset not in FORMATS:
        yield f"{key}.prompts.dataset", f"unknown dataset; {hint(prompts.dataset, FORMATS)}"
    if engine and isinstance(prompts, FilePromptSettings) and prompts.max_prompt_tokens:
        samplings = [domain.sampling, *(other.sampling for other in others if other)]
        response = max(sampling.max_response_tokens for sampling in samplings)
        if prompts.max_prompt_tokens + response > engine.max_model_tokens:
            yield (
                f"{key}.prompts.max_prompt_tokens",
                f"{prompts.max_prompt_tokens} and a response of {response} tokens are more than "
                f"engine.max_model_tokens = {engine.max_model_tokens}",
            )


def demonstration_rules(key: str, domain: DomainSettings, model: ModelSettings | None) -> Found:
    """What a domain's demonstrations ask of its prompts and of the model, where a cold start learns
    from them."""
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
            "generated demonstrations need prompts of reasoning_gym, not of "
            f"{domain.prompts.source}; use jsonl or parquet, or cold_start: null in a run with "
            "model.initial_weights",
        )


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
