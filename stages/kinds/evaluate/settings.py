"""`evaluate`: the accuracy of models on held-out problems; and `gate`, which other blocks make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from parallel.settings import Count, Natural, Settings
from stages.kinds.kind import (
    MEASURED,
    SAMPLED,
    SOURCE,
    Inputs,
    RunBlocks,
    StageKind,
    StageSettings,
    Violations,
    register,
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
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="nucleus threshold of the answers; a domain's sampling is not read",
    )
    top_k: Natural = Field(
        default=0, description="sample answers from the k most likely tokens; 0: all"
    )
    sampling_seed: int = Field(default=20_000, ge=0, lt=2**32, description="seed of the answers")


class EvaluateSettings(StageSettings):
    """The evaluation of models on every domain, by the run's `evaluation`."""

    kind: Literal["evaluate"] = "evaluate"
    models: tuple[str, ...] | None = Field(
        default=None, description=f"what is evaluated, each {SOURCE}; null: every model of the run"
    )

    def inputs(self, run: RunBlocks, domains: Sequence[str]) -> Inputs:
        models = {name: name for name in self.models or ()}
        return Inputs(models=models, every_model=self.models is None)

    def read(self, run: RunBlocks, domains: Sequence[str]) -> dict[str, Any]:
        return {"kind": self.kind}

    def violations(self, key: str, run: RunBlocks, domains: Sequence[str]) -> Violations:
        if self.from_ is not None:
            yield f"{key}.from", f"an evaluation starts from nothing; use models: [{self.from_}]"


_MEASURING = ("seed", "model", *SAMPLED, *MEASURED)

EVALUATE = register(
    StageKind(
        "evaluate",
        "stages.kinds.evaluate.work",
        "results",
        (*_MEASURING, "evaluation"),
        EvaluateSettings,
        samples=True,
        evaluates=True,
        audited=True,
    )
)
GATE = register(
    StageKind(
        "gate",
        "stages.kinds.evaluate.work",
        "results",
        (
            *_MEASURING,
            *(f"evaluation.{key}" for key in ("temperature", "top_p", "top_k", "sampling_seed")),
        ),
        samples=True,
        judges=True,
        audited=True,
    )
)
