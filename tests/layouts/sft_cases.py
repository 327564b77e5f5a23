"""The cases that ranks run with a cold start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parallel.settings import LayoutSettings
from tests.layouts.cases import MODEL


def train(
    layout: LayoutSettings, data: str, tokenizer: str, output: str | None
) -> tuple[list[dict[str, float]], list[Any]]:
    """Run three steps and export to `output`; return metrics, and the samples of steps 2 and 3.

    Each step has the samples of a stage resumed after step 1, and those of the running stage.
    """
    from parallel.distributed import is_main
    from stages.kinds.export.work import export

    stage = _stage(layout, data, tokenizer)
    metrics = [stage.step(1)]
    resumed = _stage(layout, data, tokenizer)
    resumed.restore(stage.state())
    drawn = []
    for step in (2, 3):
        if is_main():
            drawn.append((_ids(resumed, step), _ids_of_copy(stage, step)))
        metrics.append(stage.step(step))
    if output:
        export(stage.policy, Path(output))
    return metrics, drawn


def _stage(layout: LayoutSettings, data: str, tokenizer: str) -> Any:
    """Return the cold start of one domain with prompts and conversations in files."""
    from stages.kinds.sft.work import Sft
    from stages.settings import RunSettings, StageJob

    loop, optimizer = {"steps": 4}, {"learning_rate": 1e-2}
    demonstrations = {
        "source": "jsonl",
        "path": f"{data}/chats.jsonl",
        "max_tokens": 40,
        "sequences_per_step": 7,
    }
    math = {
        "prompts": {"source": "jsonl", "path": f"{data}/prompts.jsonl"},
        "demonstrations": demonstrations,
        "optimizer": optimizer,
        "loop": loop,
    }
    settings = RunSettings.model_validate(
        {
            "name": "toy",
            "model": MODEL.model_dump() | {"tokenizer": tokenizer, "vocabulary_size": 320},
            "layout": layout.model_dump(),
            "domains": {"math": math},
            "stages": {"cold_start": {"kind": "sft", "optimizer": optimizer, "loop": loop}},
            "evaluation": {"problems": 5},
        }
    )
    stage = Sft(
        StageJob.model_construct(
            stage="cold_start", block="cold_start", domains=["math"], settings=settings
        )
    )
    stage.policy.start_fresh(0)
    return stage


def _ids(stage: Any, step: int) -> list[list[int]]:
    """Draw the samples of a step; return their token ids."""
    samples, _ = stage.draw(step)
    return [[*sample.prompt, *sample.response] for sample in samples]


def _ids_of_copy(stage: Any, step: int) -> list[list[int]]:
    """Return the token ids of a step's samples without advancing the stage."""
    state = stage.state()
    ids = _ids(stage, step)
    stage.restore(state)
    return ids
