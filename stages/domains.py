"""The settings of a domain, and of the training of a policy on rewards. Never imports torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from parallel.settings import (
    Count,
    Natural,
    OptimizerSettings,
    RoutingLossSettings,
    Settings,
    Tokens,
)
from stages.data.settings import (
    CurriculumSettings,
    DemonstrationSettings,
    GeneratedDemonstrationSettings,
    NoCurriculumSettings,
    PromptSettings,
)
from stages.guards.settings import GuardsSettings, StopSettings
from stages.objectives.loss import ObjectiveSettings
from stages.rewards.kinds import RewardSettings
from stages.rewards.kinds.reasoning_gym import ReasoningGymReward


class SamplingSettings(Settings):
    """The rollouts of one step: prompts, samples of each prompt, and the sampling distribution."""

    prompts_per_step: Count = Field(default=32, description="prompt groups per step")
    group_size: Count = Field(default=8, description="responses to each prompt")
    # vLLM raises lower temperatures to 0.01 and rejects higher ones.
    temperature: float = Field(default=1.0, ge=0.01, le=2, description="sampling temperature")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="nucleus sampling threshold; 1 keeps all tokens"
    )
    top_k: Natural = Field(default=0, description="sample from the k most likely tokens; 0: all")
    max_response_tokens: Tokens = Field(
        default=24, description="maximum response length; longer responses are truncated"
    )


class PromptRolloutSettings(Settings):
    """The overlap of sampling with training, and the maximum policy lag."""

    mode: Literal["sync", "overlap", "async"] = Field(
        default="sync",
        description="sync: sampling and training alternate. overlap: the next step is sampled while"
        " this one trains. async: responses in flight continue when the weights change",
    )
    max_staleness: Count = Field(
        default=1,
        description="maximum policy lag of a sample, in training steps; a step waits for samples"
        " that would exceed it, and those that do are dropped and counted",
    )

    @property
    def prefetch(self) -> int:
        """The steps of prompts kept in flight beyond the current step's."""
        return {"sync": 0, "overlap": 1, "async": self.max_staleness}[self.mode]

    @property
    def drains(self) -> bool:
        """True where a step is collected before the weight sync, so from one weight version."""
        return self.mode == "overlap"

    @property
    def in_flight(self) -> str | None:
        """The setting that keeps responses in flight while the trainer computes, or None."""
        return None if self.mode == "sync" else "mode"


class RolloutSettings(PromptRolloutSettings):
    """The overlap of sampling with training, oversampling and dynamic sampling."""

    oversampling: Annotated[float, Field(ge=1, le=1000)] = Field(
        default=1.0,
        description="prompts in flight, as a multiple of prompts_per_step; a step trains on those"
        " that are complete first, the next step on the others",
    )

    dynamic_sampling: Natural = Field(
        default=0,
        description="rounds of replacing groups that teach nothing (dynamic sampling)",
    )
    dynamic_sampling_by: Literal["advantages", "solved"] = Field(
        default="advantages",
        description="groups that teach nothing. advantages: all advantages are 0, for an advantage"
        " within groups. solved: all samples are right, or all are wrong, whatever their rewards"
        " (DAPO)",
    )

    @property
    def in_flight(self) -> str | None:
        """The setting that keeps responses in flight while the trainer computes, or None."""
        return super().in_flight or ("oversampling" if self.oversampling > 1 else None)


class RoutingSettings(RoutingLossSettings):
    """The routing in training; R3 replays the engine's experts (arXiv 2510.11370)."""

    replay: Literal["none", "r3"] = Field(
        default="r3", description="r3: train on the experts that the engine chose; none: choose own"
    )


class LoopSettings(Settings):
    """The length of a training stage, its micro-batches and its checkpoints."""

    steps: Count = Field(description="training steps")
    micro_batch_tokens: Tokens = Field(
        default=4096,
        description="tokens that a device computes at once, up to 1.1 times, or one longer sample;"
        " its context-parallel ranks share a sample. Affects memory and speed only",
    )
    checkpoint_every: Count = Field(default=20, description="steps between checkpoints")
    keep_last: Count = Field(default=2, description="newest checkpoints to keep")
    keep_best: Natural = Field(default=0, description="best checkpoints to keep as well")
    async_checkpoints: bool = Field(default=True, description="train while checkpoints are written")


class PolicySettings(Settings):
    """The training of a policy on rewards."""

    sampling: SamplingSettings = SamplingSettings()
    rollout: RolloutSettings = RolloutSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    routing: RoutingSettings = RoutingSettings()
    optimizer: OptimizerSettings
    updates_per_rollout: Count = Field(
        default=1, description="policy updates per step; must divide prompts_per_step"
    )
    loop: LoopSettings
    guards: GuardsSettings = GuardsSettings()
    stop: StopSettings | None = Field(
        default=None, description="rule that ends the stage early as done; null: train all steps"
    )


class DomainEvaluationSettings(Settings):
    """The sampling of a domain's held-out problems, in evaluations and gates."""

    temperature: float | None = Field(
        default=None, ge=0, le=2, description="0: greedy; null: evaluation.temperature"
    )
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="nucleus threshold; null: evaluation.top_p"
    )
    top_k: Natural | None = Field(
        default=None, description="most likely tokens, 0: all; null: evaluation.top_k"
    )


class DomainSettings(PolicySettings):
    """A domain: its prompts, demonstrations and rewards, and the training of a policy on it alone.

    A stage that trains on this domain alone takes the training from here, except for the blocks
    that the stage states itself.
    """

    renamed: ClassVar[dict[str, str]] = {
        "reward": "rewards: {NAME: {kind: python, function: package.module:function}}",
        "from": "stages.NAME.from, the stage that a stage starts from",
        "gate": "stages.NAME.gate, of the stage that it gates: gate: {domains: [DOMAIN]}",
    }

    prompts: PromptSettings = Field(description="source of the domain's prompts")
    rewards: Annotated[dict[str, RewardSettings], Field(min_length=1)] = Field(
        default={"exact": ReasoningGymReward()},
        description="rewards by name; a sample's reward is the sum of weight x reward",
    )
    demonstrations: DemonstrationSettings = Field(
        default=GeneratedDemonstrationSettings(),
        description="demonstrations that the cold start trains on",
    )
    curriculum: CurriculumSettings = Field(
        default=NoCurriculumSettings(), description="choice of prompts by difficulty"
    )
    evaluation: DomainEvaluationSettings = DomainEvaluationSettings()
