"""`sft`: supervised fine-tuning on demonstrations, such as a cold start."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from parallel.errors import hint
from parallel.settings import MOST, Count, OptimizerSettings, RoutingLossSettings, Settings
from stages.data.settings import ConversationFileSettings
from stages.domains import LoopSettings
from stages.guards.settings import GainGateSettings
from stages.kinds.kind import (
    MODEL,
    Found,
    Inputs,
    RunBlocks,
    StageKind,
    StageSettings,
    register,
    with_domains,
)
from stages.kinds.rules import At, too_few, under, warmup_rules


class SftRoutingSettings(RoutingLossSettings):
    """The router losses of supervised fine-tuning, by default with load balancing."""

    load_balance: Annotated[float, Field(ge=0)] = Field(
        default=1e-3, description="coefficient of the load-balancing loss"
    )


class WeightSettings(Settings):
    """The share of a source in a mixture."""

    weight: Annotated[float, Field(gt=0, le=MOST)] = Field(
        default=1.0, description="its share of the sequences, relative to the other sources'"
    )


class CollectedSourceSettings(WeightSettings):
    """The responses that a stage of the run collected, such as one of kind sample."""

    source: Literal["stage"] = "stage"
    stage: str = Field(
        description="a stage that collects responses, or the path of its directory in another run"
    )


class DomainSourceSettings(WeightSettings):
    """The demonstrations of a domain."""

    source: Literal["domain"] = "domain"
    domain: str = Field(description="domain whose demonstrations these are")


class JsonlSourceSettings(WeightSettings, ConversationFileSettings):
    """One JSON object a line."""

    source: Literal["jsonl"] = "jsonl"


class ParquetSourceSettings(WeightSettings, ConversationFileSettings):
    """Parquet, read a row group at a time."""

    source: Literal["parquet"] = "parquet"


def source_of(given: Any) -> str | None:
    """Return the kind of a source, which `stage` and `domain` say too."""
    if not isinstance(given, dict):
        return getattr(given, "source", None)
    said = (name for name in ("stage", "domain") if name in given)
    found = given.get("source", next(said, None))
    return None if found is None else str(found)


SftSource = Annotated[
    Annotated[CollectedSourceSettings, Tag("stage")]
    | Annotated[DomainSourceSettings, Tag("domain")]
    | Annotated[JsonlSourceSettings, Tag("jsonl")]
    | Annotated[ParquetSourceSettings, Tag("parquet")],
    Discriminator(source_of),
]


class SftSettings(StageSettings):
    """Supervised fine-tuning on the demonstrations of its domains, or on a mixture of sources.

    Without `from` it starts from the model settings: model.initial_weights, or random weights.
    """

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
    optimizer: OptimizerSettings
    loop: LoopSettings
    gate: GainGateSettings | None = Field(
        default=None, description="gate that it must pass before dependent stages start"
    )

    def demonstrated(self, domains: Sequence[str]) -> Sequence[str]:
        """Return the domains whose demonstrations it trains on."""
        if not self.data:
            return domains
        named = [
            each.domain for each in self.data.values() if isinstance(each, DomainSourceSettings)
        ]
        return [name for name in domains if name in named]

    def files(self) -> Iterator[tuple[str, ConversationFileSettings]]:
        """Yield every source of files, with its name."""
        for name, each in self.data.items():
            if isinstance(each, ConversationFileSettings):
                yield name, each

    def inputs(self, run: RunBlocks, domains: Sequence[str]) -> Inputs:
        collected = {
            name: each.stage
            for name, each in self.data.items()
            if isinstance(each, CollectedSourceSettings)
        }
        return Inputs(parent=self.from_, data=collected)

    def read(self, run: RunBlocks, domains: Sequence[str]) -> dict[str, Any]:
        if not self.data:
            # As before there were sources: else every finished cold start would be stale.
            return self.model_dump(mode="json", exclude={"data", "sequences_per_step"})
        # All that a mixture reads of domains that it does not name; it is the same in all of them.
        held_out = run.domains[domains[0]].prompts.held_out_fraction
        return {**self.model_dump(mode="json"), "held_out_fraction": held_out}

    def run_keys(self, domains: Sequence[str]) -> Iterator[str]:
        yield from with_domains(SFT.reads, self.demonstrated(domains))

    def trained_by(
        self, run: RunBlocks, domains: Sequence[str]
    ) -> tuple[OptimizerSettings, LoopSettings]:
        return self.optimizer, self.loop

    def violations(self, key: str, run: RunBlocks, domains: Sequence[str]) -> Found:
        yield from warmup_rules(under(key), self.optimizer, self.loop)
        if self.data:
            yield from self._data_rules(under(key), run, domains)
            return
        if self.sequences_per_step is not None:
            why = "only read with data; without it each domain's demonstrations.sequences_per_step"
            yield f"{key}.sequences_per_step", f"{why} counts: use null, or add data"
        sources = [run.domains[name].demonstrations for name in domains]
        if (total := sum(each.sequences_per_step for each in sources)) < run.layout.data:
            few = f"the sum of demonstrations.sequences_per_step is {total}, {too_few(run.layout)}"
            yield key, few

    def _data_rules(self, at: At, run: RunBlocks, domains: Sequence[str]) -> Found:
        """Check the sources of a mixture."""
        if self.sequences_per_step is None:
            yield at("sequences_per_step"), "required with data: the sequences of a step"
        elif self.sequences_per_step < run.layout.data:
            yield at("sequences_per_step"), f"{self.sequences_per_step} is {too_few(run.layout)}"
        for name, each in self.data.items():
            own, most = at(f"data.{name}"), run.model.max_positions
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", name):
                yield own, "a source's name must be 1 to 100 letters, digits, _ or -"
            if isinstance(each, DomainSourceSettings) and each.domain not in domains:
                why = f"no such domain of the stage: {each.domain}; {hint(each.domain, domains)}"
                yield f"{own}.domain", why
            if isinstance(each, ConversationFileSettings) and (each.max_tokens or 0) > most:
                more = f"{each.max_tokens} is more than model.max_positions = {most}"
                yield f"{own}.max_tokens", more


SFT = register(
    StageKind(
        "sft",
        "stages.sft",
        "checkpoints",
        (*MODEL, "domains.{domain}.prompts", "domains.{domain}.demonstrations"),
        SftSettings,
    )
)
