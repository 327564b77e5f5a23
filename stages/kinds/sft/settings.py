"""`sft`: supervised fine-tuning on demonstrations, such as a cold start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from parallel.errors import hint
from parallel.settings import Count, RoutingLossSettings
from stages.data.settings import ConversationFileSettings
from stages.kinds.kind import MODEL, RunBlocks, StageKind, Violations, register, with_domains
from stages.kinds.mixture_settings import (
    MixtureStageSettings,
    SourceSettings,
    StageSourceSettings,
    source_of,
)
from stages.kinds.rules import too_few


class SftRoutingSettings(RoutingLossSettings):
    """The router losses of supervised fine-tuning, by default with load balancing."""

    load_balance: Annotated[float, Field(ge=0)] = Field(
        default=1e-3, description="coefficient of the load-balancing loss"
    )


class DomainDemonstrationsSettings(SourceSettings):
    """The demonstrations of a domain."""

    source: Literal["domain"] = "domain"
    domain: str = Field(description="domain whose demonstrations these are")


class JsonlSourceSettings(SourceSettings, ConversationFileSettings):
    """One JSON object a line."""

    source: Literal["jsonl"] = "jsonl"


class ParquetSourceSettings(SourceSettings, ConversationFileSettings):
    """Parquet, read a row group at a time."""

    source: Literal["parquet"] = "parquet"


class ArrowSourceSettings(SourceSettings, ConversationFileSettings):
    """Arrow files of Hugging Face's `save_to_disk`, or of its cache."""

    source: Literal["arrow"] = "arrow"


SftSource = Annotated[
    Annotated[StageSourceSettings, Tag("stage")]
    | Annotated[DomainDemonstrationsSettings, Tag("domain")]
    | Annotated[JsonlSourceSettings, Tag("jsonl")]
    | Annotated[ParquetSourceSettings, Tag("parquet")]
    | Annotated[ArrowSourceSettings, Tag("arrow")],
    Discriminator(source_of),
]


class SftSettings(MixtureStageSettings):
    """Supervised fine-tuning on the demonstrations of its domains, or on a mixture of sources.

    Without `from` it starts from the model settings: model.initial_weights, or random weights.
    """

    counted = "sequences_per_step"
    kind: Literal["sft"] = "sft"
    data: dict[str, SftSource] = Field(
        default={},
        description="sources of a mixture, by free names: {stage: NAME}, {domain: NAME} or files,"
        " each with a weight. Empty: the demonstrations of its domains",
    )
    sequences_per_step: Count | None = Field(
        default=None,
        description="sequences of a step, dealt to the sources of `data` by their weights; null"
        " without `data`, where each domain says demonstrations.sequences_per_step",
    )
    routing: SftRoutingSettings = SftRoutingSettings()

    def demonstrated(self, domains: Sequence[str]) -> Sequence[str]:
        """Return the domains whose demonstrations it trains on."""
        if not self.data:
            return domains
        demonstrated = [
            source.domain
            for source in self.data.values()
            if isinstance(source, DomainDemonstrationsSettings)
        ]
        return [name for name in domains if name in demonstrated]

    def read(self, run: RunBlocks, domains: Sequence[str]) -> dict[str, Any]:
        if not self.data:
            # As before there were sources: else every finished cold start would be stale.
            return self.model_dump(mode="json", exclude={"data", "sequences_per_step"})
        # All that a mixture reads of domains that it does not name; it is the same in all of them.
        held_out = run.domains[domains[0]].prompts.held_out_fraction
        return {**self.model_dump(mode="json"), "held_out_fraction": held_out}

    def run_keys(self, domains: Sequence[str]) -> Iterator[str]:
        yield from with_domains(SFT.reads, self.demonstrated(domains))

    def violations(self, key: str, run: RunBlocks, domains: Sequence[str]) -> Violations:
        yield from super().violations(key, run, domains)
        for name, source in self.data.items():
            if isinstance(source, DomainDemonstrationsSettings) and source.domain not in domains:
                where, near = f"{key}.data.{name}.domain", hint(source.domain, domains)
                yield where, f"no such domain of the stage: {source.domain}; {near}"
        if self.data:
            return
        if self.sequences_per_step is not None:
            why = "only read with data; without it each domain's demonstrations.sequences_per_step"
            yield f"{key}.{self.counted}", f"{why} counts: use null, or add data"
        sources = [run.domains[name].demonstrations for name in domains]
        if (total := sum(source.sequences_per_step for source in sources)) < run.layout.data:
            few = f"the sum of demonstrations.sequences_per_step is {total}, {too_few(run.layout)}"
            yield key, few


SFT = register(
    StageKind(
        "sft",
        "stages.kinds.sft.work",
        "checkpoints",
        (*MODEL, "domains.{domain}.prompts", "domains.{domain}.demonstrations"),
        SftSettings,
        audited=True,
    )
)
