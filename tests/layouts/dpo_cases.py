"""The cases that ranks run with preference optimisation."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

from parallel.settings import LayoutSettings
from tests.layouts.cases import MODEL, SGD, build

MATH = {"prompts": {"source": "jsonl", "path": "/nowhere.jsonl"}}


def save_models(directory: str) -> None:
    """Save the models of two seeds: what the policy starts from, and its reference."""
    from parallel.checkpoint.save import Saver

    for seed in (0, 1):
        policy = build(LayoutSettings(), seed=seed)
        Saver(Path(directory) / str(seed) / "checkpoints", asynchronous=False).begin(policy, 0, {})


def job_of(data: str, output: str, layout: LayoutSettings, micro: int, reference: int = 1) -> Any:
    """Return the job of a stage on data/pairs.jsonl, whose reference is of the given seed."""
    from stages.settings import RunSettings, StageJob

    models = [Path(data) / str(seed) / "checkpoints" / "step_0" for seed in (0, reference)]
    dpo = {
        "kind": "dpo",
        "from": "parent",
        "reference": "other",
        "data": {
            "files": {"source": "jsonl", "path": f"{data}/pairs.jsonl", "max_tokens": 40},
            "more": {"source": "jsonl", "path": f"{data}/more.jsonl", "weight": 0.5},
        },
        "pairs_per_step": 9,
        "loss": {"beta": 0.3, "label_smoothing": 0.1, "logprobs": "mean"},
        "routing": {"load_balance": 0.1, "z_loss": 0.01},
        "optimizer": SGD.model_dump(),
        "loop": {"steps": 4, "micro_batch_tokens": micro},
    }
    settings = RunSettings.model_validate(
        {
            "name": "toy",
            "model": MODEL.model_dump(),
            "layout": layout.model_dump(),
            "domains": {"math": {**MATH, "optimizer": {"learning_rate": 1}, "loop": {"steps": 1}}},
            "stages": {"dpo": dpo},
        }
    )
    return StageJob(
        stage="dpo",
        kind="dpo",
        block="dpo",
        domains=["math"],
        directory=Path(output),
        attempt=1,
        parent=models[0],
        models={"reference": models[1]},
        settings=settings,
    )


def open_stage(job: Any) -> Any:
    from parallel.checkpoint import load
    from stages.kinds.dpo.work import Dpo

    stage = Dpo(job)
    load.weights(stage.policy, job.parent)
    return stage


def steps(
    data: str, output: str, layout: LayoutSettings, micro: int, expected: str
) -> tuple[list[dict[str, float]], tuple[float, str], int]:
    """Return the metrics of two steps, the largest relative error of a gradient, and micro-batches.

    The error is of the first step's gradients, from those in the file `expected`, which one rank
    writes. Gradients are whole only without a distributed optimizer.
    """
    from parallel import batch
    from parallel.model.parameters import global_name, shard, tensor_split

    layout = layout.model_copy(update={"distributed_optimizer": False})
    stage = open_stage(job_of(data, output, layout, micro))
    counts = []
    accumulate = stage.policy.accumulate

    def counted(batches: list[batch.MicroBatch], *arguments: Any) -> Any:
        counts.append(len(batches))
        for part in batches:  # a pair is in one micro-batch, in its order
            groups = [sample.group for sample in part.samples]
            assert groups[::2] == groups[1::2]
        return accumulate(batches, *arguments)

    stage.policy.accumulate = counted
    gradients: dict[str, torch.Tensor] = {}
    step = stage.policy.step

    def kept() -> float:
        if not gradients:
            for chunk in stage.policy.chunks:
                for name, parameter in chunk.named_parameters():
                    gradients[global_name(chunk, name)] = parameter.main_grad.clone()
        return step()

    stage.policy.step = kept
    metrics = [stage.step(number) for number in (1, 2)]
    if layout.ranks == 1 and not Path(expected).exists():
        torch.save(gradients, expected)
    whole, worst = torch.load(expected), (0.0, "")
    for chunk in stage.policy.chunks:
        for local, _ in chunk.named_parameters():
            name = global_name(chunk, local)
            ours = shard(local, whole[name], *tensor_split(local))
            error = (gradients[name] - ours).norm() / max(ours.norm(), 1e-6)
            worst = max(worst, (error.item(), name))
    return metrics, worst, max(counts)


def cached(data: str, output: str) -> dict[str, Any]:
    """Return what a stage, stages opened after it, and one of another reference computed."""
    from unittest import mock

    from parallel.model.policy import Policy
    from stages.kinds.dpo import reference_logprobs

    one = LayoutSettings()
    passes: list[int] = []
    evaluate = Policy.evaluate

    def counted(self: Policy, batches: Any, function: Any) -> Any:
        passes.append(sum(len(part.samples) for part in batches))
        return evaluate(self, batches, function)

    def models() -> int:
        gc.collect()
        return sum(isinstance(each, Policy) for each in gc.get_objects())

    found: dict[str, Any] = {}
    notices: list[str] = []
    with (
        mock.patch.object(Policy, "evaluate", counted),
        mock.patch.object(reference_logprobs, "report_notice", notices.append),
    ):
        for name, seed in (("first", 1), ("resumed", 1), ("other", 0), ("again", 0)):
            before = models()
            stage = open_stage(job_of(data, output, one, 512, reference=seed))
            values = [stage.reference.of(each) for each in stage.sources["files"].all()]
            found[name] = (stage.reference.computed, sum(passes), values, models() - before)
            if name == "first":
                drawn = _ids(stage)
                state = stage.state()
            if name == "resumed":
                stage.restore(state)
                ahead = open_stage(stage.job)
                ahead.draw(1)
                found["draws"] = (_ids(ahead), _ids(stage), drawn)
            passes.clear()
            del stage
        file = Path(output) / "reference.npz"
        whole = file.read_bytes()
        for name, content in (("cut", whole[:-40]), ("turned", whole[:200] + b"?" + whole[201:])):
            file.write_bytes(content)
            stage = open_stage(job_of(data, output, one, 512, reference=0))
            values = [stage.reference.of(each) for each in stage.sources["files"].all()]
            found[name] = (stage.reference.computed, sum(passes), values, 1)
            passes.clear()
    found["notices"] = notices
    found["left"] = sorted(path.name for path in Path(output).iterdir())
    return found


def _ids(stage: Any) -> list[list[int]]:
    return [
        [*sample.prompt, *sample.response]
        for pair in stage.draw(1)[0]
        for sample in (pair.chosen, pair.rejected)
    ]
