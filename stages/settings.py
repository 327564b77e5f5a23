"""The settings of a run, and the job file that a stage process reads.

Never imports torch: the pipeline validates configurations and writes job files with these types.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from parallel.errors import UserError
from parallel.machine.network import LOOPBACK
from parallel.settings import (
    MOST,
    Count,
    EngineSettings,
    Fraction,
    LayoutSettings,
    ModelSettings,
    Settings,
    Tokens,
)
from stages.directory import StageDirectory
from stages.domains import DomainSettings, PolicySettings, PromptRolloutSettings, SamplingSettings
from stages.kinds import AnyStageSettings, Kind
from stages.kinds.evaluate.settings import EvaluationSettings
from stages.kinds.grpo.settings import GrpoSettings
from stages.kinds.kind import StageSettings
from stages.kinds.rules import At, under
from stages.rewards.reward import RewardPoolSettings

Seed = Annotated[int, Field(ge=0, lt=2**32)]
TEMPLATE = "extends: pipelines/experts-merge.yaml has it"


TrackerName = Literal["wandb", "tensorboard", "trackio"]


class LoggingSettings(Settings):
    """The trackers of experiments, and what is recorded; metrics.jsonl is always written."""

    trackers: tuple[TrackerName, ...] = Field(
        default=("wandb",), description="those that get a copy of the metrics; [] for none"
    )
    wandb: Literal["offline", "online", "disabled"] = Field(
        default="offline", description="its mode; upload offline runs with `wandb sync`"
    )
    project: str = Field(default="braid", description="project in wandb and trackio")
    auditable: bool = Field(
        default=False,
        description="write what `braid audit` needs beside the samples of every step: each token's"
        " experts, the tokens that top-k and top-p kept, and the samples of stages of kind sft and"
        " dpo",
    )
    response_log: bool = Field(
        default=True,
        description="keep each response on disk, with its experts, until a checkpoint covers it: a"
        " resumed stage does not sample it again. false: it samples them again, other ones in bf16."
        " `braid plan --memory` says how large it gets",
    )
    tokens: Fraction = Field(
        default=0.1,
        description="share of the prompts whose samples are recorded with the trainer's"
        " log-probability and the policy's entropy at every token; the same prompts in every step",
    )

    @property
    def active_trackers(self) -> tuple[TrackerName, ...]:
        """The trackers without a disabled one."""
        disabled = {"wandb"} if self.wandb == "disabled" else set()
        return tuple(name for name in self.trackers if name not in disabled)


class LaunchSettings(Settings):
    """The processes of stages: how `braid run` starts them here, and when a rank is lost."""

    fork_servers: bool = Field(
        default=True,
        description="fork ranks and engines from processes that have imported their packages: 1 s"
        " instead of 10 to 20 s; ignored on machines with an NVIDIA driver",
    )
    hang_timeout_seconds: Annotated[int, Field(ge=30, le=MOST)] = Field(
        default=300,
        description="of a rank without a sign of life, which then counts as lost; a thread of each"
        " rank gives one every 10 s, however long a step takes",
    )


class RunSettings(Settings):
    """The settings of a run: the blocks of its stages, and all that these share.

    `domains` maps each domain's name to its settings, `stages` each block's name to the settings
    of one stage, or of one for each domain.
    """

    renamed: ClassVar[dict[str, str]] = {
        "experts": "domains",
        "cold_start": f"stages.cold_start, with kind: sft; {TEMPLATE}. Without one, extend"
        " pipelines/experts-merge-from-weights.yaml",
        "merge": f"stages.merge, with kind: distill; {TEMPLATE}. Without one:"
        " stages: {merge: null, export: null}",
        "mixed": "stages.mixed, with kind: grpo, from: cold_start and its own optimizer and loop",
        "rounds": "blocks of stages for each round, as in configs/pipelines/two-rounds.yaml",
    }

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)] = Field(
        description="name of the run and its directory"
    )
    seed: Seed = Field(default=0, description="seed of all random choices")
    deterministic: bool = Field(
        default=False,
        description="bitwise reproducible run, also after a kill; slower, needs"
        " rollout.max_steps_ahead: 0",
    )
    model: ModelSettings
    layout: LayoutSettings = LayoutSettings()
    engine: EngineSettings = EngineSettings()
    domains: Annotated[dict[str, DomainSettings], Field(min_length=1)]
    stages: Annotated[dict[str, AnyStageSettings], Field(min_length=1)] = Field(
        description="blocks of stages by name, each of a kind; extends: pipelines/NAME.yaml brings"
        " those of a template"
    )
    launch: LaunchSettings = LaunchSettings()
    rewards: RewardPoolSettings = RewardPoolSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    logging: LoggingSettings = LoggingSettings()

    def longest_prompt(self, sampling: SamplingSettings) -> int:
        """Return the maximum prompt tokens with which a response fits into the engine."""
        return self.engine.max_model_tokens - sampling.max_response_tokens

    def answer_sampling(self, domain: str) -> SamplingSettings:
        """Return the distribution of answers to a domain's held-out problems; 0 degrees: greedy."""
        overrides, common = self.domains[domain].evaluation, self.evaluation
        distribution = {
            key: getattr(common if getattr(overrides, key) is None else overrides, key)
            for key in type(overrides).model_fields
        }
        # Unlike training, evaluation may be greedy, so the values are not validated again.
        return SamplingSettings.model_construct(
            max_response_tokens=self.domains[domain].sampling.max_response_tokens, **distribution
        )

    def domains_of(self, block: StageSettings) -> tuple[str, ...]:
        """Return the domains that a block is about, in the order of the run's."""
        if block.domains is None:
            return tuple(self.domains)
        block_domains = self.domains.keys() & block.domains
        if (
            len(block_domains) < 2
        ):  # of a thousand blocks, each about a domain, none walks all domains
            return tuple(block_domains)
        return tuple(name for name in self.domains if name in block_domains)

    def gate_problems(self, domain: str) -> int:
        """Return the largest number of a domain's problems that any gate needs."""
        gates = ((block.gated, self.domains_of(block)) for block in self.stages.values())
        return max(
            (
                gate.problems
                for gate, block_domains in gates
                if gate and domain in block_domains and domain in (gate.domains or block_domains)
            ),
            default=0,
        )

    def rollouts(self) -> Iterator[Rollouts]:
        """Yield what every stage that trains on samples is sampled with."""
        for name, block in self.stages.items():
            key, block_domains = f"stages.{name}", self.domains_of(block)
            domain_sets = (
                [(domain,) for domain in block_domains] if block.for_each else [block_domains]
            )
            for domains in domain_sets if block_domains else ():
                of = block.policy(self, domains) or block
                if (sampling := getattr(of, "sampling", None)) is not None:
                    at = block.keys(key, domains) if isinstance(block, GrpoSettings) else under(key)
                    yield Rollouts(at, domains, sampling, getattr(of, "rollout", None))


class Rollouts(NamedTuple):
    """The rollouts of a stage on its domains, and where each key of them is stated."""

    at: At
    domains: tuple[str, ...]
    sampling: SamplingSettings
    rollout: PromptRolloutSettings | None


def turn_violations(run: RunSettings) -> Iterator[tuple[str, str]]:
    """Yield every setting that keeps engines at work while the trainer needs their GPUs.

    As (dotted key, message). For runs on GPUs: on a CPU, engines and trainer share their cores.
    """
    if run.engine.placement != "shared":
        return
    for at, _, _, rollout in run.rollouts():
        if rollout is not None and (name := rollout.in_flight) is not None:
            fix = "0" if name == "max_steps_ahead" else "1"
            yield (
                at(f"rollout.{name}"),
                f"{getattr(rollout, name)} keeps responses in flight while the trainer computes,"
                " but with engine.placement: shared engines leave their GPUs to it; set"
                f" {name}: {fix}, or engine.placement: own",
            )


def check_turns(run: RunSettings) -> None:
    """Raise UserError with every one of `turn_violations`, each on its line."""
    if violations := [f"{key}: {message}" for key, message in turn_violations(run)]:
        raise UserError("\n".join(dict.fromkeys(violations)))


class StageJob(Settings):
    """The job file of a stage; `python -m stages.main JOB` reads it on every rank.

    All paths are absolute. `parent` and the values of `teachers` and `models` are checkpoint
    directories (`.../checkpoints/step_N`) or Hugging Face checkpoints, those of `data` the files
    that other stages collected; references of a KL penalty are `models` by domain. The stage writes
    only below `directory`, except that an export goes to `output`.

    Example: the second attempt of an expert of math, which `for_each: domain` made of a block:
        stage: experts.math   kind: grpo   block: experts   domain: math   attempt: 2
        directory: /runs/a/stages/experts.math
        parent: /runs/a/stages/cold_start/checkpoints/step_40
        engine_addresses: [/runs/a/engine/0/address.json]

    >>> StageJob.model_construct(directory=Path("/runs/a/stages/merge")).files.metrics.name
    'metrics.jsonl'
    """

    stage: str
    kind: Kind | Literal["preview"]
    block: str | None = Field(default=None, description="of the stage's settings; null: none")
    domain: str | None = None
    domains: list[str] = Field(default_factory=list, description="that the stage is about")
    seeded_as: str = Field(
        default_factory=lambda data: data.get("stage", ""),
        description="name that its random numbers derive from",
    )
    directory: Path
    attempt: Count
    parent: Path | None = None
    teachers: dict[str, Path] = Field(default_factory=dict)
    data: dict[str, Path] = Field(default_factory=dict)
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
    def block_settings(self) -> StageSettings:
        """The settings of the stage's block."""
        assert self.block is not None, "a job outside the graph has no block"
        return self.settings.stages[self.block]

    @property
    def policy(self) -> PolicySettings:
        """The training of the stage on rewards."""
        policy = self.block_settings.policy(self.settings, self.domains)
        assert policy is not None, f"stages of kind {self.kind} train on no rewards"
        return policy

    @property
    def own_domains(self) -> dict[str, DomainSettings]:
        """The domains that the stage is about."""
        return {name: self.settings.domains[name] for name in self.domains}


class DomainCheckJob(Settings):
    """The job file of stages/domain_tools/domain_check.py, which writes to `result`."""

    domain: str
    settings: DomainSettings
    tokenizer: str
    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    chat_template_date: date | None = None
    pool: RewardPoolSettings
    prompts: Count = Field(description="prompts to print, and to score with their references")
    max_positions: Tokens | None = Field(
        default=None, description="model.max_positions, if the run is known"
    )
    result: Path


class UngradedSample(Settings):
    """A recorded sample of a RegradeJob; `problem` is the key of its problem."""

    domain: str
    problem: str
    response: str
    tokens: Tokens
    finished: bool


class RegradeJob(Settings):
    """The job file of `python -m stages.domain_tools.regrade JOB`, which writes to `result`.

    `seed` and `stage` are those that the stage's prompts were drawn with.
    """

    domains: dict[str, DomainSettings]
    tokenizer: str
    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    chat_template_date: date | None = None
    pool: RewardPoolSettings
    seed: Seed
    stage: str
    samples: tuple[UngradedSample, ...]
    result: Path
