"""Rules of a policy's training: steps, samples, objective, rewards and stop rule."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from parallel.settings import MOST, EngineSettings, LayoutSettings, ModelSettings, OptimizerSettings
from pipeline.config.violations import hint
from stages.objectives.advantages.gae import GaeSettings
from stages.objectives.surrogate import ImportanceSettings
from stages.rewards.kinds.python import PythonReward
from stages.rewards.reward import RewardContext, RewardPoolSettings
from stages.settings import (
    DomainSettings,
    LoopSettings,
    MergeRolloutSettings,
    PolicySettings,
    RolloutSettings,
    RunSettings,
    SamplingSettings,
)

Found = Iterator[tuple[str, str]]


def policy_rules(
    key: str,
    policy: PolicySettings,
    rewards: Collection[str],
    layout: LayoutSettings | None,
    engine: EngineSettings | None,
) -> Found:
    """Yield the broken rules of a policy trained on the named rewards, as (dotted key, message)."""
    updates = policy.updates_per_rollout
    yield from schedule_rules(key, policy.optimizer, policy.loop, updates)
    yield from sampling_rules(f"{key}.sampling", policy.sampling, layout, engine, updates)
    for field, message in policy.objective.violations(policy.sampling.group_size):
        yield f"{key}.objective.{field}", message
    yield from _stop_rules(f"{key}.stop", policy, rewards)
    yield from _group_rules(key, policy)
    if policy.sampling.prompts_per_step % updates:
        yield (
            f"{key}.updates_per_rollout",
            f"{updates} does not divide {key}.sampling.prompts_per_step = "
            f"{policy.sampling.prompts_per_step}; every update takes the same number of groups",
        )


def policy_cautions(settings: RunSettings) -> Iterator[str]:
    """Yield a line for each valid setting of a policy with an effect that is easy to miss."""
    policies = {f"domains.{name}": domain for name, domain in settings.domains.items()}
    precision = settings.model.precision
    for key, policy in {**policies, "mixed": settings.mixed}.items():
        if policy is None or not isinstance(policy.objective.correction, ImportanceSettings):
            continue
        correction, replay = policy.objective.correction, policy.routing.replay
        if correction.samples == "auto" and correction.applies_to_all(replay, precision):
            why = f"model.precision is {precision}"
            if replay == "none":
                why = "routing.replay is none"
            yield (
                f"{key}.objective.correction: all samples are weighted by pi_old / mu, not only "
                f"stale ones, since {why}; set samples: stale to weight only those"
            )


def _group_rules(key: str, policy: PolicySettings) -> Found:
    """Check the group size: only `gae` and `reinforce_pp` have a baseline outside the group."""
    alone = policy.sampling.group_size < 2
    advantage = policy.objective.advantage
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
    steps, warmup = policy.loop.steps, advantage.critic.warmup_steps
    if warmup >= steps:
        yield (
            f"{key}.objective.advantage.critic.warmup_steps",
            f"{warmup} must be less than {key}.loop.steps = {steps}, or the policy never trains",
        )
    yield from schedule_rules(
        f"{key}.objective.advantage.critic",
        advantage.critic.optimizer,
        policy.loop,
        policy.updates_per_rollout,
        loop_key=f"{key}.loop",
    )


def _stop_rules(key: str, policy: PolicySettings, rewards: Collection[str]) -> Found:
    if policy.stop is None:
        return
    reward = policy.stop.metric.removeprefix("reward/")
    if "/" in policy.stop.metric and reward not in rewards:
        yield f"{key}.metric", f"no such reward: {reward}; {hint(reward, rewards)}"
    if policy.stop.window > policy.loop.steps:
        yield (
            f"{key}.window",
            f"{policy.stop.window} is more than loop.steps = {policy.loop.steps}; only a full "
            "window ends the stage",
        )


def sampling_rules(
    key: str,
    sampling: SamplingSettings,
    layout: LayoutSettings | None,
    engine: EngineSettings | None,
    updates: int = 1,
) -> Found:
    if engine and sampling.max_response_tokens >= engine.max_model_tokens:
        yield (
            f"{key}.max_response_tokens",
            f"{sampling.max_response_tokens} leaves no room for a prompt; it must be less than "
            f"engine.max_model_tokens = {engine.max_model_tokens}",
        )
    drawn = sampling.prompts_per_step * sampling.group_size
    if drawn > MOST:
        yield (
            f"{key}.prompts_per_step",
            f"{sampling.prompts_per_step} prompts x {sampling.group_size} samples are {drawn} per "
            f"step; at most {MOST} are allowed",
        )
    samples = drawn // updates
    if layout and samples < layout.data:
        yield (
            f"{key}.prompts_per_step",
            f"{sampling.prompts_per_step} prompts x {sampling.group_size} samples in {updates} "
            f"updates are {samples} per update, {too_few(layout)}",
        )


def vocabulary_rules(key: str, sampling: SamplingSettings, model: ModelSettings | None) -> Found:
    if model and sampling.top_k > model.vocabulary_size:
        yield (
            f"{key}.top_k",
            f"{sampling.top_k} is more than model.vocabulary_size = {model.vocabulary_size}; use 0 "
            "for all tokens",
        )


def rollout_rules(key: str, rollout: MergeRolloutSettings, deterministic: bool) -> Found:
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


def schedule_rules(
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
            f"{optimizer.warmup_steps} must be less than the {updates} updates of "
            f"{loop_key or f'{key}.loop'}.steps = {loop.steps}, or the warm-up never ends",
        )


def reward_rules(key: str, domain: DomainSettings, pool: RewardPoolSettings | None) -> Found:
    """Yield the broken rules of a domain's rewards at `key`, as (dotted key, message)."""
    if not any(reward.weight for reward in domain.rewards.values()):
        yield key, "every weight is 0, so that all responses score the same; give one a weight"
    for name, reward in domain.rewards.items():
        own = f"{key}.{name}"
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            yield (
                own,
                "a reward's name must be letters, digits, _ or -, since it names a metric",
            )
        longest = domain.sampling.max_response_tokens
        yield from reward.rules(RewardContext(own, domain.prompts.source, longest, pool))


def step_rules(key: str, domain: DomainSettings, objective: str) -> Found:
    """Check that the rewards at `key` score steps, as advantage `process` requires."""
    own = [reward for reward in domain.rewards.values() if isinstance(reward, PythonReward)]
    if not own:
        yield (
            key,
            f"{objective}.advantage process requires step rewards, which only kind: python has",
        )
    elif all(each.unfinished == "zero" or each.timed_out is not None for each in own):
        yield (
            key,
            f"{objective}.advantage process requires step rewards, and a truncated or timed-out "
            "response has none; set unfinished: score and timed_out: null in the reward with steps",
        )


def too_few(layout: LayoutSettings) -> str:
    """Return the end of a message about a number that is split over the data-parallel ranks."""
    return f"less than the {layout.data} data-parallel ranks of layout; each needs at least one"
