"""The settings of stages and runs, and the job file that a stage process reads.

Never imports torch: the pipeline validates configurations and writes job files with these types.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from parallel.errors import UserError
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
from stages.data.settings import (
    CurriculumSettings,
    DemonstrationSettings,
    GeneratedDemonstrationSettings,
    NoCurriculumSettings,
    PromptSettings,
)
from stages.directory import StageDirectory
from stages.guards.settings import (
    ExpertGateSettings,
    GuardsSettings,
    MergeGateSettings,
    StopSettings,
)
from stages.kinds import Kind
from stages.objectives.loss import ObjectiveSettings
from stages.rewards.kinds import RewardSettings
from stages.rewards.kinds.reasoning_gym import ReasoningGymReward
from stages.rewards.reward import RewardPoolSettings


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


class MergeSamplingSettings(SamplingSettings):
    """The rollouts of one step of the merge, for each domain, whose teacher grades each alone."""

    group_size: Count = Field(default=1, description="responses to each prompt")


class MergeRolloutSettings(Settings):
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


class RolloutSettings(MergeRolloutSettings):
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
        description="groups that teach nothing. advantages: all advantages are 0. solved: all"
        " samples are right, or all are wrong, whatever their rewards (DAPO)",
    )

    @property
    def in_flight(self) -> str | None:
        """The setting that keeps responses in flight while the trainer computes, or None."""
        return super().in_flight or ("oversampling" if self.oversampling > 1 else None)


class ColdStartRoutingSettings(RoutingLossSettings):
    """The router losses of the cold start, by default with load balancing."""

    load_balance: Annotated[float, Field(ge=0)] = Field(
        default=1e-3, description="coefficient of the load-balancing loss"
    )


class RoutingSettings(RoutingLossSettings):
    """The routing in training; R3 replays the engine's experts (arXiv 2510.11370)."""

    replay: Literal["none", "r3"] = Field(
        default="r3", description="r3: train on the experts that the engine chose; none: choose own"
    )


class LoopSettings(Settings):
    """The length of a training stage, its micro-batches and its checkpoints."""

    steps: Count = Field(description="training steps")
    micro_batch_tokens: Tokens = Field(
        default=4096, description="tokens of a rank's micro-batch: affects memory and speed only"
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


class DomainSettings(PolicySettings):
    """A domain: its prompts, demonstrations and rewards, and the training of its expert."""

    renamed: ClassVar[dict[str, str]] = {
        "reward": "rewards: {NAME: {kind: python, function: package.module:function}}"
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
    from_: str | None = Field(
        default=None,
        alias="from",
        description="parent stage: cold_start (without one, the initial weights), or experts.NAME"
        " of the same round; null: cold_start, or in later rounds the merge before",
    )
    gate: ExpertGateSettings | None = Field(
        default=None, description="gate that the expert must pass before dependent stages start"
    )


class MixedSettings(PolicySettings):
    """The baseline of the merge: one policy, trained on all domains at once.

    Each domain has its own prompts, rewards and curriculum, and `prompts_per_step` in every step.
    """


class ColdStartSettings(Settings):
    """The cold start: supervised fine-tuning on the demonstrations of all domains."""

    routing: ColdStartRoutingSettings = ColdStartRoutingSettings()
    optimizer: OptimizerSettings
    loop: LoopSettings


class MergeSettings(Settings):
    """The merge: multi-teacher on-policy distillation from each domain's expert."""

    method: Literal["full_vocab_reverse_kl"] = Field(
        default="full_vocab_reverse_kl", description="loss of the merge"
    )
    averaged_over: Literal["domains", "tokens"] = Field(
        default="domains",
        description="domains: mean over domains of each one's mean over tokens. tokens: mean over"
        " all tokens, most of them of the domain with the longest responses",
    )
    domain_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={}, description="relative weights of domains in that mean; of the others 1"
    )
    sampling: MergeSamplingSettings = MergeSamplingSettings()
    rollout: MergeRolloutSettings = MergeRolloutSettings()
    routing: RoutingSettings = RoutingSettings()
    optimizer: OptimizerSettings
    loop: LoopSettings
    gate: MergeGateSettings | None = Field(
        default=None, description="gate that the merge must pass before dependent stages start"
    )


class EvaluationSettings(Settings):
    """The evaluation on held-out problems of every domain."""

    problems: Count = Field(default=2000, description="held-out problems of each domain")
    samples_per_problem: Annotated[int, Field(gt=0, le=256)] = Field(
        default=1,
        description="answers to each problem; with several, accuracy is the mean over all answers,"
        " and pass_at_k the share of problems that any answer solves",
    )
    temperature: float = Field(
        default=1.0, ge=0, le=2, description="sampling temperature of the answers; 0: greedy"
    )
    sampling_seed: int = Field(default=20_000, ge=0, lt=2**32, description="seed of the answers")


class LoggingSettings(Settings):
    """The logging to Weights & Biases and of audit data; metrics.jsonl is always written."""

    wandb: Literal["offline", "online", "disabled"] = Field(
        default="offline", description="its mode; upload offline runs with `wandb sync`"
    )
    project: str = Field(default="braid", description="project in Weights & Biases")
    auditable: bool = Field(
        default=False,
        description="write what `braid audit` needs beside the samples of every step: each token's"
        " experts, the tokens that top-k and top-p kept, and the samples of cold starts and"
        " evaluations",
    )


class LaunchSettings(Settings):
    """The start of processes by `braid run` on this machine."""

    fork_servers: bool = Field(
        default=True,
        description="fork ranks and engines from processes that have imported their packages: 1 s"
        " instead of 10 to 20 s; ignored on machines with an NVIDIA driver",
    )


class RunSettings(Settings):
    """The settings of a run; `domains` maps each domain's name to its settings."""

    renamed: ClassVar[dict[str, str]] = {"experts": "domains"}

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)] = Field(
        description="name of the run and its directory"
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="seed of all random choices")
    deterministic: bool = Field(
        default=False,
        description="bitwise reproducible run, also after a kill; slower, needs rollout.mode: sync",
    )
    model: ModelSettings
    layout: LayoutSettings = LayoutSettings()
    engine: EngineSettings = EngineSettings()
    cold_start: ColdStartSettings | None = Field(
        description="null: experts start from model.initial_weights, without demonstrations"
    )
    domains: Annotated[dict[str, DomainSettings], Field(min_length=1)]
    merge: MergeSettings | None = Field(description="null: no merge")
    rounds: Annotated[int, Field(gt=0, le=1000)] = Field(
        default=1, description="rounds of experts and merge, each from the merge before"
    )
    mixed: MixedSettings | None = Field(
        default=None, description="one policy trained on all domains, as a baseline; null: none"
    )
    launch: LaunchSettings = LaunchSettings()
    rewards: RewardPoolSettings = RewardPoolSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    logging: LoggingSettings = LoggingSettings()

    def longest_prompt(self, sampling: SamplingSettings) -> int:
        """Return the maximum prompt tokens with which a response fits into the engine."""
        return self.engine.max_model_tokens - sampling.max_response_tokens

    def gate_problems(self, domain: str) -> int:
        """Return the largest number of a domain's problems that any gate needs."""
        gates = (self.domains[domain].gate, self.merge and self.merge.gate)
        return max((gate.problems for gate in gates if gate), default=0)


def turn_violations(run: RunSettings) -> Iterator[tuple[str, str]]:
    """Yield every setting that keeps engines at work while the trainer needs their GPUs.

    As (dotted key, message). For runs on GPUs: on a CPU, engines and trainer share their cores.
    """
    if run.engine.placement != "shared":
        return
    rollouts: dict[str, MergeRolloutSettings] = {
        f"domains.{name}.rollout": domain.rollout for name, domain in run.domains.items()
    }
    rollouts |= {
        f"{name}.rollout": block.rollout
        for name, block in (("mixed", run.mixed), ("merge", run.merge))
        if block is not None
    }
    for block, rollout in rollouts.items():
        if (name := rollout.in_flight) is not None:
            fix = "sync" if name == "mode" else "1"
            yield (
                f"{block}.{name}",
                f"{getattr(rollout, name)} keeps responses in flight while the trainer computes,"
                " but with engine.placement: shared engines leave their GPUs to it; set"
                f" {name}: {fix}, or engine.placement: own",
            )


def check_turns(run: RunSettings) -> None:
    """Raise UserError with every one of `turn_violations`, each on its line."""
    if found := [f"{key}: {message}" for key, message in turn_violations(run)]:
        raise UserError("\n".join(found))


class StageJob(Settings):
    """The job file of a stage; `python -m stages.main JOB` reads it on every rank.

    All paths are absolute. `parent` and the values of `teachers` and `models` are checkpoint
    directories (`.../checkpoints/step_N`). The stage writes only below `directory`, except that
    an export goes to `output`.
    """

    stage: str
    kind: Kind | Literal["preview"]
    domain: str | None = None
    directory: Path
    attempt: Count
    parent: Path | None = None
    teachers: dict[str, Path] = Field(default_factory=dict)
    models: dict[str, Path] = Field(default_factory=dict)
    evaluated_on: dict[str, list[str]] = Field(
        default_factory=dict, description="domains by model; all for a model that is not named"
    )
    output: Path | None = None
    samples: bool = Field(default=False, description="the stage needs engines")
    engine_addresses: list[Path] = Field(
        default_factory=list, description="file that each engine writes when ready: an `Address`"
    )
    idle_engines: list[Path] = Field(
        default_factory=list, description="of the run, where the stage needs none; they must sleep"
    )
    interface: str = Field(
        default=LOOPBACK, description="network interface between main rank and engines"
    )
    settings: RunSettings

    @property
    def files(self) -> StageDirectory:
        """The paths below `directory`."""
        return StageDirectory(self.directory)

    @property
    def policy(self) -> PolicySettings:
        """The settings of a policy that trains on rewards: those of `domain`, or of `mixed`."""
        found = self.settings.mixed if self.domain is None else self.settings.domains[self.domain]
        assert found is not None, "a stage without a domain is the mixed policy"
        return found

    @property
    def policy_domains(self) -> dict[str, DomainSettings]:
        """The domains of that policy: `domain`, or all where it is None."""
        domains = self.settings.domains
        return domains if self.domain is None else {self.domain: domains[self.domain]}


class DomainCheckJob(Settings):
    """The job file of `python -m stages.domain_check JOB`, which writes to `result`."""

    domain: str
    settings: DomainSettings
    tokenizer: str
    pool: RewardPoolSettings
    prompts: Count = Field(description="prompts to print, and to score with their references")
    max_positions: Tokens | None = Field(
        default=None, description="model.max_positions, if the run is known"
    )
    result: Path
