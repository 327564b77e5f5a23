"""Rules between a stage of kind `quantize` and the stages that load its model."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.unroll import Blocks
from stages.kinds.export import ExportSettings
from stages.kinds.quantize import QuantizeSettings
from stages.settings import RunSettings


def requantized(run: RunSettings) -> Iterator[tuple[str, str]]:
    """Yield each stage that would export or quantize a quantized model, as (dotted key, message).

    Its checkpoint has the weights that the quantized ones stand for, in the model's precision: an
    export would write those.
    """
    blocks = Blocks(run)
    for stage in blocks.stages:
        parent = blocks.inputs(stage).parent
        found = blocks.by_name.get(blocks.resolve(parent, stage.domain) or "") if parent else None
        if found is None or not isinstance(found.settings, QuantizeSettings):
            continue
        if isinstance(stage.settings, ExportSettings):
            yield (
                f"{stage.key}.from",
                f"{found.name} is quantized, and its stage already leaves the export:"
                f" stages/{found.name}/huggingface; remove this stage, or export"
                f" {found.settings.from_}",
            )
        elif isinstance(stage.settings, QuantizeSettings):
            yield (
                f"{stage.key}.from",
                f"{found.name} is quantized already; name the model before that,"
                f" {found.settings.from_}",
            )
