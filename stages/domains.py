"""The settings of a domain, and of the training of a policy on rewards. Never imports torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

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

MODES = ("sync", "overlap", "async")  # of earlier versions


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
    """The steps that sampling may run ahead of training, which bound the policy lag.

    `mode`, of earlier versions, is read as what it meant (`by_steps_ahead`).
    """

    former: ClassVar[frozenset[str]] = frozenset({"mode"})
    renamed: ClassVar[dict[str, str]] = {
        "mode": "max_steps_ahead: 0 for sync, 1 for overlap, the former max_staleness for async"
    }

    max_steps_ahead: Natural = Field(
        default=0,
        description="training steps that sampling may run ahead, and so the maximum policy lag of a"
        " sample. 0: sampling and training alternate. 1: the next step is sampled while this one"
        " trains. 2 or more: responses in flight continue when the weights change",
    )
    sync_in_flight: bool | None = Field(
        default=None,
        description="sync weights while responses are in flight; false: each step's responses are"
        " complete before. null: true with max_steps_ahead of 2 or more",
    )
    max_staleness: Count | None = Field(
        default=None,
        description="maximum policy lag, in training steps, of groups that oversampling leaves to"
        " later steps of max_steps_ahead: 0; null: 1",
    )

    @model_validator(mode="before")
    @classmethod
    def _by_steps_ahead(cls, rollout: Any) -> Any:
        return by_steps_ahead(rollout) if isinstance(rollout, dict) else rollout

    @property
    def staleness_bound(self) -> int:
        """The maximum policy lag of a sample, in training steps.

        Proof: no more groups are in flight than the next `staleness_bound` steps train on, and a
        step takes those first that a later one would find too old. So a group requested under
        version v is trained on in step v + staleness_bound at the latest.

        Example: two groups a step, max_steps_ahead = 2, group f the slowest:
            step 1  takes a b of version 1; while it trains, c d are requested
            step 2  waits for c d, 1 behind: since the engines are slower, e f g h are requested
            step 3  takes e g, 1 behind, and leaves f h; i j are requested under version 3
            step 4  waits for f h, 2 behind, since step 5 would find them 3 behind

        >>> [PromptRolloutSettings(max_steps_ahead=steps).staleness_bound for steps in (0, 1, 4)]
        [1, 1, 4]
        """
        return self.max_staleness or max(1, self.max_steps_ahead)

    @property
    def collects_before_sync(self) -> bool:
        """True where a step is collected before the weight sync, so from one weight version."""
        return self.max_steps_ahead == 1 and not self.sync_in_flight

    @property
    def in_flight(self) -> str | None:
        """The setting that keeps responses in flight while the trainer computes, or None."""
        return "max_steps_ahead" if self.max_steps_ahead else None


def by_steps_ahead(rollout: dict[str, Any]) -> dict[str, Any]:
    """Return a rollout block by its steps ahead, without what follows from them.

    A `mode` of earlier versions becomes what it meant; an unknown one stays, and is refused.
    Without what follows from the steps, equal rollouts have equal blocks, however they are stated:
    else a finished stage would be stale.

    >>> by_steps_ahead({"mode": "async", "max_staleness": 4})
    {'max_steps_ahead': 4}
    >>> by_steps_ahead({"mode": "async"})  # unlike overlap, it syncs weights in flight
    {'max_steps_ahead': 1, 'sync_in_flight': True}
    """
    block = dict(rollout)
    mode, staleness = block.get("mode"), block.get("max_staleness")
    if type(staleness) is not int:  # null is 1; of anything else pydantic says what is wrong
        staleness = 1
    if mode in MODES and block.keys().isdisjoint(("max_steps_ahead", "sync_in_flight")):
        del block["mode"]
        block["max_steps_ahead"] = {"sync": 0, "overlap": 1, "async": staleness}[mode]
        if mode == "async":
            block["sync_in_flight"] = True
    steps = block.get("max_steps_ahead", 0)
    if type(steps) is int:
        if block.get("max_staleness") == max(1, steps):
            del block["max_staleness"]
        if block.get("sync_in_flight") is (steps > 1):
            del block["sync_in_flight"]
    return block


class RolloutSettings(PromptRolloutSettings):
    """The steps that sampling may run ahead of training, oversampling and dynamic sampling."""

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
