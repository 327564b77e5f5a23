"""A kind of stage: its settings, what it reads, what it starts from and what it leaves.

A kind is declared in `settings.py` of its room, or in a package that names its module under the
entry point `braid.stages`. The graph, validation, staleness, the plan, submission and the reference
of the settings come from the declaration. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import AliasChoices, Field

from parallel.settings import (
    EngineSettings,
    LayoutSettings,
    ModelSettings,
    OptimizerSettings,
    Settings,
)
from stages.domains import DomainSettings, LoopSettings, PolicySettings
from stages.guards.settings import GateSettings

GATE_KEY = "gate"  # of a block, which has the settings of its stages' gates
Violations = Iterator[tuple[str, str]]  # (dotted key, message)
SOURCE = (
    "a stage of this run, or the path of a stage's directory of another run, of a checkpoint, or of"
    " a Hugging Face checkpoint"
)


class RunBlocks(Protocol):
    """The blocks of a run that a stage's settings are interpreted with."""

    @property
    def model(self) -> ModelSettings: ...
    @property
    def layout(self) -> LayoutSettings: ...
    @property
    def engine(self) -> EngineSettings: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def domains(self) -> Mapping[str, DomainSettings]: ...
    @property
    def stages(self) -> Mapping[str, StageSettings]: ...


@dataclass(frozen=True)
class Inputs:
    """The inputs of a stage, each named as in the configuration: a block, a stage or a path.

    `teachers` and the `references` of a KL penalty are by domain, `data` by the name of the source,
    `models` by the name that the stage knows them under; with `every_model` a stage takes every
    model that the run trains.
    """

    parent: str | None = None
    teachers: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    references: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    every_model: bool = False


class StageSettings(Settings):
    """The keys that stages of every kind have."""

    former: ClassVar[frozenset[str]] = frozenset({"seeded_as"})

    if TYPE_CHECKING:
        kind: str

    from_: str | None = Field(
        default=None, alias="from", description=f"what it starts from: {SOURCE}"
    )
    for_each: Literal["domain"] | None = Field(
        default=None, description="domain: one stage for each of its domains; null: one stage"
    )
    as_: str | None = Field(
        default=None,
        alias="as",
        description="the stage's name, with {domain} where for_each: domain; null: the block's"
        " name, and BLOCK.{domain}",
    )
    domains: tuple[str, ...] | None = Field(
        default=None, description="domains that it is about; null: all"
    )
    after: tuple[str, ...] = Field(
        default=(), description="stages that it waits for and does not load"
    )
    # A run.yaml of an older version says `seeded_as`, also where it is null.
    was: str | None = Field(
        default=None,
        validation_alias=AliasChoices("was", "seeded_as"),
        description="first name of the block, or its first `as`, which its random numbers derive"
        " from: finished and half-finished work is kept under the new name; null: its own",
    )

    @property
    def gated(self) -> GateSettings | None:
        """The gate on the stage; None where it has none."""
        return getattr(self, GATE_KEY, None)

    def inputs(self, run: RunBlocks, domains: Sequence[str]) -> Inputs:
        """Return what a stage of this block on `domains` starts from."""
        return Inputs(parent=self.from_)

    def key_of(self, role: str, name: str = "") -> str:
        """Return the key in the block of an input: of `Inputs`, the field and the name in it."""
        of = {"parent": "from", "models": "models", "data": f"data.{name}.stage"}
        return of.get(role, f"{role}.{name}")

    def policy(self, run: RunBlocks, domains: Sequence[str]) -> PolicySettings | None:
        """Return how the stage trains on rewards; None where it does not."""
        return None

    def trained_by(
        self, run: RunBlocks, domains: Sequence[str]
    ) -> tuple[OptimizerSettings, LoopSettings] | None:
        """Return the optimizer and the loop; None where nothing is trained."""
        policy = self.policy(run, domains)
        return None if policy is None else (policy.optimizer, policy.loop)

    def replay(self, run: RunBlocks, domains: Sequence[str]) -> str | None:
        """Return which experts it trains on, as `routing.replay`; None where it samples nothing."""
        policy = self.policy(run, domains)
        return None if policy is None else policy.routing.replay

    def demonstrated(self, domains: Sequence[str]) -> Sequence[str]:
        """Return the domains whose demonstrations it reads."""
        return ()

    def read(self, run: RunBlocks, domains: Sequence[str]) -> dict[str, Any]:
        """Return all of the block that a stage's result may depend on, as plain values."""
        return self.model_dump(mode="json")

    def run_keys(self, domains: Sequence[str]) -> Iterator[str]:
        """Yield the keys of the run outside the block that the stage reads: by its kind's `reads`.

        A key stands for everything below it.
        """
        yield from with_domains(KINDS[self.kind].reads, domains)

    def violations(self, key: str, run: RunBlocks, domains: Sequence[str]) -> Violations:
        """Yield (dotted key, message) for each broken rule of the block at `key`."""
        yield from ()


class TrainedStageSettings(StageSettings):
    """The keys of a stage that states its own optimizer and loop."""

    optimizer: OptimizerSettings
    loop: LoopSettings

    def trained_by(
        self, run: RunBlocks, domains: Sequence[str]
    ) -> tuple[OptimizerSettings, LoopSettings]:
        return self.optimizer, self.loop


@dataclass(frozen=True)
class StageKind:
    """A declared kind of stage.

    `work` is the module whose `run(job)` does it on every rank. `reads` are the keys of the run,
    besides the stage's own block, that its result depends on: a key stands for everything below it,
    and `{domain}` for each of the stage's domains. A change elsewhere leaves the stage valid.
    `script` is the file of slurm/ that runs it, without its suffix. The traits are all that the
    pipeline knows of a kind: none of its files names one.

    Traits:
        samples: it needs engines.
        merges: its model is made of the weights of `models`; other kinds only compare with theirs.
        imports: without a parent it starts from `model.initial_weights`.
        exports_itself: besides its checkpoints it leaves its model as a Hugging Face checkpoint.
        evaluates: its results enter the run's results.json, and its answers can be compared.
        judges: it is a gate, whose verdict lets the stages that wait for it start.
        audited: `braid audit` recomputes it from its files.
    """

    name: str
    work: str
    leaves: Literal["checkpoints", "data", "results", "export"]
    reads: tuple[str, ...]
    settings: type[StageSettings] | None = None  # None: it is made by other blocks, as a gate
    samples: bool = False
    script: str = ""
    merges: bool = False
    imports: bool = False
    exports_itself: bool = False
    evaluates: bool = False
    judges: bool = False
    audited: bool = False

    @property
    def trains(self) -> bool:
        """True where it leaves checkpoints for other stages."""
        return self.leaves == "checkpoints"

    @property
    def collects(self) -> bool:
        """True where it leaves responses for other stages to train on."""
        return self.leaves == "data"

    @property
    def measures(self) -> bool:
        """True where it leaves the accuracies of models."""
        return self.leaves == "results"

    @property
    def exports(self) -> bool:
        """True where it leaves nothing but its parent's model as a Hugging Face checkpoint."""
        return self.leaves == "export"


KINDS: dict[str, StageKind] = {}

MODEL = ("seed", "deterministic", "model")
SAMPLED = ("engine.max_model_tokens", "engine.weights")
MEASURED = (
    "domains.{domain}.prompts",
    "domains.{domain}.rewards",
    "domains.{domain}.sampling.max_response_tokens",
    "domains.{domain}.evaluation",
)


def with_domains(keys: Sequence[str], domains: Sequence[str]) -> Iterator[str]:
    """Yield keys, those with `{domain}` once for each of the domains."""
    for key in keys:
        for domain in domains if "{domain}" in key else ("",):
            yield key.replace("{domain}", domain)


def register(kind: StageKind) -> StageKind:
    """Add a kind.

    Raises:
        ValueError: another kind has the name.
    """
    if kind.name in KINDS:
        raise ValueError(f"kind {kind.name} is registered twice; rename one of them")
    KINDS[kind.name] = kind
    return kind
