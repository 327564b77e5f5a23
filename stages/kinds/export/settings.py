"""`export`: a model as a Hugging Face checkpoint."""

from __future__ import annotations

from typing import Literal

from stages.kinds.kind import RunBlocks, StageKind, StageSettings, Violations, register


class ExportSettings(StageSettings):
    """The export of the model of `from`, for transformers and vLLM."""

    kind: Literal["export"] = "export"

    def violations(self, key: str, run: RunBlocks, domains: object) -> Violations:
        if self.from_ is None:
            yield f"{key}.from", "must name the stage whose model is exported"


EXPORT = register(
    StageKind("export", "stages.kinds.export.work", "export", ("model",), ExportSettings)
)
