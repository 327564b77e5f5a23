"""`grpo`: the training of a policy on the rewards of one domain, or of several at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from parallel.settings import Count, OptimizerSettings
from stages.domains import (
    LoopSettings,
    PolicySettings,
    RolloutSettings,
    RoutingSettings,
    SamplingSettings,
)
from stages.guards.settings import GainGateSettings, GuardsSettings, StopSettings
from stages.kinds.kind import (
    MODEL,
    SAMPLED,
    Inputs,
    RunBlocks,
    StageKind,
    StageSettings,
    Violations,
    register,
)
from stages.kinds.rules import At, policy_rules
from stages.objectives.advantages.gae import GaeSettings
from stages.objectives.loss import ObjectiveSettings

TRAINING = tuple(PolicySettings.model_fields)
OWN_REFERENCES = ("parent", "ema")  # of a KL penalty; every other one names a stage
BY_DOMAIN = "null: the domain's, or with several domains"


class GrpoSettings(StageSettings):
    """The training of a policy on rewards.

    On one domain it trains as the domain says, except for the blocks stated here, which replace the
    domain's. On several domains at once each keeps its own objective, unless one is stated here,
    and the other blocks are those stated here.
    """

    kind: Literal["grpo"] = "grpo"
    sampling: SamplingSettings | None = Field(
        default=None, description=f"rollouts of a step of each domain; {BY_DOMAIN} the defaults"
    )
    rollout: RolloutSettings | None = Field(
        default=None, description=f"overlap of sampling and training; {BY_DOMAIN} the defaults"
    )
    objective: ObjectiveSettings | None = Field(
        default=None, description=f"objective of the policy; {BY_DOMAIN} each domain's own"
    )
    routing: RoutingSettings | None = Field(
        default=None, description=f"routing in training; {BY_DOMAIN} the defaults"
    )
    optimizer: OptimizerSettings | None = Field(
        default=None, description=f"optimizer; {BY_DOMAIN} required"
    )
    updates_per_rollout: Count | None = Field(
        default=None,
        description=f"policy updates per step; must divide prompts_per_step; {BY_DOMAIN} 1",
    )
    loop: LoopSettings | None = Field(
        default=None, description=f"length and checkpoints; {BY_DOMAIN} required"
    )
    guards: GuardsSettings | None = Field(
        default=None, description=f"guards; {BY_DOMAIN} the defaults"
    )
    stop: StopSettings | None = Field(
        default=None,
        description=f"rule that ends the stage early as done; {BY_DOMAIN} none",
    )
    gate: GainGateSettings | None = Field(
        default=None, description="gate that it must pass before dependent stages start"
    )

    def inputs(self, run: RunBlocks, domains: Sequence[str]) -> Inputs:
        loaded = (*OWN_REFERENCES, self.from_)
        references = {
            domain: objective.kl.reference
            for domain, objective in self.objectives(run, domains).items()
            if objective.kl.coefficient > 0 and objective.kl.reference not in loaded
        }
        return Inputs(parent=self.from_, references=references)

    def policy(self, run: RunBlocks, domains: Sequence[str]) -> PolicySettings:
        """Return how the stage trains; of several domains with the objective of the first."""
        stated = {name: value for name in TRAINING if (value := getattr(self, name)) is not None}
        first_domain = run.domains[domains[0]]
        if len(domains) == 1:
            return first_domain.model_copy(update=stated)
        return PolicySettings.model_construct(**{"objective": first_domain.objective, **stated})

    def objectives(self, run: RunBlocks, domains: Sequence[str]) -> dict[str, ObjectiveSettings]:
        """Return the objective of every domain."""
        return {name: self.objective or run.domains[name].objective for name in domains}

    def trained_by(
        self, run: RunBlocks, domains: Sequence[str]
    ) -> tuple[OptimizerSettings, LoopSettings] | None:
        if len(domains) > 1 and (self.optimizer is None or self.loop is None):
            return None  # `violations` requires both
        return super().trained_by(run, domains)

    def read(self, run: RunBlocks, domains: Sequence[str]) -> dict[str, Any]:
        policy = self.policy(run, domains).model_dump(mode="json", include=set(TRAINING))
        objectives = self.objectives(run, domains)
        if len(objectives) > 1 and len(set(map(repr, objectives.values()))) > 1:
            del policy["objective"]
            policy["objectives"] = {
                name: objective.model_dump(mode="json") for name, objective in objectives.items()
            }
        return {"kind": self.kind, **policy}

    def violations(self, key: str, run: RunBlocks, domains: Sequence[str]) -> Violations:
        if self.from_ is None:
            yield f"{key}.from", "must name what the policy starts from"
        several = len(domains) > 1
        for name in ("optimizer", "loop") if several else ():
            if getattr(self, name) is None:
                why = f"required with several domains ({', '.join(domains)}), each with its own"
                yield f"{key}.{name}", why
        if several and (self.optimizer is None or self.loop is None):
            return
        for name, objective in self.objectives(run, domains).items() if several else ():
            if isinstance(objective.advantage, GaeSettings):
                where = key if self.objective else f"domains.{name}"
                yield (
                    f"{where}.objective.advantage.name",
                    f"gae trains a critic, for one domain alone; {key} has {len(domains)}",
                )
        rewards = {reward for name in domains for reward in run.domains[name].rewards}
        policy = self.policy(run, domains)
        for name, objective in self.objectives(run, domains).items():
            domain_policy = policy.model_copy(update={"objective": objective})
            yield from policy_rules(self.keys(key, domains, name), domain_policy, rewards, run)

    def keys(self, key: str, domains: Sequence[str], of: str | None = None) -> At:
        """Return where each key of the policy is stated: in this block, or in its only domain.

        With several domains an objective that is not stated in this block is that of the domain
        `of`.
        """
        [first_domain, *other_domains] = domains

        def at(name: str) -> str:
            block = name.partition(".")[0]
            if getattr(self, block) is None and not other_domains:
                return f"domains.{first_domain}.{name}"
            if getattr(self, block) is None and block == "objective" and of is not None:
                return f"domains.{of}.{name}"
            return f"{key}.{name}"

        return at


GRPO = register(
    StageKind(
        "grpo",
        "stages.kinds.grpo.work",
        "checkpoints",
        (
            *MODEL,
            *SAMPLED,
            *(f"domains.{{domain}}.{key}" for key in ("prompts", "rewards", "curriculum")),
        ),
        GrpoSettings,
        samples=True,
        audited=True,
    )
)
