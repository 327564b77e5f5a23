"""The cases of a bf16 policy and its engine that the trainer's rank runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from parallel.engine.wire import Sampling
from parallel.sample import Sample
from parallel.settings import EngineSettings, ModelSettings
from tests.engine.drawing import draw
from tests.engine.refit_cases import fleet, policy
from tests.fake_engines import toy_domain, toy_job, toy_run

ROUNDS = 24  # of 12 responses each: enough tokens to see a share of one in a thousand
RESPONSE = Sampling(temperature=1.0, max_tokens=24, end_tokens=(1,))


def right(trained: Any) -> None:
    """Change nothing."""


@torch.no_grad()
def swapped_experts(trained: Any) -> None:
    """Swap two experts of one layer, as a refit with a wrong expert number would."""
    named = trained.named_weights()
    for part in ("linear_fc1", "linear_fc2"):
        name = "0/decoder.layers.1.mlp.experts.local_experts.{}." + part + ".weight"
        first, second = named[name.format(0)], named[name.format(1)]
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
    trained.weights_changed()


def other_weights(trained: Any) -> None:
    """Take the weights of another seed, which the engine never received."""
    trained.start_fresh(7)


CHANGES: dict[str, Callable[[Any], None]] = {
    each.__name__: each for each in (right, swapped_experts, other_weights)
}


def mismatches(
    address: Path, model: str, layout: str, engine: str, change: str
) -> dict[str, float]:
    """Return the mismatch of an engine and of a policy that is changed after the refit."""
    from parallel import batch
    from parallel.batch import RankPlace
    from stages.sampling.logprob_check import measure_mismatch

    trained = policy(model, layout)
    engines = fleet((address,), model, layout, engine)
    trained.start_fresh(1)
    engines.refit(trained, 1)
    [client] = engines.live()
    settings = ModelSettings.model_validate_json(model)
    drawn: list[Sample] = []
    for seed in range(ROUNDS):
        drawn += draw(client, RESPONSE, seed=100 * seed, model=settings)
    CHANGES[change](trained)
    batches = batch.split(drawn, RankPlace.here(), 4096, replay=True)
    found = measure_mismatch(trained, batches, temperature=1.0)
    return {**found.metrics, "tokens": float(sum(len(each.response) for each in drawn))}


def sharp_mismatch(address: Path, model: str, layout: str, engine: str) -> float:
    """Return the mean mismatch where logits are up to 40, as of a model that is sure."""
    from parallel import batch
    from parallel.batch import RankPlace
    from stages.sampling.logprob_check import measure_mismatch

    trained = policy(model, layout)
    engines = fleet((address,), model, layout, engine)
    trained.start_fresh(1)
    with torch.no_grad():
        trained.chunks[-1].output_layer.weight.mul_(12)
    trained.weights_changed()
    engines.refit(trained, 1)
    [client] = engines.live()
    settings = ModelSettings.model_validate_json(model)
    drawn = [each for seed in range(8) for each in draw(client, RESPONSE, 100 * seed, settings)]
    batches = batch.split(drawn, RankPlace.here(), 4096, replay=True)
    return measure_mismatch(trained, batches, temperature=1.0).metrics["mismatch_mean"]


def trained_steps(
    directory: Path, address: Path, model: str, engine: str, mode: str
) -> list[dict[str, float]]:
    """Train an expert for two steps on a real engine's samples; return their metrics."""
    from stages.kinds.grpo.work import GrpoStage

    reward = {"kind": "python", "function": "tests.stages.small_rewards:characters"}
    domain = toy_domain(
        rollout={"mode": mode},
        routing={"replay": "r3"},
        rewards={"characters": reward},
        # Long enough for most responses to end: truncated ones have no reward.
        sampling={"prompts_per_step": 4, "group_size": 4, "max_response_tokens": 128},
    )
    settings = toy_run(sums=domain)
    update = {
        "model": ModelSettings.model_validate_json(model),
        "engine": EngineSettings.model_validate_json(engine),
    }
    job = toy_job(directory, settings.model_copy(update=update))
    stage = GrpoStage(job.model_copy(update={"engine_addresses": [address]}))
    stage.policy.start_fresh(1)
    try:
        return [stage.step(step) for step in (1, 2)]
    finally:
        stage.close()
