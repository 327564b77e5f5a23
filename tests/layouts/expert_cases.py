"""What the ranks run: an expert's own update, whose objective reduces over tokens and groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from cases import MODEL, SGD, samples

from parallel.sample import Sample
from parallel.settings import EngineSettings, LayoutSettings

OBJECTIVES: dict[str, dict[str, Any]] = {
    "full KL, entropy bonus, lambda, EDGE": {
        "scaling": "edge",
        "ratio": {"name": "token"},
        "aggregation": "lambda",
        "kl": {"coefficient": 0.1, "estimator": "full", "target": 0.5},
        "entropy_bonus": 0.01,
        "correction": {"name": "icepop", "level": "token", "samples": "all"},
        "sequence_mask": {"enabled": True},
    },
    "token mean": {
        "ratio": {"name": "sequence_token", "clip_low": 0.2, "clip_high": 0.3},
        "aggregation": "token_mean",
        "kl": {"coefficient": 0.1, "estimator": "full"},
        "entropy_bonus": 0.01,
        "correction": {"name": "none"},
    },
    "geometric mean, constant": {
        "ratio": {"name": "geometric"},
        "aggregation": "constant",
        "kl": {"coefficient": 0.1, "estimator": "unbiased_k3", "reference": "ema"},
        "correction": {"name": "tis", "samples": "all"},
    },
    "router shift, after an update": {
        "ratio": {"name": "rspo", "floor": 0.1},
        "aggregation": "sequence_mean",
    },
}


def judged() -> list[Sample]:
    """Six groups of four samples, whose tokens have advantages of their own."""
    draw = np.random.default_rng(1)
    drawn = samples(24)
    for number, sample in enumerate(drawn):
        count = len(sample.response)
        sample.group = number // 4
        sample.reward = 0.0
        sample.versions = np.zeros(count, np.int32)
        sample.advantages = draw.normal(size=count).astype(np.float32)
    return drawn


def expert(layout: LayoutSettings, directory: str, objective: dict[str, Any]) -> Any:
    """An expert whose policy is the one of seed 0, and its reference the one of seed 1."""
    from parallel import checkpoints
    from stages.grpo import Expert
    from stages.settings import DomainSettings, RunSettings, StageJob

    domain = DomainSettings.model_validate(
        {
            "prompts": {"dataset": "chain_sum"},
            "sampling": {"temperature": 0.8, "max_response_tokens": 16},
            "routing": {"replay": "none"},
            "optimizer": SGD.model_dump(),
            "objective": objective,
            "loop": {"steps": 3, "micro_batch_tokens": 64},
        }
    )
    settings = RunSettings.model_construct(
        seed=0,
        model=MODEL,
        layout=layout,
        engine=EngineSettings(),
        experts={"sums": domain},
    )
    job = StageJob.model_construct(
        stage="experts.sums", domain="sums", parent=Path(directory), models={}, settings=settings
    )
    with (
        mock.patch("stages.on_policy.Rollouts"),
        mock.patch("stages.on_policy.Backlog"),
        mock.patch.object(checkpoints, "load_weights", lambda policy, _: policy.start_fresh(1)),
    ):
        stage = Expert(job)
    stage.policy.start_fresh(0)
    return stage


def updated(
    layout: LayoutSettings, directory: str, name: str
) -> tuple[dict[str, float], dict[str, torch.Tensor], Any]:
    """One update: what it measured, its gradients, and the stage after it."""
    from stages.on_policy import Rollout

    # A distributed optimizer scatters gradients.
    layout = layout.model_copy(update={"distributed_optimizer": False})
    stage = expert(layout, directory, OBJECTIVES[name])
    drawn = judged()
    prepared = stage.prepare(Rollout([drawn], {}), step=1)
    metrics = stage.update(drawn, prepared.updates[0], prepared.measured)
    if "router_movement" in metrics:
        assert metrics["router_movement"] == 0
        metrics = stage.update(drawn, prepared.updates[0])
        assert metrics["router_movement"] > 0
    learned = {"coefficient after": stage.kl_coefficient, "exponent after": stage.length_exponent}
    gradients = {
        f"{number}/{name}": parameter.main_grad.clone()
        for number, chunk in enumerate(stage.policy.chunks)
        for name, parameter in chunk.named_parameters()
    }
    return {**metrics, **prepared.differences, **learned}, gradients, stage


def alone(directory: str, name: str) -> None:
    """What one process makes of it, for `differences`."""
    metrics, gradients, _ = updated(LayoutSettings(), directory, name)
    whole = {key.partition("/")[2]: gradient for key, gradient in gradients.items()}
    torch.save((metrics, whole), Path(directory) / f"{name}.pt")


def differences(layout: LayoutSettings, directory: str, name: str) -> dict[str, Any]:
    """How far this layout is from it: relative errors of metrics, and the worst gradient's."""
    from parallel.model import global_name, shard, tensor_split

    metrics, gradients, stage = updated(layout, directory, name)
    expected, whole = torch.load(Path(directory) / f"{name}.pt")
    assert metrics.keys() == expected.keys()
    worst = 0.0
    for number, chunk in enumerate(stage.policy.chunks):
        for own, _ in chunk.named_parameters():
            theirs = shard(own, whole[global_name(chunk, own)], *tensor_split(own))
            error = (gradients[f"{number}/{own}"] - theirs).norm() / max(theirs.norm(), 1e-6)
            worst = max(worst, error.item())
    return {
        "gradient": worst,
        "metrics": {
            key: abs(metrics[key] - expected[key]) / max(1.0, abs(expected[key]))
            for key in expected
        },
        "measured": metrics,
    }
