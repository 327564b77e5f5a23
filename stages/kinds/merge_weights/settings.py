"""`merge_weights`: the merge of several models into one by arithmetic on their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from parallel.errors import hint
from parallel.families import traits
from parallel.settings import Count, Settings
from stages.data.settings import GeneratedDemonstrationSettings, ReasoningGymPromptSettings
from stages.kinds.kind import (
    MODEL,
    SOURCE,
    Inputs,
    RunBlocks,
    StageKind,
    StageSettings,
    Violations,
    register,
    with_domains,
)
from stages.kinds.merge_weights.methods import WeightMethodSettings
from stages.kinds.merge_weights.methods.average import AverageSettings


def _models(value: Any) -> Any:
    """Reject what is neither form, in one message instead of one for each."""
    by_name = isinstance(value, dict) and all(isinstance(model, str) for model in value.values())
    if not by_name and not isinstance(value, str):
        message = "should be a block with for_each: domain, or a mapping of free names to models"
        raise PydanticCustomError("models", message)
    return value


class RecalibrationSettings(Settings):
    """The data that the routers of a merge are recalibrated on."""

    data: Literal["prompts", "demonstrations"] = Field(
        default="prompts",
        description="prompts: training prompts of each model's domain, without responses."
        " demonstrations: those of the domain, with their prompts",
    )
    samples: Count = Field(default=128, description="prompts or demonstrations of each domain")


class MergeWeightsSettings(StageSettings):
    """A merge of models by their weights alone: it samples nothing and trains nothing.

    `from` is the model that all of them started from; average reads none.
    """

    kind: Literal["merge_weights"] = "merge_weights"
    models: Annotated[str | dict[str, str], BeforeValidator(_models)] = Field(
        description="models by free names; or a block with for_each: domain, for its stage of each"
        f" domain, named as the domain. Each is {SOURCE}"
    )
    weights: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        default={}, description="weights of models, by their names in `models`; of the others 1"
    )
    method: WeightMethodSettings = Field(
        default=AverageSettings(),
        description="how weights are merged; its name, or a block with keys",
    )
    routers: Literal["merged", "kept", "recalibrated"] = Field(
        default="merged",
        description="weights of the routers. merged: as all others. kept: those of `from`."
        " recalibrated: those that route samples of each model's domain as that model's router"
        " does, as far as one router can (HARC, arXiv 2606.03391); each model has the name of its"
        " domain",
    )
    recalibration: RecalibrationSettings = Field(
        default=RecalibrationSettings(), description="data of `routers: recalibrated`"
    )

    @field_validator("method", mode="before")
    @classmethod
    def _block_of_name(cls, method: Any) -> Any:
        return {"name": method} if isinstance(method, str) else method

    @property
    def reads_start(self) -> bool:
        """True where the merge reads the weights of `from`."""
        return self.method.needs_start or self.routers == "kept"

    def names(self, domains: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the models, in the order in which they are added up."""
        return tuple(domains) if isinstance(self.models, str) else tuple(self.models)

    def demonstrated(self, domains: Sequence[str]) -> Sequence[str]:
        """Return the domains whose demonstrations it reads."""
        reads = self.routers == "recalibrated" and self.recalibration.data == "demonstrations"
        return [name for name in self.names(domains) if name in domains] if reads else []

    def inputs(self, run: RunBlocks, domains: Sequence[str]) -> Inputs:
        if isinstance(self.models, str):
            return Inputs(parent=self.from_, references=dict.fromkeys(domains, self.models))
        return Inputs(parent=self.from_, models=self.models)

    def key_of(self, role: str, name: str = "") -> str:
        if role == "references":
            return "models"
        return f"models.{name}" if role == "models" else super().key_of(role, name)

    def read(self, run: RunBlocks, domains: Sequence[str]) -> dict[str, Any]:
        """Return the block and its models' names: their order is that of the sums."""
        block = {**super().read(run, domains), "names": list(self.names(domains))}
        if self.routers != "recalibrated":
            del block["recalibration"]
        return block

    def run_keys(self, domains: Sequence[str]) -> Iterator[str]:
        """Yield the keys of the run that it reads.

        The seed only where the method draws, or samples are drawn to recalibrate the routers.
        """
        if self.routers == "recalibrated":
            yield from super().run_keys(self.names(domains))
            keys = ["domains.{domain}.demonstrations"]
            yield from with_domains(keys, self.demonstrated(domains))
        else:
            yield from ("seed", "model") if self.method.draws else ("model",)

    def violations(self, key: str, run: RunBlocks, domains: Sequence[str]) -> Violations:
        if self.reads_start and self.from_ is None:
            why = f"method {self.method.name}" if self.method.needs_start else "routers: kept"
            yield f"{key}.from", f"{why} reads the model that all others started from; name it"
        yield from self._recalibration_violations(key, run, domains)
        names = self.names(domains)
        if len(names) < 2:
            yield f"{key}.models", f"{len(names)} model cannot be merged; name at least two"
        if isinstance(self.models, dict):
            yield from self._twice(key, self.models)
        elif (block := run.stages.get(self.models)) and block.for_each is None:
            yield (
                f"{key}.models",
                f"{self.models} is one stage, and at least two models are merged; name a block with"
                " for_each: domain, or map free names to models",
            )
        for name in sorted(set(self.weights) - set(names)):
            yield f"{key}.weights.{name}", f"no such model: {name}; {hint(name, names)}"
        if self.weights and not self.method.weighted:
            why = f"{self.method.name} calculates its own weights; leave these out"
            yield f"{key}.weights", why
        if names and not any(self.weights.get(name, 1) for name in names):
            yield f"{key}.weights", "the weights of all models are 0; give at least one a weight"

    def _recalibration_violations(
        self, key: str, run: RunBlocks, domains: Sequence[str]
    ) -> Violations:
        if self.routers != "recalibrated":
            if self.recalibration != RecalibrationSettings():
                yield f"{key}.recalibration", "only of routers: recalibrated; remove it"
            return
        if traits(run.model).biased_experts:
            biased = f"{run.model.family}' have biases too"
            message = f"recalibrated solves for a router's weight, and {biased}"
            yield f"{key}.routers", f"{message}; use merged or kept"
        if unknown := [name for name in self.names(domains) if name not in domains]:
            yield (
                f"{key}.models",
                f"{', '.join(unknown)}: no domain of the stage, and routers: recalibrated reads"
                f" samples of each model's; name each model as its domain: {', '.join(domains)}",
            )
        for name in self.demonstrated(domains):
            domain = run.domains[name]
            generated = isinstance(domain.demonstrations, GeneratedDemonstrationSettings)
            if generated and not isinstance(domain.prompts, ReasoningGymPromptSettings):
                yield (
                    f"{key}.recalibration.data",
                    f"{name} has no demonstrations; state domains.{name}.demonstrations, or use"
                    " prompts",
                )

    @staticmethod
    def _twice(key: str, models: dict[str, str]) -> Violations:
        name_of: dict[str, str] = {}
        for name, model in models.items():
            if (other := name_of.setdefault(model, name)) != name:
                why = f"{model} is {other} too; give one of them a weight instead"
                yield f"{key}.models.{name}", why


MERGE_WEIGHTS = register(
    StageKind(
        "merge_weights",
        "stages.kinds.merge_weights.work",
        "checkpoints",
        (*MODEL, "domains.{domain}.prompts"),
        MergeWeightsSettings,
        merges=True,
    )
)
