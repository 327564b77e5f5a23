"""`dpo`: preference optimisation on pairs of a chosen and a rejected response to a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from parallel.settings import Count, OptimizerSettings, RoutingLossSettings, Tokens
from stages.data.settings import FileSettings
from stages.domains import LoopSettings
from stages.guards.settings import GainGateSettings
from stages.kinds.kind import (
    MODEL,
    SOURCE,
    Found,
    Inputs,
    RunBlocks,
    StageKind,
    StageSettings,
    register,
)
from stages.kinds.rules import too_few, under, warmup_rules
from stages.kinds.sft import CollectedSourceSettings, WeightSettings, source_of
from stages.objectives.preference import PreferenceSettings, SigmoidSettings

PARENT, REFERENCE = "parent", "reference"


class PairSettings(WeightSettings):
    """A source of preference pairs."""

    max_tokens: Tokens | None = Field(
        default=None,
        description="pairs with a longer sequence are skipped and counted; null is"
        " model.max_positions",
    )


class CollectedPairSettings(CollectedSourceSettings, PairSettings):
    """The best and the worst response to each prompt among those that a stage collected.

    A prompt whose responses have one reward gives no pair.
    """


class FilePairSettings(PairSettings, FileSettings):
    """Preference pairs in files, one a row, without the prompts that domains hold out."""

    prompt: str = Field(
        default="prompt", description="column of the prompt: text, or a list of chat messages"
    )
    chosen: str = Field(
        default="chosen",
        description="column of the preferred response: text, or chat messages that start and end"
        " with an assistant turn",
    )
    rejected: str = Field(default="rejected", description="column of the other response, alike")


class JsonlPairSettings(FilePairSettings):
    """One JSON object a line."""

    source: Literal["jsonl"] = "jsonl"


class ParquetPairSettings(FilePairSettings):
    """Parquet, read a row group at a time."""

    source: Literal["parquet"] = "parquet"


PairSource = Annotated[
    Annotated[CollectedPairSettings, Tag("stage")]
    | Annotated[JsonlPairSettings, Tag("jsonl")]
    | Annotated[ParquetPairSettings, Tag("parquet")],
    Discriminator(source_of),
]


class DpoSettings(StageSettings):
    """Preference optimisation: chosen responses become likelier than rejected ones.

    Both are compared with a reference, whose log-probabilities are computed once.
    """

    kind: Literal["dpo"] = "dpo"
    data: Annotated[dict[str, PairSource], Field(min_length=1)] = Field(
        description="sources of preference pairs, by free names: {stage: NAME} or files, each with"
        " a weight"
    )
    pairs_per_step: Count = Field(
        default=32, description="pairs of a step, dealt to the sources of `data` by their weights"
    )
    loss: PreferenceSettings = SigmoidSettings()
    reference: str = Field(
        default=PARENT,
        description="model that the policy is compared with: parent, which is what it starts from;"
        f" {SOURCE}",
    )
    routing: RoutingLossSettings = RoutingLossSettings()
    optimizer: OptimizerSettings
    loop: LoopSettings
    gate: GainGateSettings | None = Field(
        default=None, description="gate that it must pass before dependent stages start"
    )

    def inputs(self, run: RunBlocks, domains: Sequence[str]) -> Inputs:
        return Inputs(
            parent=self.from_,
            models={} if self.reference == PARENT else {REFERENCE: self.reference},
            data={
                name: source.stage
                for name, source in self.data.items()
                if isinstance(source, CollectedPairSettings)
            },
        )

    def files(self) -> Iterator[tuple[str, FileSettings]]:
        """Yield every source of files, with its name."""
        for name, each in self.data.items():
            if isinstance(each, FileSettings):
                yield name, each

    def key_of(self, role: str, name: str = "") -> str:
        return REFERENCE if role == "models" else super().key_of(role, name)

    def trained_by(
        self, run: RunBlocks, domains: Sequence[str]
    ) -> tuple[OptimizerSettings, LoopSettings]:
        return self.optimizer, self.loop

    def read(self, run: RunBlocks, domains: Sequence[str]) -> dict[str, Any]:
        """Return the block without the names of its inputs, whose digests are in the lineage."""
        found = super().read(run, domains)
        del found[REFERENCE]
        for source in found["data"].values():
            source.pop("stage", None)
        return found

    def violations(self, key: str, run: RunBlocks, domains: Sequence[str]) -> Found:
        at = under(key)
        if self.from_ is None:
            yield at("from"), "must name what the policy starts from; it is also the reference"
        if self.reference == self.from_:
            yield at(REFERENCE), f"{self.reference} is what the stage starts from; write parent"
        most = run.model.max_positions
        for name, source in self.data.items():
            if (longest := source.max_tokens) and longest > most:
                where = at(f"data.{name}.max_tokens")
                yield where, f"{longest} is more than model.max_positions = {most}"
            if isinstance(source, FilePairSettings) and source.chosen == source.rejected:
                where = at(f"data.{name}.rejected")
                yield where, f"{source.rejected} is the column of `chosen` too; name another one"
        if self.pairs_per_step < run.layout.data:
            yield at("pairs_per_step"), f"{self.pairs_per_step} is {too_few(run.layout)}"
        yield from warmup_rules(at, self.optimizer, self.loop)


DPO = register(
    StageKind(
        "dpo",
        "stages.dpo",
        "checkpoints",
        (*MODEL, "domains.{domain}.prompts"),
        DpoSettings,
    )
)
