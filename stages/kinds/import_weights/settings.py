"""`import`: a model from outside the run, such as a Hugging Face checkpoint, as its first stage."""

from __future__ import annotations

from typing import Literal

from stages.kinds.kind import RunBlocks, StageKind, StageSettings, Violations, register


class ImportSettings(StageSettings):
    """The import of a model: of `from`, or of model.initial_weights where that is null."""

    kind: Literal["import"] = "import"

    def violations(self, key: str, run: RunBlocks, domains: object) -> Violations:
        if self.from_ is None and run.model.initial_weights is None:
            yield (
                f"{key}.from",
                "null imports model.initial_weights, which is not set; name a checkpoint in one of"
                " them",
            )


IMPORT = register(
    StageKind(
        "import",
        "stages.kinds.import_weights.work",
        "checkpoints",
        ("model",),
        ImportSettings,
        imports=True,
    )
)
