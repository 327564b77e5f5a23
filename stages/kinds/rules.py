"""Rules that several kinds share, of optimizers, rollouts and sizes against the run's layout.

A rule names a key by calling `at` with the key in the policy or block: the same block may be stated
in a stage or in its domain.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from parallel.errors import hint
from parallel.settings import MOST, LayoutSettings, OptimizerSettings
from stages.domains import (
    LoopSettings,
    PolicySettings,
    PromptRolloutSettings,
    RolloutSettings,
    SamplingSettings,
)
from stages.kinds.kind import RunBlocks, Violations
from stages.objectives.advantages.gae import GaeSettings

At = Callable[[str], str]


def under(block: str) -> At:
    """Return the keys of a block."""
    return lambda name: f"{block}.{name}"


def too_few(layout: LayoutSettings) -> str:
    """Return the end of a message about a number that is split over the data-parallel ranks."""
    return f"less than the {layout.data} data-parallel ranks of layout; each needs at least one"


def policy_rules(
    at: At, policy: PolicySettings, rewards: Collection[str], run: RunBlocks | None
) -> Violations:
    """Check a policy trained on the named rewards; outside a run, only on its own."""
    updates, steps = policy.updates_per_rollout, policy.loop.steps
    yield from warmup_rules(at, policy.optimizer, policy.loop, updates)
    yield from sampling_rules(at, policy.sampling, policy.rollout, run, updates)
    yield from objective_rules(at, policy)
    if policy.stop is not None:
        reward = policy.stop.metric.removeprefix("reward/")
        if "/" in policy.stop.metric and reward not in rewards:
            yield at("stop.metric"), f"no such reward: {reward}; {hint(reward, rewards)}"
        if policy.stop.window > steps:
            yield (
                at("stop.window"),
                f"{policy.stop.window} is more than loop.steps = {steps}; only a full window ends "
                "the stage",
            )
    if policy.sampling.prompts_per_step % updates:
        yield (
            at("updates_per_rollout"),
            f"{updates} does not divide {at('sampling.prompts_per_step')} = "
            f"{policy.sampling.prompts_per_step}; every update takes the same number of groups",
        )


def objective_rules(at: At, policy: PolicySettings) -> Violations:
    """Check the policy's objective, on its own and with how the policy samples."""
    for field, message in policy.objective.violations(policy.sampling.group_size):
        yield at(f"objective.{field}"), message
    yield from _group_rules(at, policy)


def _group_rules(at: At, policy: PolicySettings) -> Violations:
    """Check the group size: only `gae` and `reinforce_pp` have a baseline outside the group."""
    alone, advantage = policy.sampling.group_size < 2, policy.objective.advantage
    if alone and advantage.baseline == "group":
        yield (
            at("sampling.group_size"),
            "a group of one has no advantage: it is its own mean; use 2 or more, or advantage "
            "reinforce_pp or gae",
        )
        return
    rounds, by = policy.rollout.dynamic_sampling, policy.rollout.dynamic_sampling_by
    if rounds and by == "solved" and alone:
        yield (
            at("rollout.dynamic_sampling"),
            f"{rounds} replaces every prompt, since a group of one is all right or all wrong; use "
            "0",
        )
    # `mask_truncated` may leave a group without learned responses.
    always = advantage.zero_variance_teaches and not policy.objective.mask_truncated
    if rounds and by == "advantages" and always:
        yield (
            at("rollout.dynamic_sampling_by"),
            f"advantages replaces no prompt, since advantage {advantage.name} teaches from "
            "zero-variance groups too; use solved, or dynamic_sampling: 0",
        )
    if not isinstance(advantage, GaeSettings):
        return
    critic, steps, warmup = (
        "objective.advantage.critic",
        policy.loop.steps,
        advantage.critic.warmup_steps,
    )
    if warmup >= steps:
        never = (
            f"{warmup} must be less than {at('loop.steps')} = {steps}, or the policy never trains"
        )
        yield at(f"{critic}.warmup_steps"), never
    updates = policy.updates_per_rollout
    yield from warmup_rules(at, advantage.critic.optimizer, policy.loop, updates, f"{critic}.")


def warmup_rules(
    at: At, optimizer: OptimizerSettings, loop: LoopSettings, updates: int = 1, of: str = ""
) -> Violations:
    """Check the warm-up of the optimizer at `of`optimizer, with `updates` per step of the loop."""
    if optimizer.warmup_steps >= loop.steps * updates:
        yield (
            at(f"{of}optimizer.warmup_steps"),
            f"{optimizer.warmup_steps} must be less than the {loop.steps * updates} updates of "
            f"{at('loop.steps')} = {loop.steps}, or the warm-up never ends",
        )


def sampling_rules(
    at: At,
    sampling: SamplingSettings,
    rollout: PromptRolloutSettings,
    run: RunBlocks | None,
    updates: int = 1,
) -> Violations:
    """Check the rollouts of a step of `updates` updates; outside a run, only on their own."""
    prompts = at("sampling.prompts_per_step")
    responses = sampling.prompts_per_step * sampling.group_size
    product = f"{sampling.prompts_per_step} prompts x {sampling.group_size} samples"
    if run:
        yield from response_rules(at, sampling, run)
    if responses > MOST:
        yield prompts, f"{product} are {responses} per step; at most {MOST} are allowed"
    if run and (samples := responses // updates) < run.layout.data:
        few = f"{product} in {updates} updates are {samples} per update, {too_few(run.layout)}"
        yield prompts, few
    yield from _rollout_rules(at, rollout, bool(run and run.deterministic))


def response_rules(at: At, sampling: SamplingSettings, run: RunBlocks) -> Violations:
    """Check what is sampled against the engine and the model."""
    if sampling.max_response_tokens >= run.engine.max_model_tokens:
        yield (
            at("sampling.max_response_tokens"),
            f"{sampling.max_response_tokens} leaves no room for a prompt; it must be less than "
            f"engine.max_model_tokens = {run.engine.max_model_tokens}",
        )
    if sampling.top_k > run.model.vocabulary_size:
        yield (
            at("sampling.top_k"),
            f"{sampling.top_k} is more than model.vocabulary_size = {run.model.vocabulary_size}; "
            "use 0 for all tokens",
        )


def _rollout_rules(at: At, rollout: PromptRolloutSettings, deterministic: bool) -> Violations:
    oversampling = rollout.oversampling if isinstance(rollout, RolloutSettings) else 1.0
    steps, staleness = rollout.max_steps_ahead, rollout.max_staleness
    if deterministic and steps:
        yield (
            at("rollout.max_steps_ahead"),
            f"{steps} is not reproducible bit for bit, since weights change while sampling; "
            "use 0, or deterministic: false",
        )
    if deterministic and oversampling > 1:
        yield (
            at("rollout.oversampling"),
            f"{oversampling:g} takes the groups that finish first, which is not reproducible bit "
            "for bit; use 1, or deterministic: false",
        )
    if staleness is not None and steps:
        yield (
            at("rollout.max_staleness"),
            f"{staleness} is only read with max_steps_ahead: 0, and here {steps} is the maximum "
            f"policy lag; delete it, or set max_steps_ahead: {staleness}",
        )
    if staleness is not None and not steps and oversampling == 1:
        yield (
            at("rollout.max_staleness"),
            f"{staleness} has no effect: max_steps_ahead: 0 keeps no sample for a later step "
            "unless oversampling is above 1",
        )
    if rollout.sync_in_flight and not steps:
        yield (
            at("rollout.sync_in_flight"),
            "true has no effect: max_steps_ahead: 0 has no response in flight at a weight sync; "
            "use null, or 1 step ahead or more",
        )
    if rollout.sync_in_flight is False and steps > 1:
        yield (
            at("rollout.sync_in_flight"),
            f"false needs max_steps_ahead: 1, not {steps}: only one step's responses can be "
            "complete before each weight sync; use null, or 1 step ahead",
        )
