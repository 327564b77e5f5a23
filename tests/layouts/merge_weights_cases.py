"""The cases that ranks run with merges of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from parallel.settings import LayoutSettings
from tests.layouts.checkpoint_cases import save
from tests.layouts.hugging_face_cases import MODELS, _random

SEEDS = {"sums": 6, "words": 7}  # of the models' weights
SAMPLES = 9  # of each domain, that routers are recalibrated on; no layout divides them evenly
CHANGED = 1e-2  # the largest difference of a model from the start


def save_model(layout: LayoutSettings, model: str, name: str, directory: str) -> None:
    """Save the start, or a model near it, as `directory`/NAME/step_0; equal under every layout."""
    policy = _model(layout, model, name)
    save(policy, Path(directory) / name, 0, {})


def save_extreme(model: str, directory: str, norm: str, value: float) -> None:
    """Save a model whose first norm of a name has this value as `directory`/step_0."""
    policy = _random(LayoutSettings(), model)
    with torch.no_grad():
        named = policy.named_weights().items()
        next(each for name, each in named if name.endswith(f"{norm}.weight"))[0] = value
    policy.weights_changed()
    save(policy, Path(directory), 0, {})


def export_model(model: str, name: str, directory: str) -> None:
    """Export the same model to `directory`/NAME_exported."""
    from stages.kinds.export import work as export

    policy = _model(LayoutSettings(), model, name)
    export.export(policy, Path(directory) / f"{name}_exported")


def merge(layout: LayoutSettings, model: str, output: str, **given: Any) -> None:
    """Run the stage with a block and its models; it writes `output`/checkpoints/step_0."""
    from stages.kinds.merge_weights import work as merge_weights

    merge_weights.run(_job(layout, model, output, **given))


def recalibrated_routers(
    layout: LayoutSettings, model: str, paths: dict[str, str], samples: int = SAMPLES
) -> dict[str, torch.Tensor]:
    """Return the routers of this rank, recalibrated in the model `start` for the others."""
    from parallel.checkpoint import load
    from parallel.checkpoint.tensors import places
    from parallel.model.policy import Policy
    from stages.kinds.merge_weights.router_recalibration import router_name
    from stages.kinds.merge_weights.work import WeightMerge, recalibrate_routers

    own = {"routers": "recalibrated", "recalibration": {"samples": samples}}
    job = _job(layout, model, "", paths=paths, **own)
    policy = Policy(MODELS[model], layout)
    load.weights(policy, Path(paths["start"]))
    recalibrate_routers(job, policy, WeightMerge(job, places(policy)))
    layers = {each: policy.routed_layers[each.place] for each in policy.routers}
    return {router_name(policy, layer): each.weight.detach() for each, layer in layers.items()}


def _job(layout: LayoutSettings, model: str, output: str, **given: Any) -> Any:
    from stages.kinds.merge_weights.settings import MergeWeightsSettings
    from stages.settings import RunSettings, StageJob
    from tests.fake_engines import toy_domain

    paths = {name: Path(path) for name, path in given.pop("paths").items()}
    models = {name: name for name in paths if name != "start"}
    block = MergeWeightsSettings.model_validate(
        {"from": "start", "models": models, "recalibration": {"samples": SAMPLES}, **given}
    )
    words = toy_domain(prompts={"dataset": "spell_backward"})
    settings = RunSettings.model_construct(
        seed=0,
        model=MODELS[model],
        layout=layout,
        stages={"merged": block},
        domains={"sums": toy_domain(), "words": words},
    )
    return StageJob.model_construct(
        stage="merged",
        block="merged",
        seeded_as="merged",
        directory=Path(output),
        domains=["sums", "words"],
        parent=paths.pop("start"),
        models=paths,
        settings=settings,
    )


def weights(model: str, checkpoint: str) -> dict[str, torch.Tensor]:
    """Return every Hugging Face tensor of a checkpoint, loaded as by another stage on one rank."""
    from parallel.checkpoint import load
    from parallel.model.policy import Policy

    policy = Policy(MODELS[model], LayoutSettings())
    load.weights(policy, Path(checkpoint))
    return {name: tensor.clone() for name, tensor in policy.weights()}


def read_by_tensors(layout: LayoutSettings, model: str, checkpoint: str) -> list[str]:
    """Return the tensors of a checkpoint that `StoredWeights` reads otherwise than a policy."""
    from parallel.checkpoint import load
    from parallel.checkpoint.tensors import StoredWeights, places
    from parallel.model.policy import Policy

    policy = Policy(MODELS[model], layout)
    found = StoredWeights(Path(checkpoint), MODELS[model], places(policy))
    load.weights(policy, Path(checkpoint))
    return [n for n, tensor in policy.weights() if not torch.equal(found.read(n), tensor)]


def merge_another_model(paths: dict[str, str], directory: str, **changed: Any) -> str:
    """Merge with a model of other settings; return the error, or what was left."""
    from parallel.errors import UserError
    from parallel.model.policy import Policy

    other = MODELS["qwen3_moe"].model_copy(update=changed)
    policy = Policy(other, LayoutSettings())
    policy.start_fresh(0)
    save(policy, Path(directory), 0, {})
    output = f"{directory}/merged"
    try:
        merge(
            LayoutSettings(),
            "qwen3_moe",
            output,
            paths={**paths, "words": f"{directory}/step_0"},
            method="ties",
        )
    except UserError as error:
        return str(error).replace(directory, "")
    return "merged"


def _model(layout: LayoutSettings, model: str, name: str) -> Any:
    from parallel.model.policy import Policy

    found = _random(layout, model)
    if name != "start":
        other = Policy(MODELS[model], layout)
        other.start_fresh(SEEDS[name])
        pairs = zip(found.named_weights().values(), other.named_weights().values(), strict=True)
        with torch.no_grad():
            for tensor, far in pairs:
                # Norms are alike in all fresh models; of others some weights stay, as most do in
                # reinforcement learning.
                moved = tensor.float() * SEEDS[name] if tensor.dim() == 1 else far.float() * 50
                moved = moved.frac() * CHANGED
                tensor.add_(torch.where(moved.abs() > CHANGED / 2, moved, 0))
        found.weights_changed()
    return found
