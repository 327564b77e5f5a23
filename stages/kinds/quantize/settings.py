"""`quantize`: a model with its linear layers' weights in fewer bits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import Field

from parallel.families import traits
from parallel.settings import Count, ModelSettings
from parallel.weights.quantizable import VllmMatrix, quantizable
from stages.guards.settings import LossGateSettings
from stages.kinds.kind import MODEL, RunBlocks, StageKind, StageSettings, Violations, register

GROUP_SIZES = {"int8": 128, "int4": 128, "nvfp4": 16}  # weights that share a scale, by default
GROUPED = ("int8", "int4")  # the formats whose group size is free


class QuantizeSettings(StageSettings):
    """The rounding of a model's weights to fewer bits: a checkpoint for the run, and one for vLLM.

    Linear layers are quantized, of the attention, dense layers and experts. Routers, the head,
    embeddings, norms and biases stay as they are.
    """

    kind: Literal["quantize"] = "quantize"
    format: Literal["fp8", "nvfp4", "int8", "int4"] = Field(
        description="of the weights. fp8: E4M3 with a scale for each row. nvfp4: E2M1 with an E4M3"
        " scale for each 16 weights. int8, int4: integers with a scale for each group_size weights"
    )
    group_size: Literal[32, 64, 128] | None = Field(
        default=None,
        description="consecutive weights of a row that share a scale, of int8 and int4; null: 128",
    )
    calibration: Count = Field(
        default=128,
        description="training prompts of each domain that the scales are calibrated on",
    )
    exclude: tuple[str, ...] = Field(
        default=(),
        description="tensors that also stay as they are, as patterns of their Hugging Face names,"
        " such as model.layers.0.* or *.self_attn.*",
    )
    gate: LossGateSettings | None = Field(
        default=None, description="gate on the accuracy that it loses; dependent stages wait for it"
    )

    @property
    def group(self) -> int | None:
        """The number of weights that share a scale; None where a row does."""
        stated = self.group_size if self.format in GROUPED else None  # else an error of its own
        return stated or GROUP_SIZES.get(self.format)

    def violations(self, key: str, run: RunBlocks, domains: Sequence[str]) -> Violations:
        if self.from_ is None:
            yield f"{key}.from", "must name the stage whose model is quantized"
        if reason := traits(run.model).unquantized:
            message = f"{run.model.family} is not quantized: {reason}"
            yield key, f"{message}; remove the stage"
            return
        if self.group_size is not None and self.format not in GROUPED:
            yield f"{key}.group_size", f"only of format {' and '.join(GROUPED)}; remove it"
        matrices = list(quantizable(run.model))
        names = [name for matrix in matrices for name, _ in matrix.tensors]
        for pattern in self.exclude:
            if not any(fnmatchcase(name, pattern) for name in names):
                examples = ", ".join(_examples(run.model, names))
                yield (
                    f"{key}.exclude",
                    f"{pattern} is of no tensor to quantize; those are {examples}",
                )
        if (torn := self._torn(matrices)) is not None:
            yield (
                f"{key}.exclude",
                f"leaves {torn[1]} alone in {torn[0]}, which vLLM loads as one; exclude all of it",
            )
        quantized = self.quantized(run.model)
        if not quantized:
            yield f"{key}.exclude", "leaves nothing to quantize; remove a pattern"
        for matrix in quantized:
            name, (_, columns) = matrix.tensors[0]
            if columns % (self.group or 1):
                yield (
                    f"{key}.group_size" if self.format in GROUPED else f"{key}.format",
                    f"{self.group} weights have a scale, and do not divide the {columns} columns of"
                    f" {name}; {_remedy(self, columns)}",
                )
                break

    def quantized(self, model: ModelSettings) -> list[VllmMatrix]:
        """Return the matrices that are quantized, in the model's order."""
        return [matrix for matrix in quantizable(model) if not self._excludes(matrix.tensors[0][0])]

    def _excludes(self, tensor: str) -> bool:
        return any(fnmatchcase(tensor, pattern) for pattern in self.exclude)

    def _torn(self, matrices: Sequence[VllmMatrix]) -> tuple[str, str] | None:
        """Return a module of vLLM that would be quantized in part, and a tensor of it that is."""
        excluded: dict[str, dict[bool, str]] = {}
        for matrix in matrices if self.exclude else ():
            for name, _ in matrix.tensors:
                of = excluded.setdefault(matrix.module, {})
                of.setdefault(self._excludes(name), name)
                if len(of) == 2:
                    return matrix.module, of[False]
        return None


def _remedy(settings: QuantizeSettings, columns: int) -> str:
    fitting = [size for size in (64, 32) if columns % size == 0]
    if settings.format in GROUPED and fitting:
        return f"set {fitting[0]}, or exclude it"
    return "exclude it, or use format: fp8"


def _examples(model: ModelSettings, names: Sequence[str]) -> list[str]:
    """Return the names of the last layer's tensors, with N for the number of an expert."""
    last = f"model.layers.{model.layers - 1}."
    examples = (re.sub(r"experts\.\d+", "experts.N", name) for name in names if last in name)
    return list(dict.fromkeys(examples))


QUANTIZE = register(
    StageKind(
        "quantize",
        "stages.kinds.quantize.work",
        "checkpoints",
        (*MODEL, "domains.{domain}.prompts"),
        QuantizeSettings,
        exports_itself=True,
    )
)
