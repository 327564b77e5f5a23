"""What the ranks run. Every case builds a real megatron-core model of the same seed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parallel.files import whole_checkpoints
from parallel.sample import Sample
from parallel.settings import LayoutSettings, ModelSettings, OptimizerSettings

SPREAD = LayoutSettings(ranks=2, expert=2)  # the experts split between two ranks
MODEL = ModelSettings(
    vocabulary_size=80,
    hidden_size=32,
    layers=2,
    attention_heads=4,
    key_value_heads=2,
    head_dim=8,
    experts=4,
    experts_per_token=2,
    expert_hidden_size=16,
)
ADAM = OptimizerSettings(learning_rate=1e-2, warmup_steps=2, decay="cosine")
SGD = OptimizerSettings(algorithm="sgd", learning_rate=1.0, clip_norm=0.01)


def samples(count: int, seed: int = 0, routes: bool = False) -> list[Sample]:
    """Random prompts and responses of many lengths, with mu, advantages and routes."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        prompt, response = (draw.integers(2, 70, draw.integers(2, 14)) for _ in range(2))
        length = len(prompt) + len(response) - 1
        chosen = np.argsort(draw.random((length, MODEL.layers, MODEL.experts)), -1)
        found.append(
            Sample(
                domain="a",
                prompt=prompt.astype(np.int32),
                response=response.astype(np.int32),
                logprobs=-draw.random(len(response)).astype(np.float32),
                routes=chosen[..., : MODEL.experts_per_token] if routes else None,
                advantage=float(draw.normal()),
            )
        )
    return found


def build(optimizer: OptimizerSettings = ADAM, seed: int = 0, distributed: bool = False) -> Any:
    from parallel.policy import TrainedPolicy

    policy = TrainedPolicy(MODEL, optimizer, steps=10, distributed_optimizer=distributed)
    policy.start_fresh(seed)
    return policy


def batches(drawn: list[Sample], budget: int, replay: bool = False) -> list[Any]:
    from parallel.batch import split
    from parallel.policy import data_rank

    return split(drawn, *data_rank(), budget, replay)


def cross_entropy(totals: Any, logits: torch.Tensor, batch: Any) -> tuple[torch.Tensor, float]:
    from parallel import vocabulary
    from stages.objectives.aggregation import token_mean

    chosen = vocabulary.gather_targets(vocabulary.log_softmax(logits), batch.targets)
    loss = token_mean(-chosen, batch.mask, totals)
    return loss, loss.item()


def sequence_policy(totals: Any, logits: torch.Tensor, batch: Any) -> tuple[torch.Tensor, float]:
    from parallel import vocabulary
    from stages.objectives.policy_loss import policy_loss
    from stages.objectives.settings import KLSettings, ObjectiveSettings

    settings = ObjectiveSettings(kl=KLSettings(coefficient=0.1, estimator="unbiased_k3"))
    chosen = vocabulary.gather_targets(vocabulary.log_softmax(logits), batch.targets)
    old = chosen.detach() + 1e-4
    result = policy_loss(
        chosen, old, batch.advantages, batch.mask, totals, settings, batch.engine_logprobs
    )
    return result.loss, result.loss.item()


def distillation(totals: Any, logits: torch.Tensor, batch: Any) -> tuple[torch.Tensor, float]:
    from parallel import vocabulary
    from stages.objectives.aggregation import token_mean
    from stages.objectives.reverse_kl import reverse_kl

    student = vocabulary.log_softmax(logits)
    teacher = vocabulary.log_softmax(logits.detach().flip(-1))
    divergence = reverse_kl(student, teacher, vocabulary.sum_vocabulary)
    loss = token_mean(divergence, batch.mask, totals)
    return loss, loss.item()


LOSSES = {
    "cross_entropy": cross_entropy,
    "sequence_policy": sequence_policy,
    "distillation": distillation,
}


def gradients(loss: str, budget: int, replay: bool) -> dict[str, Any]:
    """The loss over 24 samples and every gradient of this rank, under global names."""
    from parallel.distributed import sum_over_data
    from parallel.model import global_name
    from stages.objectives.aggregation import Totals

    policy = build()
    drawn = samples(24, routes=replay)
    totals = Totals(len(drawn), sum(len(sample.response) for sample in drawn))
    values = policy.accumulate(batches(drawn, budget, replay), partial(LOSSES[loss], totals))
    return {
        "loss": sum_over_data({"loss": sum(values)})["loss"],
        "micro_batches": len(values),
        "gradients": {
            global_name(policy.model, name): parameter.main_grad.clone().numpy()
            for name, parameter in policy.model.named_parameters()
        },
    }


def train(policy: Any, steps: range) -> Iterator[tuple[float, float]]:
    """(loss of this rank, gradient norm) of some optimizer steps; step number seeds the data."""
    from stages.objectives.aggregation import Totals

    for step in steps:
        drawn = samples(16, seed=step)
        totals = Totals(len(drawn), sum(len(sample.response) for sample in drawn))
        values = policy.accumulate(batches(drawn, 4096), partial(cross_entropy, totals))
        yield sum(values), policy.step()


def export_and_load(directory: str) -> dict[str, float]:
    """Differences to transformers after an export, and to ourselves after loading it again."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from parallel.distributed import broadcast, is_main
    from parallel.hugging_face import hugging_face_config
    from parallel.policy import Policy

    policy = build(seed=5)
    weights = dict(policy.weights())
    if is_main():
        save_file(weights, Path(directory) / "model.safetensors", metadata={"format": "pt"})
        hugging_face_config(MODEL).save_pretrained(directory)
    broadcast(None)
    again = Policy(MODEL.model_copy(update={"initial_weights": Path(directory)}))
    again.start_fresh(seed=99)
    reloaded = dict(again.weights())
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    drawn = samples(6)
    largest = 0.0
    for batch in batches(drawn, 4096):
        [logprobs] = policy.target_logprobs([batch], 1.0)
        for row, sample in enumerate(batch.samples):
            tokens = torch.tensor(np.concatenate([sample.prompt, sample.response]))[None]
            with torch.no_grad():
                expected = theirs(tokens).logits[0, len(sample.prompt) - 1 : -1].log_softmax(-1)
            chosen = expected.gather(-1, tokens[0, len(sample.prompt) :, None])[:, 0]
            found = logprobs[row, : len(sample.response)]
            largest = max(largest, (found - chosen).abs().max().item())
    names = set(weights) ^ set(theirs.state_dict())
    return {
        "logprobs": largest,
        "reloaded": max((weights[n] - reloaded[n]).abs().max().item() for n in weights),
        "tensors": len(weights),
        "rotary": theirs.model.rotary_emb.inv_freq.abs().min().item(),
        "unknown_names": len([name for name in names if "experts" not in name]),
    }


def replayed_routing() -> dict[str, float]:
    """What replay does to the log-probabilities and to the router's gradient."""
    from stages.objectives.aggregation import Totals

    policy = build()
    drawn = samples(16, routes=True)
    replay, own = batches(drawn, 4096, replay=True), batches(drawn, 4096)
    [forced], [free] = policy.target_logprobs(replay, 1.0), policy.target_logprobs(own, 1.0)
    [free_again] = policy.target_logprobs([replay[0].without_routes()], 1.0)
    policy.accumulate(replay, partial(cross_entropy, Totals(16, 100)))
    routers = [p for n, p in policy.model.named_parameters() if "router" in n]
    return {
        "changed": (forced - free)[replay[0].mask].abs().max().item(),
        "restored": (free_again - free)[replay[0].mask].abs().max().item(),
        "router_gradient": min(router.main_grad.norm().item() for router in routers),
    }


class Toy:
    """The smallest stage: cross-entropy on random samples, with what a test wants to go wrong."""

    def __init__(self, poison_at: int | None = None, stop_at: int | None = None) -> None:
        self.policy = build()
        self.poison_at = poison_at
        self.stop_at = stop_at

    def step(self, step: int) -> dict[str, float]:
        from parallel.distributed import is_main, sum_over_data

        if step == self.stop_at and is_main():
            os.kill(os.getpid(), signal.SIGTERM)
        [(loss, norm)] = train(self.policy, range(step, step + 1))
        loss = float("nan") if step == self.poison_at else loss
        return {**sum_over_data({"loss": loss}), "gradient_norm": norm}

    def score(self, metrics: dict[str, float]) -> float:
        return -metrics["loss"]

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        assert state["step"] > 0


def loop(
    directory: str, poison_at: int | None, stop_at: int | None, asynchronous: bool = True
) -> tuple[str, list[str]]:
    """How the loop ends, and the whole checkpoints that it leaves."""
    from stages.loop import train as run_loop
    from stages.settings import LoggingSettings, LoopSettings, RunSettings, StageJob

    settings = RunSettings.model_construct(
        name="toy", seed=0, logging=LoggingSettings(wandb="disabled")
    )
    job = StageJob.model_construct(
        stage="toy", directory=Path(directory), attempt=1, parent=None, settings=settings
    )
    ending = "done"
    steps = LoopSettings(steps=5, checkpoint_every=2, async_checkpoints=asynchronous)
    try:
        run_loop(Toy(poison_at, stop_at), job, steps)
    except Exception as error:
        ending = f"{type(error).__name__}: {error}"
    left = whole_checkpoints(Path(directory) / "checkpoints")
    return ending, [checkpoint.path.name for checkpoint in left]
