"""Rules about how a policy is trained: its steps, its samples, its objective and when it stops."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from parallel.settings import MOST, EngineSettings, LayoutSettings, ModelSettings, OptimizerSettings
from pipeline.config.violations import hint
from stages.objectives.advantages.gae import GaeSettings
from stages.objectives.correction import ImportanceSettings
from stages.rewards.kinds.python import PythonReward
from stages.rewards.settings import RewardPoolSettings
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
    """Those of a policy that learns from rewards of these names."""
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
            f"{policy.sampling.prompts_per_step}, and every update takes as many whole groups",
        )


def policy_cautions(settings: RunSettings) -> Iterator[str]:
    """What a person should know of how policies are trained, a line each."""
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
                f"{key}.objective.correction: all samples are weighed by pi_old / mu, not only "
                f"stale ones, since {why}; samples: stale weighs those alone"
            )


def _group_rules(key: str, policy: PolicySettings) -> Found:
    """A critic compares with its values, `reinforce_pp` with the batch, all else within a group."""
    alone = policy.sampling.group_size < 2
    advantage = policy.objective.advantage
    if alone and advantage.baseline == "group":
        yield (
            f"{key}.sampling.group_size",
            "a group of one has no advantage, since it is its own mean; use 2 or more, or the "
            "advantage reinforce_pp or gae",
        )
        return
    if alone and policy.rollout.dynamic_sampling:
        yield (
            f"{key}.rollout.dynamic_sampling",
            f"{policy.rollout.dynamic_sampling} replaces every prompt, since the samples of a group"
            " of one all earn the same; use 0",
        )
    if not isinstance(advantage, GaeSettings):
        return
    steps, warmup = policy.loop.steps, advantage.critic.warmup_steps
    if warmup >= steps:
        yield (
            f"{key}.objective.advantage.critic.warmup_steps",
            f"{warmup} should be less than {key}.loop.steps = {steps}, or the policy never learns",
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
        yield f"{key}.metric", f"there is no reward {reward}; {hint(reward, rewards)}"
    if policy.stop.window > policy.loop.steps:
        yield (
            f"{key}.window",
            f"{policy.stop.window} is more than loop.steps = {policy.loop.steps}, and only a full "
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
            f"updates make {samples} an update, {too_few(layout)}",
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
            f"{optimizer.warmup_steps} should be less than the {updates} updates of "
            f"{loop_key or f'{key}.loop'}.steps = {loop.steps}, or the learning rate never arrives",
        )


def reward_rules(key: str, domain: DomainSettings, pool: RewardPoolSettings | None) -> Found:
    """Every broken rule of a domain's rewards, which stand at `key`, as (dotted key, message)."""
    if not any(reward.weight for reward in domain.rewards.values()):
        yield key, "every weight is 0, so that no response is better than another"
    for name, reward in domain.rewards.items():
        own = f"{key}.{name}"
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            yield (
                own,
                "a reward's name is made of letters, digits, _ and -, since it names a metric",
            )
        longest = domain.sampling.max_response_tokens
        yield from reward.rules(own, domain.prompts.source, longest, pool)


def step_rules(key: str, domain: DomainSettings, objective: str) -> Found:
    """What the advantage `process` of an objective asks of the rewards at `key`."""
    own = [reward for reward in domain.rewards.values() if isinstance(reward, PythonReward)]
    if not own:
        yield key, f"{objective}.advantage process compares steps, which only kind: python judges"
    elif all(each.unfinished == "zero" or each.timed_out is not None for each in own):
        yield (
            key,
            f"{objective}.advantage process compares steps, and a response that was cut off or took"
            " too long to judge has none: give the reward that judges them unfinished: score and"
            " timed_out: null",
        )


def too_few(layout: LayoutSettings) -> str:
    """The end of a message about a number that every rank takes its part of."""
    return f"less than the {layout.data} data-parallel ranks of layout, and each needs one"
