"""`dpo`: preference optimisation on pairs of a chosen and a rejected response to a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from parallel.settings import Count, RoutingLossSettings, Tokens
from stages.data.settings import ToolFileSettings
from stages.kinds.kind import MODEL, SOURCE, Inputs, RunBlocks, StageKind, Violations, register
from stages.kinds.mixture_settings import (
    MixtureStageSettings,
    SourceSettings,
    StageSourceSettings,
    source_of,
)
from stages.objectives.preference import PreferenceSettings, SigmoidSettings

PARENT, REFERENCE = "parent", "reference"


class PairSettings(SourceSettings):
    """A source of preference pairs."""

    max_tokens: Tokens | None = Field(
        default=None,
        description="pairs with a longer sequence are skipped and counted; null is"
        " model.max_positions",
    )


class BestWorstPairSettings(StageSourceSettings, PairSettings):
    """The best and the worst response to each prompt among those that a stage collected.

    A prompt whose responses have one reward gives no pair.
    """


class FilePairSettings(PairSettings, ToolFileSettings):
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

    def columns(self) -> dict[str, str]:
        return {"prompt": self.prompt, "chosen": self.chosen, "rejected": self.rejected}


class JsonlPairSettings(FilePairSettings):
    """One JSON object a line."""

    source: Literal["jsonl"] = "jsonl"


class ParquetPairSettings(FilePairSettings):
    """Parquet, read a row group at a time."""

    source: Literal["parquet"] = "parquet"


class ArrowPairSettings(FilePairSettings):
    """Arrow files of Hugging Face's `save_to_disk`, or of its cache."""

    source: Literal["arrow"] = "arrow"


PairSource = Annotated[
    Annotated[BestWorstPairSettings, Tag("stage")]
    | Annotated[JsonlPairSettings, Tag("jsonl")]
    | Annotated[ParquetPairSettings, Tag("parquet")]
    | Annotated[ArrowPairSettings, Tag("arrow")],
    Discriminator(source_of),
]


class DpoSettings(MixtureStageSettings):
    """Preference optimisation: chosen responses become likelier than rejected ones.

    Both are compared with a reference, whose log-probabilities are computed once.
    """

    counted = "pairs_per_step"
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

    def inputs(self, run: RunBlocks, domains: Sequence[str]) -> Inputs:
        models = {} if self.reference == PARENT else {REFERENCE: self.reference}
        return replace(super().inputs(run, domains), models=models)

    def key_of(self, role: str, name: str = "") -> str:
        return REFERENCE if role == "models" else super().key_of(role, name)

    def read(self, run: RunBlocks, domains: Sequence[str]) -> dict[str, Any]:
        """Return the block without the names of its inputs, whose digests are in the lineage."""
        block = super().read(run, domains)
        del block[REFERENCE]
        for source in block["data"].values():
            source.pop("stage", None)
        return block

    def violations(self, key: str, run: RunBlocks, domains: Sequence[str]) -> Violations:
        if self.from_ is None:
            yield f"{key}.from", "must name what the policy starts from; it is also the reference"
        if self.reference == self.from_:
            why = f"{self.reference} is what the stage starts from; write parent"
            yield f"{key}.{REFERENCE}", why
        for name, source in self.data.items():
            if isinstance(source, FilePairSettings) and source.chosen == source.rejected:
                why = f"{source.rejected} is the column of `chosen` too; name another one"
                yield f"{key}.data.{name}.rejected", why
        yield from super().violations(key, run, domains)


DPO = register(
    StageKind(
        "dpo",
        "stages.kinds.dpo.work",
        "checkpoints",
        (*MODEL, "domains.{domain}.prompts"),
        DpoSettings,
        audited=True,
    )
)
