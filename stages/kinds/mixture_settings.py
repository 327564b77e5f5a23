"""The settings of stages that train on a mixture of sources: files, and what stages collected."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from parallel.settings import MOST, RoutingLossSettings, Settings
from stages.data.settings import FileSettings
from stages.guards.settings import GainGateSettings
from stages.kinds.kind import Inputs, RunBlocks, TrainedStageSettings, Violations
from stages.kinds.rules import too_few, under, warmup_rules


class SourceSettings(Settings):
    """A source of a mixture, and its share."""

    weight: Annotated[float, Field(gt=0, le=MOST)] = Field(
        default=1.0, description="its share of the sequences, relative to the other sources'"
    )


class StageSourceSettings(SourceSettings):
    """The responses that a stage collected, such as one of kind sample."""

    source: Literal["stage"] = "stage"
    stage: str = Field(
        description="a stage that collects responses, or the path of its directory in another run"
    )


def source_of(source: Any) -> str | None:
    """Return the kind of a source, which `stage` and `domain` say too."""
    if not isinstance(source, dict):
        return getattr(source, "source", None)
    shorthands = (name for name in ("stage", "domain") if name in source)
    kind = source.get("source", next(shorthands, None))
    return None if kind is None else str(kind)


class MixtureStageSettings(TrainedStageSettings):
    """The keys of a stage that deals a step's sequences to the sources in `data`."""

    if TYPE_CHECKING:
        data: Mapping[str, SourceSettings]
        routing: RoutingLossSettings

    counted: ClassVar[str]  # the field of the number that a step deals to `data`
    gate: GainGateSettings | None = Field(
        default=None, description="gate that it must pass before dependent stages start"
    )

    def inputs(self, run: RunBlocks, domains: Sequence[str]) -> Inputs:
        collected = {
            name: source.stage
            for name, source in self.data.items()
            if isinstance(source, StageSourceSettings)
        }
        return Inputs(parent=self.from_, data=collected)

    def files(self) -> Iterator[tuple[str, FileSettings]]:
        """Yield every source of files, with its name."""
        for name, source in self.data.items():
            if isinstance(source, FileSettings):
                yield name, source

    def violations(self, key: str, run: RunBlocks, domains: Sequence[str]) -> Violations:
        yield from warmup_rules(under(key), self.optimizer, self.loop)
        count = getattr(self, self.counted) if self.data else run.layout.data
        if count is None:
            yield f"{key}.{self.counted}", "required with data: the sequences of a step"
        elif count < run.layout.data:
            yield f"{key}.{self.counted}", f"{count} is {too_few(run.layout)}"
        most = run.model.max_positions
        for name, source in self.data.items():
            source_key = f"{key}.data.{name}"
            # A dot would make several parts of the name in dotted keys, as of files' digests.
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", name):
                yield source_key, "a source's name must be 1 to 100 letters, digits, _ or -"
            if (longest := getattr(source, "max_tokens", None)) and longest > most:
                why = f"{longest} is more than model.max_positions = {most}"
                yield f"{source_key}.max_tokens", why
