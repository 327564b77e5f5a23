"""Rules between blocks of settings that are valid by their schema, block by block.

A block's rules on itself stand with it: `parallel.settings`, `stages.objectives.loss` and the
kinds of rewards. All yield (dotted key, message).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping

from pydantic import ValidationError

from parallel.families import FAMILIES, architecture, family_violations
from parallel.settings import (
    CHARACTERS,
    MOST,
    TOKENIZER_SIZE,
    EngineSettings,
    LayoutSettings,
    ModelSettings,
    OptimizerSettings,
    layout_violations,
    optimizer_violations,
)
from pipeline.config.engine_rules import engine_rules, quantized_rollout_rules
from pipeline.text import hint
from stages.data.reasoning_gym import FORMATS
from stages.data.settings import (
    FileDemonstrationSettings,
    FilePromptSettings,
    ReasoningGymPromptSettings,
)
from stages.kinds import COLD_START, EXPERT, settings_key
from stages.objectives.advantages.gae import GaeSettings
from stages.objectives.surrogate import ImportanceSettings
from stages.rewards.kinds.python import PythonReward
from stages.rewards.reward import RewardContext, RewardPoolSettings
from stages.settings import (
    DomainSettings,
    EvaluationSettings,
    LoopSettings,
    MergeRolloutSettings,
    MergeSettings,
    PolicySettings,
    RolloutSettings,
    RunSettings,
)

Found = Iterator[tuple[str, str]]


def violations(run: RunSettings) -> Found:
    """Yield every broken rule of a run's settings."""
    yield from _model_rules(run.model, run.layout)
    yield from _engine_rules(run.model, run.engine)
    yield from quantized_rollout_rules(run)
    for key, optimizer in _optimizers(run):
        for field, message in optimizer_violations(optimizer, run.model, run.layout):
            yield f"{key}.{field}", message
    if run.cold_start:
        yield from _cold_start_rules(run)
    elif run.model.initial_weights is None:
        yield (
            "cold_start",
            "null requires model.initial_weights; name a checkpoint there, or configure a cold "
            "start",
        )
    for name, domain in run.domains.items():
        yield from _domain_rules(name, domain, run.rewards, run)
    yield from _split_rules(run.domains)
    yield from _origin_rules(run.domains)
    if run.mixed:
        rewards = {name for domain in run.domains.values() for name in domain.rewards}
        yield from _policy_rules("mixed", run.mixed, rewards, run)
    if run.merge:
        yield from _merge_rules(run.merge, run)
    elif run.rounds > 1:
        yield "rounds", f"{run.rounds} rounds require a merge, which the next round starts from"
    yield from evaluation_rules(run.evaluation, run.layout)


def domain_violations(name: str, domain: DomainSettings, pool: RewardPoolSettings) -> Found:
    """Yield the broken rules of a domain outside a run."""
    yield from _domain_rules(name, domain, pool, None)
    yield from _origin_rules({name: domain})


def policy_cautions(settings: RunSettings) -> Iterator[str]:
    """Yield a line for each valid setting of a policy with an effect that is easy to miss."""
    policies = {f"domains.{name}": domain for name, domain in settings.domains.items()}
    precision = settings.model.precision
    for key, policy in {**policies, "mixed": settings.mixed}.items():
        if policy is None or not isinstance(policy.objective.correction, ImportanceSettings):
            continue
        correction, replay = policy.objective.correction, policy.routing.replay
        if correction.samples == "auto" and correction.applies_to_all(replay, precision):
            why = (
                "routing.replay is none" if replay == "none" else f"model.precision is {precision}"
            )
            yield (
                f"{key}.objective.correction: all samples are weighted by pi_old / mu, not only "
                f"stale ones, since {why}; set samples: stale to weight only those"
            )


# Model, layout and engine.


def _model_rules(model: ModelSettings, layout: LayoutSettings) -> Found:
    # Stages check a tokenizer from a directory.
    if model.tokenizer == CHARACTERS and model.vocabulary_size != TOKENIZER_SIZE:
        yield (
            "model.vocabulary_size",
            f"{model.vocabulary_size} must be {TOKENIZER_SIZE}, the number of token ids of "
            f"tokenizer: {CHARACTERS}",
        )
    yield from layout_violations(model, layout)
    yield from list(_architecture_rules(model)) or family_violations(model, layout)


def _architecture_rules(model: ModelSettings) -> Found:
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
    longest = engine.max_model_tokens
    if longest > model.max_positions:
        more = f"{longest} is more than model.max_positions = {model.max_positions}"
        yield "engine.max_model_tokens", more
    if any(_architecture_rules(model)):
        return
    yield from engine_rules(model, engine)


# Training: the cold start, every policy, the merge.


def _cold_start_rules(run: RunSettings) -> Found:
    assert run.cold_start
    yield from _warmup_rules("cold_start", run.cold_start.optimizer, run.cold_start.loop)
    total = sum(each.demonstrations.sequences_per_step for each in run.domains.values())
    if total < run.layout.data:
        few = f"the sum of demonstrations.sequences_per_step is {total}, {_too_few(run.layout)}"
        yield "domains", few


def _merge_rules(merge: MergeSettings, run: RunSettings) -> Found:
    yield from _warmup_rules("merge", merge.optimizer, merge.loop)
    yield from _sampling_rules("merge", merge, run)
    for name in merge.domain_weights.keys() - run.domains.keys():
        unknown = f"no such domain: {name}; {hint(name, run.domains)}"
        yield f"merge.domain_weights.{name}", unknown
    if merge.gate and merge.gate.problems < run.layout.data:
        yield "merge.gate.problems", f"{merge.gate.problems} is {_too_few(run.layout)}"
    if merge.gate and "merge" in run.domains and run.domains["merge"].gate:
        both = "its gate and the merge's gate would both be gates.merge; rename the domain"
        yield "domains.merge", both


def _policy_rules(
    key: str, policy: PolicySettings, rewards: Collection[str], run: RunSettings | None
) -> Found:
    """Yield the broken rules of a policy trained on the named rewards."""
    updates, steps = policy.updates_per_rollout, policy.loop.steps
    yield from _warmup_rules(key, policy.optimizer, policy.loop, updates)
    yield from _sampling_rules(key, policy, run, updates)
    for field, message in policy.objective.violations(policy.sampling.group_size):
        yield f"{key}.objective.{field}", message
    if policy.stop is not None:
        reward = policy.stop.metric.removeprefix("reward/")
        if "/" in policy.stop.metric and reward not in rewards:
            yield f"{key}.stop.metric", f"no such reward: {reward}; {hint(reward, rewards)}"
        if policy.stop.window > steps:
            yield (
                f"{key}.stop.window",
                f"{policy.stop.window} is more than loop.steps = {steps}; only a full window ends "
                "the stage",
            )
    yield from _group_rules(key, policy)
    if policy.sampling.prompts_per_step % updates:
        yield (
            f"{key}.updates_per_rollout",
            f"{updates} does not divide {key}.sampling.prompts_per_step = "
            f"{policy.sampling.prompts_per_step}; every update takes the same number of groups",
        )


def _group_rules(key: str, policy: PolicySettings) -> Found:
    """Check the group size: only `gae` and `reinforce_pp` have a baseline outside the group."""
    alone, advantage = policy.sampling.group_size < 2, policy.objective.advantage
    if alone and advantage.baseline == "group":
        yield (
            f"{key}.sampling.group_size",
            "a group of one has no advantage: it is its own mean; use 2 or more, or advantage "
            "reinforce_pp or gae",
        )
        return
    if alone and policy.rollout.dynamic_sampling:
        yield (
            f"{key}.rollout.dynamic_sampling",
            f"{policy.rollout.dynamic_sampling} replaces every prompt, since a group of one has no "
            "variance; use 0",
        )
    if not isinstance(advantage, GaeSettings):
        return
    critic, steps, warmup = (
        f"{key}.objective.advantage.critic",
        policy.loop.steps,
        advantage.critic.warmup_steps,
    )
    if warmup >= steps:
        never = f"{warmup} must be less than {key}.loop.steps = {steps}, or the policy never trains"
        yield f"{critic}.warmup_steps", never
    updates = policy.updates_per_rollout
    yield from _warmup_rules(key, advantage.critic.optimizer, policy.loop, updates, critic)


def _optimizers(run: RunSettings) -> Iterator[tuple[str, OptimizerSettings]]:
    """Yield the key and the settings of every optimizer of a run."""
    blocks = {
        "cold_start": run.cold_start,
        **{f"domains.{name}": domain for name, domain in run.domains.items()},
        "mixed": run.mixed,
        "merge": run.merge,
    }
    for key, block in blocks.items():
        if block is None:
            continue
        yield f"{key}.optimizer", block.optimizer
        if isinstance(block, PolicySettings) and isinstance(
            advantage := block.objective.advantage, GaeSettings
        ):
            yield f"{key}.objective.advantage.critic.optimizer", advantage.critic.optimizer


def _warmup_rules(
    block: str, optimizer: OptimizerSettings, loop: LoopSettings, updates: int = 1, key: str = ""
) -> Found:
    """Check the warm-up of `key`'s optimizer, of the block by default, with updates per step."""
    if optimizer.warmup_steps >= loop.steps * updates:
        yield (
            f"{key or block}.optimizer.warmup_steps",
            f"{optimizer.warmup_steps} must be less than the {loop.steps * updates} updates of "
            f"{block}.loop.steps = {loop.steps}, or the warm-up never ends",
        )


def _sampling_rules(
    key: str, block: PolicySettings | MergeSettings, run: RunSettings | None, updates: int = 1
) -> Found:
    sampling, prompts = block.sampling, f"{key}.sampling.prompts_per_step"
    drawn = sampling.prompts_per_step * sampling.group_size
    product = f"{sampling.prompts_per_step} prompts x {sampling.group_size} samples"
    if run and sampling.max_response_tokens >= run.engine.max_model_tokens:
        yield (
            f"{key}.sampling.max_response_tokens",
            f"{sampling.max_response_tokens} leaves no room for a prompt; it must be less than "
            f"engine.max_model_tokens = {run.engine.max_model_tokens}",
        )
    if drawn > MOST:
        yield prompts, f"{product} are {drawn} per step; at most {MOST} are allowed"
    if run and (samples := drawn // updates) < run.layout.data:
        few = f"{product} in {updates} updates are {samples} per update, {_too_few(run.layout)}"
        yield prompts, few
    if run and sampling.top_k > run.model.vocabulary_size:
        yield (
            f"{key}.sampling.top_k",
            f"{sampling.top_k} is more than model.vocabulary_size = {run.model.vocabulary_size}; "
            "use 0 for all tokens",
        )
    yield from _rollout_rules(f"{key}.rollout", block.rollout, bool(run and run.deterministic))


def _rollout_rules(key: str, rollout: MergeRolloutSettings, deterministic: bool) -> Found:
    oversampling = rollout.oversampling if isinstance(rollout, RolloutSettings) else 1.0
    if deterministic and rollout.mode != "sync":
        yield (
            f"{key}.mode",
            f"{rollout.mode} is not reproducible bit for bit, since weights change while sampling; "
            "use sync, or deterministic: false",
        )
    if deterministic and oversampling > 1:
        yield (
            f"{key}.oversampling",
            f"{oversampling:g} takes the groups that finish first, which is not reproducible bit "
            "for bit; use 1, or deterministic: false",
        )
    if rollout.max_staleness > 1 and rollout.mode == "overlap":
        yield (
            f"{key}.max_staleness",
            f"{rollout.max_staleness} must be 1: overlap samples each step with the previous "
            "weights; use async for a larger policy lag",
        )
    if rollout.max_staleness > 1 and rollout.mode == "sync" and oversampling == 1:
        yield (
            f"{key}.max_staleness",
            f"{rollout.max_staleness} has no effect: sync keeps no sample for a later step unless "
            "oversampling is above 1",
        )


# Domains.


def _domain_rules(
    name: str, domain: DomainSettings, pool: RewardPoolSettings, run: RunSettings | None
) -> Found:
    key, gate = f"domains.{name}", domain.gate
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", name):
        yield (
            key,
            "a domain's name must be 1 to 100 letters, digits, _ or -, since it names a directory",
        )
    yield from _policy_rules(key, domain, domain.rewards, run)
    yield from _reward_rules(f"{key}.rewards", domain, pool)
    for block, policy in ((key, domain), ("mixed", run and run.mixed)):
        if policy and policy.objective.advantage.needs_step_rewards:
            yield from _step_rules(f"{key}.rewards", domain, f"{block}.objective")
            break  # the same rewards: once is enough
    yield from _prompt_rules(key, domain, run)
    if run and run.cold_start:
        yield from _demonstration_rules(f"{key}.demonstrations", domain, run.model)
    if gate and run and gate.problems < run.layout.data:
        yield f"{key}.gate.problems", f"{gate.problems} is {_too_few(run.layout)}"
    yield from _bound_rules(key, domain)


def _prompt_rules(key: str, domain: DomainSettings, run: RunSettings | None) -> Found:
    """Check a domain's prompts against all that sample them."""
    prompts = domain.prompts
    if isinstance(prompts, ReasoningGymPromptSettings) and prompts.dataset not in FORMATS:
        yield (
            f"{key}.prompts.dataset",
            f"no such dataset: {prompts.dataset}; {hint(prompts.dataset, FORMATS)}",
        )
    if run and isinstance(prompts, FilePromptSettings) and prompts.max_prompt_tokens:
        blocks = [block for block in (domain, run.merge, run.mixed) if block]
        response = max(block.sampling.max_response_tokens for block in blocks)
        if prompts.max_prompt_tokens + response > run.engine.max_model_tokens:
            yield (
                f"{key}.prompts.max_prompt_tokens",
                f"{prompts.max_prompt_tokens} prompt and {response} response tokens exceed "
                f"engine.max_model_tokens = {run.engine.max_model_tokens}",
            )


def _demonstration_rules(key: str, domain: DomainSettings, model: ModelSettings) -> Found:
    """Check a cold start's demonstrations against the domain's prompts and the model."""
    demonstrations, most = domain.demonstrations, model.max_positions
    if isinstance(demonstrations, FileDemonstrationSettings):
        if (longest := demonstrations.max_tokens) and longest > most:
            yield f"{key}.max_tokens", f"{longest} is more than model.max_positions = {most}"
    elif not isinstance(domain.prompts, ReasoningGymPromptSettings):
        yield (
            f"{key}.source",
            "generated demonstrations require prompts.source: reasoning_gym, not "
            f"{domain.prompts.source}; use jsonl or parquet, or cold_start: null with "
            "model.initial_weights",
        )


def _reward_rules(key: str, domain: DomainSettings, pool: RewardPoolSettings) -> Found:
    if not any(reward.weight for reward in domain.rewards.values()):
        yield key, "every weight is 0, so that all responses score the same; give one a weight"
    for name, reward in domain.rewards.items():
        own, longest = f"{key}.{name}", domain.sampling.max_response_tokens
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            yield own, "a reward's name must be letters, digits, _ or -, since it names a metric"
        yield from reward.rules(RewardContext(own, domain.prompts.source, longest, pool))


def _step_rules(key: str, domain: DomainSettings, objective: str) -> Found:
    """Check that the rewards at `key` score steps, as advantage `process` requires."""
    own = [reward for reward in domain.rewards.values() if isinstance(reward, PythonReward)]
    required = f"{objective}.advantage process requires step rewards"
    if not own:
        yield key, f"{required}, which only kind: python has"
    elif all(each.unfinished == "zero" or each.timed_out is not None for each in own):
        yield (
            key,
            f"{required}, and a truncated or timed-out response has none; set unfinished: score "
            "and timed_out: null in the reward with steps",
        )


def _bound_rules(key: str, domain: DomainSettings) -> Found:
    """Yield the gate's limits on metrics that the domain never logs."""
    gate, rollout, replay = domain.gate, domain.rollout, domain.routing.replay
    if gate is None:
        return
    for name, never, when, instead in (
        (
            "max_kl",
            domain.objective.kl.coefficient == 0,
            f"not logged with {key}.objective.kl.coefficient = 0",
            "or a coefficient above 0",
        ),
        (
            "max_drift",
            rollout.mode == "sync" and rollout.oversampling == 1,
            f"not logged with {key}.rollout.mode = sync and no oversampling, where no sample is "
            "stale",
            "",
        ),
        (
            "min_router_agreement",
            replay != "r3",
            f"not logged with {key}.routing.replay = {replay}",
            "or r3",
        ),
        (
            "max_router_movement",
            not domain.objective.ratio.needs_router_shift,
            f"only logged with {key}.objective.ratio.name = rspo",
            "",
        ),
    ):
        if never and (bound := getattr(gate, name)) is not None:
            use = ", ".join(filter(None, ("use null", instead)))
            yield f"{key}.gate.{name}", f"{bound:g} limits a metric that is {when}; {use}"


def _split_rules(domains: Mapping[str, DomainSettings]) -> Found:
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


def _origin_rules(domains: Mapping[str, DomainSettings]) -> Found:
    """Yield every `from` of a domain that names no stage, or is part of a cycle."""
    known = [COLD_START, *(f"{EXPERT}{name}" for name in domains)]
    origins = {f"{EXPERT}{name}": each.from_ for name, each in domains.items()}
    for name, origin in origins.items():
        key, path, at = f"{settings_key(name)}.from", [name], origin
        while at is not None and at not in path:
            path.append(at)
            at = origins.get(at)
        if origin is not None and origin not in known:
            yield key, f"no such stage: {origin}; {hint(origin, known)}"
        elif at == name:
            yield key, f"dependency cycle: {' -> '.join([*path, name])}"


# The evaluation, which `braid evaluate` overrides.


def evaluation_rules(evaluation: EvaluationSettings, layout: LayoutSettings) -> Found:
    """Yield the broken rules of an evaluation."""
    if evaluation.problems < layout.data:
        yield "evaluation.problems", f"{evaluation.problems} is {_too_few(layout)}"
    if (samples := evaluation.samples_per_problem) > 1 and evaluation.temperature == 0:
        yield (
            "evaluation.samples_per_problem",
            f"{samples} greedy answers to a problem are identical; use 1, or a temperature above 0",
        )


def _too_few(layout: LayoutSettings) -> str:
    """Return the end of a message about a number that is split over the data-parallel ranks."""
    return f"less than the {layout.data} data-parallel ranks of layout; each needs at least one"
