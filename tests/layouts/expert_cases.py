"""The cases that ranks run with an expert's update; objectives reduce over tokens and groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from parallel.sample import Sample
from parallel.settings import EngineSettings, LayoutSettings
from tests.layouts.cases import MODEL, SGD, samples
from tests.layouts.checkpoint_cases import own_part

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
        "correction": {"name": "tis", "level": "sequence", "samples": "all"},
    },
    "router shift, after an update": {
        "ratio": {"name": "rspo", "floor": 0.1},
        "aggregation": "sequence_mean",
        "correction": {"level": "sequence"},
    },
    "a critic": {
        "advantage": {
            "name": "gae",
            "gamma": 0.95,
            "lambda": 0.9,
            "critic": {"optimizer": SGD.model_dump()},
        },
        "ratio": {"name": "token"},
        "aggregation": "token_mean",
    },
}

# Of domains that train together, each under its own.
UNLIKE: dict[str, dict[str, dict[str, Any]]] = {
    "unlike domains": {
        "sums": {
            "scaling": "edge",
            "ratio": {"name": "token"},
            "aggregation": "lambda",
            "kl": {"coefficient": 0.5, "estimator": "full", "target": 0.5},
            "correction": {"name": "icepop", "level": "token", "samples": "all"},
        },
        "words": {
            "ratio": {"name": "rspo", "floor": 0.1},
            "aggregation": "sequence_mean",
            "kl": {"coefficient": 0.1, "reference": "ema", "target": 0.01},
            "entropy_bonus": 0.01,
            "correction": {"name": "none"},
        },
    }
}


def judged(domains: list[str]) -> list[Sample]:
    """Return six groups of four samples with an advantage for every token, of domains in turn."""
    draw = np.random.default_rng(1)
    drawn = samples(24)
    for number, sample in enumerate(drawn):
        count = len(sample.response)
        sample.group = number // 4
        sample.domain = domains[sample.group % len(domains)]
        sample.reward = float(number % 3)
        sample.versions = np.zeros(count, np.int32)
        sample.advantages = draw.normal(size=count).astype(np.float32)
    return drawn


def start_elsewhere(policy: Any, _checkpoint: Path, head: bool = True) -> None:
    """Replace the loading of a checkpoint; give a critic the same head under every layout."""
    policy.start_fresh(1)
    if not head and policy.chunks[-1].post_process:
        weight = policy.chunks[-1].output_layer.weight
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
        weight.data.copy_(drawn / 4)
        policy.weights_changed()


def expert(layout: LayoutSettings, directory: str, objectives: dict[str, dict[str, Any]]) -> Any:
    """Return an expert whose policy has seed 0 and whose reference has seed 1."""
    from parallel.checkpoint import load
    from stages.domains import DomainSettings
    from stages.kinds.grpo.settings import GrpoSettings
    from stages.kinds.grpo.work import GrpoStage
    from stages.settings import RunSettings, StageJob

    training = {
        "sampling": {"temperature": 0.8, "max_response_tokens": 16},
        "routing": {"replay": "none"},
        "optimizer": SGD.model_dump(),
        "loop": {"steps": 3, "micro_batch_tokens": 64},
    }
    domains = {
        name: DomainSettings.model_validate(
            {"prompts": {"dataset": "chain_sum"}, "objective": objective, **training}
        )
        for name, objective in objectives.items()
    }
    block = GrpoSettings.model_validate({"from": "cold_start", **training})
    settings = RunSettings.model_construct(
        seed=0,
        model=MODEL,
        layout=layout,
        engine=EngineSettings(max_logprob_difference=1e9),
        domains=domains,
        stages={"experts": block},
    )
    job = StageJob.model_construct(
        stage="experts.sums",
        kind="grpo",
        block="experts",
        domain=None,
        domains=[*domains],
        directory=Path(directory),
        parent=Path(directory),
        models={},
        settings=settings,
    )
    with (
        mock.patch("stages.sampling.step.StageEngines"),
        mock.patch("stages.sampling.step.PromptBuffer"),
        mock.patch.object(load, "weights", start_elsewhere),
    ):
        stage = GrpoStage(job)
    stage.policy.start_fresh(0)
    return stage


def updated(
    layout: LayoutSettings, directory: str, name: str
) -> tuple[dict[str, float], dict[str, torch.Tensor], Any]:
    """Run one update; return its metrics, its gradients, and the stage."""
    from stages.sampling.step import Update

    # A distributed optimizer scatters gradients.
    layout = layout.model_copy(update={"distributed_optimizer": False})
    objectives = UNLIKE.get(name) or {"sums": OBJECTIVES[name]}
    stage = expert(layout, directory, objectives)
    drawn = judged([*objectives])
    stage._start(1)
    one = Update(drawn, stage.pack(drawn))
    checked = stage.check_logprobs([one])
    stage.finish_advantages([one])
    metrics = stage.update(one)
    if "router_movement" in metrics:
        assert metrics["router_movement"] == 0
        metrics = stage.update(one)
        assert metrics["router_movement"] > 0
    learned = {
        f"{value} after{' ' if own.name else ''}{own.name}": of
        for own in stage.objectives
        for value, of in (("coefficient", own.kl_coefficient), ("exponent", own.length_exponent))
    }
    gradients = {
        f"{number}/{model}/{name}": parameter.main_grad.clone()
        for model, chunks in models(stage).items()
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    return {**metrics, **checked, **learned}, gradients, stage


def models(stage: Any) -> dict[str, list[Any]]:
    """Return this rank's chunks of the policy and of the models that train with it."""
    others = {name: model.chunks for name, model in stage.policy.companions.items()}
    return {"policy": stage.policy.chunks, **others}


def alone(directory: str, name: str) -> None:
    """Write one process's metrics and gradients of an update, for `differences`."""
    metrics, gradients, _ = updated(LayoutSettings(), directory, name)
    whole = {key.partition("/")[2]: gradient for key, gradient in gradients.items()}
    torch.save((metrics, whole), Path(directory) / f"{name}.pt")


def differences(layout: LayoutSettings, directory: str, name: str) -> dict[str, Any]:
    """Return this layout's relative errors: of each metric, and the worst gradient's."""
    from parallel.model.parameters import global_name

    metrics, gradients, stage = updated(layout, directory, name)
    expected, whole = torch.load(Path(directory) / f"{name}.pt")
    assert metrics.keys() == expected.keys()
    worst = 0.0
    for model, chunks in models(stage).items():
        for number, chunk in enumerate(chunks):
            for own, parameter in chunk.named_parameters():
                theirs = own_part(own, parameter, whole[f"{model}/{global_name(chunk, own)}"])
                found = gradients[f"{number}/{model}/{own}"]
                error = (found - theirs).norm() / max(theirs.norm(), 1e-6)
                worst = max(worst, error.item())
    return {
        "gradient": worst,
        "metrics": {
            key: abs(metrics[key] - expected[key]) / max(1.0, abs(expected[key]))
            for key in expected
        },
        "measured": metrics,
    }
