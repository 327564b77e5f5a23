"""`sft`: supervised fine-tuning on demonstrations, such as a cold start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from parallel.settings import OptimizerSettings, RoutingLossSettings
from stages.domains import LoopSettings
from stages.guards.settings import GainGateSettings
from stages.kinds.kind import MODEL, Found, RunBlocks, StageKind, StageSettings, register
from stages.kinds.rules import too_few, under, warmup_rules


class SftRoutingSettings(RoutingLossSettings):
    """The router losses of supervised fine-tuning, by default with load balancing."""

    load_balance: Annotated[float, Field(ge=0)] = Field(
        default=1e-3, description="coefficient of the load-balancing loss"
    )


class SftSettings(StageSettings):
    """Supervised fine-tuning on the demonstrations of its domains.

    Without `from` it starts from the model settings: model.initial_weights, or random weights.
    """

    kind: Literal["sft"] = "sft"
    routing: SftRoutingSettings = SftRoutingSettings()
    optimizer: OptimizerSettings
    loop: LoopSettings
    gate: GainGateSettings | None = Field(
        default=None, description="gate that it must pass before dependent stages start"
    )

    def demonstrated(self, domains: Sequence[str]) -> Sequence[str]:
        """Return the domains whose demonstrations it trains on."""
        return domains

    def trained_by(
        self, run: RunBlocks, domains: Sequence[str]
    ) -> tuple[OptimizerSettings, LoopSettings]:
        return self.optimizer, self.loop

    def violations(self, key: str, run: RunBlocks, domains: Sequence[str]) -> Found:
        yield from warmup_rules(under(key), self.optimizer, self.loop)
        sources = [run.domains[name].demonstrations for name in domains]
        if (total := sum(each.sequences_per_step for each in sources)) < run.layout.data:
            few = f"the sum of demonstrations.sequences_per_step is {total}, {too_few(run.layout)}"
            yield key, few


SFT = register(
    StageKind(
        "sft",
        "stages.sft",
        "checkpoints",
        (*MODEL, "domains.{domain}.prompts", "domains.{domain}.demonstrations"),
        SftSettings,
    )
)
