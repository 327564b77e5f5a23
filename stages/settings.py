"""What a person may set about a stage, and the job file a stage process is started with.

Never imports torch: the pipeline validates a configuration and writes job files with these types.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from parallel.network import LOOPBACK
from parallel.settings import (
    Count,
    EngineSettings,
    LayoutSettings,
    ModelSettings,
    Natural,
    OptimizerSettings,
    RoutingLossSettings,
    Settings,
    Tokens,
)
from stages.data.sources.settings import (
    DemonstrationSettings,
    GeneratedDemonstrationSettings,
    PromptSettings,
)
from stages.guards.settings import (
    CurriculumSettings,
    ExpertGateSettings,
    GuardsSettings,
    MergeGateSettings,
    NoCurriculumSettings,
    StopSettings,
)
from stages.objectives.settings import ObjectiveSettings
from stages.rewards.kinds.reasoning_gym import ReasoningGymReward
from stages.rewards.registry import RewardSettings
from stages.rewards.settings import RewardPoolSettings


class SamplingSettings(Settings):
    """One step's rollouts: prompts, samples of each prompt, and the sampling distribution.

    vLLM draws at no other temperatures: it raises lower ones, and refuses higher ones.
    """

    prompts_per_step: Count = Field(default=32, description="prompt groups of a step")
    group_size: Count = Field(default=8, description="responses to each prompt")
    temperature: Annotated[float, Field(ge=0.01, le=2)] = Field(
        default=1.0, description="of the softmax that tokens are sampled from"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="draw from the likeliest tokens that together have so much"
    )
    top_k: Natural = Field(
        default=0, description="draw from so many of the likeliest tokens; 0 is all of them"
    )
    max_response_tokens: Tokens = Field(
        default=24, description="longest response; longer ones are truncated"
    )


class MergeSamplingSettings(SamplingSettings):
    """One step's rollouts of each domain; a teacher grades a sample without comparing it."""

    group_size: Count = Field(default=1, description="responses to each prompt")


class MergeRolloutSettings(Settings):
    """How sampling and training take turns, and how old a sample's weights may be."""

    mode: Literal["sync", "overlap", "async"] = Field(
        default="sync",
        description="sync: in turn. overlap: the next step's samples are drawn while this one"
        " trains. async: samples are always under way, and go on when the weights change",
    )
    max_staleness: Count = Field(
        default=1,
        description="training steps that a sample's oldest weights may lie behind; a step waits for"
        " samples that would grow older, and older ones are dropped and counted",
    )

    @property
    def prefetch(self) -> int:
        """The steps of prompts kept in flight beyond the present step's."""
        return {"sync": 0, "overlap": 1, "async": self.max_staleness}[self.mode]

    @property
    def drains(self) -> bool:
        """Whether a step is collected before the weights change, from one version of them."""
        return self.mode == "overlap"


class RolloutSettings(MergeRolloutSettings):
    """The same, and which prompts of those that were begun a step trains on."""

    oversampling: Annotated[float, Field(ge=1, le=1000)] = Field(
        default=1.0,
        description="prompts under way, as a multiple of prompts_per_step: a step takes those whose"
        " samples are whole first, and leaves the others to the next",
    )
    dynamic_sampling: Natural = Field(
        default=0,
        description="rounds in which prompts are replaced whose samples teach nothing",
    )
    dynamic_sampling_by: Literal["advantages", "solved"] = Field(
        default="advantages",
        description="what that is. advantages: no token has one. solved: all samples are right, or"
        " all wrong, whatever else they earned (DAPO)",
    )


class ColdStartRoutingSettings(RoutingLossSettings):
    """A cold start keeps its experts in use."""

    load_balance: Annotated[float, Field(ge=0)] = Field(
        default=1e-3, description="coefficient of the load-balancing loss"
    )


class RoutingSettings(RoutingLossSettings):
    """R3 makes the trainer use the experts the engine chose for every token (arXiv 2510.11370)."""

    replay: Literal["none", "r3"] = Field(
        default="r3",
        description="r3: the trainer uses the experts the engine chose for a token; none: its own",
    )


class LoopSettings(Settings):
    """How long a stage runs, how much a rank computes at once, and how often it saves."""

    steps: Count = Field(description="training steps")
    micro_batch_tokens: Tokens = Field(
        default=4096,
        description="tokens that a rank computes at once: memory and speed, not the result",
    )
    checkpoint_every: Count = Field(default=20, description="steps between checkpoints")
    keep_last: Count = Field(default=2, description="newest checkpoints to keep")
    keep_best: Natural = Field(
        default=0, description="how many of the best checkpoints to keep too"
    )
    async_checkpoints: bool = Field(
        default=True, description="write a checkpoint while the training goes on"
    )


class PolicySettings(Settings):
    """How a policy is trained on rewards."""

    sampling: SamplingSettings = SamplingSettings()
    rollout: RolloutSettings = RolloutSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    routing: RoutingSettings = RoutingSettings()
    optimizer: OptimizerSettings
    updates_per_rollout: Count = Field(
        default=1, description="policy updates of a step; divides prompts_per_step"
    )
    loop: LoopSettings
    guards: GuardsSettings = GuardsSettings()
    stop: StopSettings | None = Field(
        default=None, description="where the policy is done early; null trains all steps"
    )


class DomainSettings(PolicySettings):
    """A domain: its problems, its demonstrations, its rewards, and how its expert is trained."""

    renamed: ClassVar[dict[str, str]] = {
        "reward": "rewards: {NAME: {kind: python, function: package.module:function}}"
    }

    prompts: PromptSettings = Field(description="where its problems come from")
    rewards: Annotated[dict[str, RewardSettings], Field(min_length=1)] = Field(
        default={"exact": ReasoningGymReward()},
        description="by name; what a sample earns is the sum of weight x reward",
    )
    demonstrations: DemonstrationSettings = Field(
        default=GeneratedDemonstrationSettings(), description="what the cold start is shown of it"
    )
    curriculum: CurriculumSettings = Field(
        default=NoCurriculumSettings(), description="which prompts are taken more often"
    )
    from_: str | None = Field(
        default=None,
        alias="from",
        description="the stage it grows from: cold_start (without one, the initial weights), or"
        " experts.NAME of the same round; null is cold_start, and the merge before in later rounds",
    )
    gate: ExpertGateSettings | None = Field(
        default=None,
        description="what its expert has to show before anything is made from it; null asks"
        " nothing",
    )


class MixedSettings(PolicySettings):
    """The baseline of the experts and their merge: one policy, trained on all domains at once, each
    with its own prompts, rewards and curriculum. `sampling.prompts_per_step` is of each domain."""


class ColdStartSettings(Settings):
    """Supervised fine-tuning on all domains' demonstrations at once."""

    routing: ColdStartRoutingSettings = ColdStartRoutingSettings()
    optimizer: OptimizerSettings
    loop: LoopSettings


class MergeSettings(Settings):
    """Multi-teacher on-policy distillation: students sample, each domain's own expert grades."""

    method: Literal["full_vocab_reverse_kl"] = Field(
        default="full_vocab_reverse_kl", description="the loss of the merge"
    )
    averaged_over: Literal["domains", "tokens"] = Field(
        default="domains",
        description="domains: the mean of every domain's mean over its tokens. tokens: of all"
        " tokens, most of which are of the domain with the longest responses",
    )
    domain_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={},
        description="what a domain weighs beside the others in that mean; 1 where it is not named",
    )
    sampling: MergeSamplingSettings = MergeSamplingSettings()
    rollout: MergeRolloutSettings = MergeRolloutSettings()
    routing: RoutingSettings = RoutingSettings()
    optimizer: OptimizerSettings
    loop: LoopSettings
    gate: MergeGateSettings | None = Field(
        default=None,
        description="what it has to keep of its teachers before anything is made from it; null asks"
        " nothing",
    )


class EvaluationSettings(Settings):
    """Held-out problems of every domain."""

    problems: Count = Field(default=2000, description="held-out problems of each domain")
    samples_per_problem: int = Field(
        default=1,
        gt=0,
        le=256,
        description="answers to each; with several, accuracy is the mean over the problems, and"
        " pass_at_k the share of the problems that any of them solves",
    )
    temperature: Annotated[float, Field(ge=0, le=2)] = Field(
        default=1.0, description="of the answers; 0 is greedy"
    )
    sampling_seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        default=20_000, description="of the answers"
    )


class LoggingSettings(Settings):
    """Weights & Biases beside metrics.jsonl, which is always written."""

    wandb: Literal["offline", "online", "disabled"] = Field(
        default="offline",
        description="mode of Weights & Biases; offline runs are uploaded with `wandb sync`",
    )
    project: str = Field(default="braid", description="project in Weights & Biases")
    auditable: bool = Field(
        default=False,
        description="write what `braid audit` needs beside the samples of every step: the experts"
        " that each token used, the tokens that sampling kept, and what a cold start and an"
        " evaluation read",
    )


class LaunchSettings(Settings):
    """How `braid run` starts processes on this machine."""

    fork_servers: bool = Field(
        default=True,
        description="fork ranks and engines from processes that have imported their packages, which"
        " takes a second where starting them takes 10 to 20; never done where an NVIDIA driver is",
    )


class RunSettings(Settings):
    """A whole run: `domains` maps each domain's name to its settings."""

    renamed: ClassVar[dict[str, str]] = {"experts": "domains"}

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=100,
        description="name of the run's directory",
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        default=0, description="of everything that is sampled"
    )
    deterministic: bool = Field(
        default=False,
        description="the same bits every time, also after a kill; slower, and with mode: sync only",
    )
    model: ModelSettings
    layout: LayoutSettings = LayoutSettings()
    engine: EngineSettings = EngineSettings()
    cold_start: ColdStartSettings | None = Field(
        description="null: experts grow from model.initial_weights, and need no demonstrations"
    )
    domains: Annotated[dict[str, DomainSettings], Field(min_length=1)]
    merge: MergeSettings | None = Field(description="null leaves the experts as they are")
    rounds: Annotated[int, Field(gt=0, le=1000)] = Field(
        default=1, description="experts and their merge, grown again from the merge before"
    )
    mixed: MixedSettings | None = Field(
        default=None, description="trains one policy on all domains beside the experts; null none"
    )
    launch: LaunchSettings = LaunchSettings()
    rewards: RewardPoolSettings = RewardPoolSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    logging: LoggingSettings = LoggingSettings()

    def longest_prompt(self, sampling: SamplingSettings) -> int:
        """Tokens of a prompt beside which a response fits into the engine."""
        return self.engine.max_model_tokens - sampling.max_response_tokens

    def gate_problems(self, domain: str) -> int:
        """How many problems of a domain the gate asks for that asks for most."""
        gates = (self.domains[domain].gate, self.merge and self.merge.gate)
        return max((gate.problems for gate in gates if gate), default=0)


class StageJob(Settings):
    """Everything one stage process needs; `python -m stages.main JOB` reads it on every rank.

    All paths are absolute. `parent` and the values of `teachers` and `models` are checkpoint
    directories (`.../checkpoints/step_N`). The stage writes only below `directory`, except that
    an export goes to `output`.
    """

    stage: str
    kind: Literal[
        "import", "sft", "grpo", "mixed", "distill", "gate", "evaluate", "export", "preview"
    ]
    domain: str | None = None
    directory: Path
    attempt: Count
    parent: Path | None = None
    teachers: dict[str, Path] = Field(default_factory=dict)
    models: dict[str, Path] = Field(default_factory=dict)
    evaluated_on: dict[str, list[str]] = Field(
        default_factory=dict, description="of each model, its domains; all where it is not named"
    )
    output: Path | None = None
    samples: bool = Field(default=False, description="whether it needs engines")
    engine_addresses: list[Path] = Field(
        default_factory=list,
        description="of each engine, the file it writes when it is ready: an `Address`",
    )
    interface: str = Field(
        default=LOOPBACK, description="where the main rank meets the engines: parallel.network"
    )
    settings: RunSettings


class DomainCheckJob(Settings):
    """What `python -m stages.domain_check JOB` reads: a domain, before anything is trained on it.

    It writes what it found to `result`.
    """

    domain: str
    settings: DomainSettings
    tokenizer: str
    pool: RewardPoolSettings
    prompts: Count = Field(description="that are shown, and scored with their references")
    max_positions: Tokens | None = Field(
        default=None, description="model.max_positions, where a run is known"
    )
    result: Path
