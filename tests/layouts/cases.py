"""The cases that ranks run on real megatron-core models of one seed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parallel.sample import Sample
from parallel.settings import (
    LayoutSettings,
    ModelSettings,
    OptimizerSettings,
    RoutingLossSettings,
)
from tests.awaiting import PATIENCE_SECONDS

SPREAD = LayoutSettings(ranks=2, expert=2)  # the experts split between two ranks
MATRIX = {
    "1 rank": LayoutSettings(),
    "DP2": LayoutSettings(ranks=2),
    "TP2": LayoutSettings(ranks=2, tensor=2),
    "PP2": LayoutSettings(ranks=2, pipeline=2),
    "VPP2": LayoutSettings(ranks=2, pipeline=2, virtual_pipeline=2),
    "PP2 uneven": LayoutSettings(ranks=2, pipeline=2, first_stage_layers=3),
    "PP3 uneven": LayoutSettings(ranks=3, pipeline=3, last_stage_layers=2),
    "EP2": LayoutSettings(ranks=2, expert=2),
    "CP2": LayoutSettings(ranks=2, context=2),
    "ETP2": LayoutSettings(ranks=2, expert_tensor=2),
    "TP2 recomputed": LayoutSettings(ranks=2, tensor=2, recompute="full"),
    "VPP2 recomputed": LayoutSettings(ranks=2, pipeline=2, virtual_pipeline=2, recompute="full"),
    "CP2 attention recomputed": LayoutSettings(ranks=2, context=2, recompute="attention"),
    "TP2 EP2 PP2": LayoutSettings(ranks=4, tensor=2, expert=2, pipeline=2),
    "TP2 CP2 EP2 ETP2": LayoutSettings(ranks=4, tensor=2, context=2, expert=2, expert_tensor=2),
    "CP2 EP2 VPP2": LayoutSettings(ranks=4, context=2, expert=2, pipeline=2, virtual_pipeline=2),
    "DP2 TP2 EP2 PP2": LayoutSettings(ranks=8, tensor=2, expert=2, pipeline=2),
}
# Every kind of parallelism, mostly combined with others.
CORE = ("1 rank", "DP2", "ETP2", "PP3 uneven", "TP2 EP2 PP2", "CP2 EP2 VPP2")
MODEL = ModelSettings(
    vocabulary_size=80,
    hidden_size=32,
    layers=4,
    attention_heads=4,
    key_value_heads=2,
    head_dim=8,
    experts=4,
    experts_per_token=2,
    expert_hidden_size=16,
)
ADAM = OptimizerSettings(learning_rate=1e-2, warmup_steps=2, decay="cosine")
NO_LOSSES = RoutingLossSettings()
SGD = OptimizerSettings(algorithm="sgd", learning_rate=1.0, clip_norm=0.01)


def samples(count: int, seed: int = 0, routes: bool = False) -> list[Sample]:
    """Return random prompts and responses of many lengths, with mu, advantages and routes."""
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


def build(
    layout: LayoutSettings,
    optimizer: OptimizerSettings = ADAM,
    seed: int = 0,
    losses: RoutingLossSettings = NO_LOSSES,
    model: ModelSettings = MODEL,
) -> Any:
    from parallel.model.policy import TrainedPolicy

    policy = TrainedPolicy(model, layout, optimizer, steps=10, losses=losses)
    policy.start_fresh(seed)
    return policy


def batches(drawn: list[Sample], count: int = 1, replay: bool = False, padded: bool = False) -> Any:
    """Return this rank's micro-batches, `count` or a few more of them."""
    from parallel.batch import RankPlace, split

    here = RankPlace.here()
    read = sum(sample.length for sample in drawn)
    budget = 4096 if count == 1 else read // (here.data * here.context * count)
    return split(drawn, here, budget, replay, padded)


def cross_entropy(totals: Any, responses: Any) -> tuple[torch.Tensor, float]:
    from stages.objectives.loss import token_mean

    loss = token_mean(-responses.logprobs(), responses.batch.mask, totals)
    return loss, loss.item()


def sequence_policy(totals: Any, responses: Any) -> tuple[torch.Tensor, float]:
    from stages.objectives.kl import KLSettings
    from stages.objectives.loss import ObjectiveSettings, policy_loss
    from stages.objectives.surrogate import Tokens

    settings = ObjectiveSettings(kl=KLSettings(coefficient=0.1, estimator="unbiased_k3"))
    chosen, batch = responses.logprobs(), responses.batch
    tokens = Tokens(
        logprobs=chosen,
        old_logprobs=chosen.detach() + 1e-4,
        engine_logprobs=batch.engine_logprobs,
        advantages=batch.advantages,
        mask=batch.mask,
        reference_logprobs=batch.engine_logprobs,
    )
    result = policy_loss(tokens, totals, settings, settings.kl.coefficient)
    return result.loss, result.loss.item()


def distillation(totals: Any, responses: Any) -> tuple[torch.Tensor, float]:
    from stages.objectives.loss import token_mean

    batch = responses.batch
    loss = token_mean(responses.kl(batch.teachers[0].load()), batch.mask, totals)
    return loss, loss.item()


LOSSES = {
    "cross_entropy": cross_entropy,
    "sequence_policy": sequence_policy,
    "distillation": distillation,
}


Batching = tuple[str, int, bool, bool]  # a loss; its micro-batches, whether padded and replayed
EACH_ONCE = [
    ("cross_entropy", 1, False, False),
    ("sequence_policy", 1, True, False),
    ("sequence_policy", 4, False, True),
    ("distillation", 4, True, False),
]
ALL = [
    (loss, count, padded, replay)
    for loss, count in itertools.product(LOSSES, (1, 4))
    for padded, replay in ((False, False), (False, True), (True, False))
]


def grade(parts: list[Any], teacher: Any) -> None:
    """Set the micro-batches' teacher."""
    from parallel.model.kept_logits import HiddenStates

    states = HiddenStates("device", None, Path())
    logits = teacher.response_logits([part.without_routes() for part in parts])
    for part, theirs in zip(parts, logits, strict=False):
        part.teachers = [states.keep(theirs)]


def prepared(loss: str, drawn: list[Sample], teacher: Any, **how: Any) -> list[Any]:
    """Return micro-batches, with the teacher's logits if the loss needs them."""
    parts = batches(drawn, **how)
    if loss == "distillation":
        grade(parts, teacher)
    return parts


def accumulate(policy: Any, loss: str, drawn: list[Sample], parts: list[Any]) -> dict[str, float]:
    """Accumulate the gradients of a loss; return the loss and the routing losses."""
    from parallel.distributed import sum_over_data
    from stages.objectives.loss import Totals

    totals = Totals(len(drawn), sum(len(sample.response) for sample in drawn))
    read = sum(sample.length for sample in drawn)
    values = policy.accumulate(parts, partial(LOSSES[loss], totals), tokens=read)
    return {**sum_over_data({"loss": sum(values)}), **policy.routing_metrics()}


def reference(directory: str, losses: RoutingLossSettings, model: ModelSettings = MODEL) -> None:
    """Write one process's loss and gradients of one micro-batch, for `differences`."""
    alone = LayoutSettings(distributed_optimizer=False)
    policy, teacher = (build(alone, SGD, seed, losses, model) for seed in (0, 1))
    for loss in LOSSES:
        for replay in (False, True) if model == MODEL else (False,):  # whose layers have routes
            drawn = samples(24, routes=replay)
            parts = prepared(loss, drawn, teacher, replay=replay)
            values = accumulate(policy, loss, drawn, parts)
            gradients = {
                name: parameter.main_grad.clone()
                for name, parameter in policy.chunks[0].named_parameters()
            }
            torch.save((values, gradients), Path(directory) / f"{loss}{replay}.pt")


def differences(
    layout: LayoutSettings,
    directory: str,
    losses: RoutingLossSettings,
    batchings: list[Batching],
    model: ModelSettings = MODEL,
) -> list[dict[str, Any]]:
    """Return this layout's differences from the reference, for every batching."""
    layout = layout.model_copy(update={"distributed_optimizer": False})  # it scatters gradients
    policy, teacher = (build(layout, SGD, seed, losses, model) for seed in (0, 1))
    found = []
    for loss, count, padded, replay in batchings:
        drawn = samples(24, routes=replay)
        parts = prepared(loss, drawn, teacher, count=count, padded=padded, replay=replay)
        values = accumulate(policy, loss, drawn, parts)
        expected, gradients = torch.load(Path(directory) / f"{loss}{replay}.pt")
        found.append(
            {
                "case": f"{loss} count={count} padded={padded} replay={replay}",
                "micro_batches": len(parts),
                "loss": max(
                    abs(values[name] - expected[name]) / max(1.0, abs(expected[name]))
                    for name in expected
                ),
                "gradient": worst_gradient(policy, gradients),
            }
        )
    return found


def worst_gradient(policy: Any, gradients: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest relative error of this rank's gradients from one process's, by name."""
    from parallel.model.parameters import global_name, shard, tensor_split

    worst = (0.0, "")
    for chunk in policy.chunks:
        for name, parameter in chunk.named_parameters():
            whole = gradients[global_name(chunk, name)]
            ours = shard(name, whole, *tensor_split(name))
            error = (parameter.main_grad - ours).norm() / max(ours.norm(), 1e-6)
            worst = max(worst, (error.item(), name))
    return worst


def train(policy: Any, steps: range) -> Iterator[tuple[float, float]]:
    """Yield (this rank's loss, gradient norm) of optimizer steps; the step seeds the data."""
    from stages.objectives.loss import Totals

    for step in steps:
        drawn = samples(16, seed=step)
        totals = Totals(len(drawn), sum(len(sample.response) for sample in drawn))
        read = sum(sample.length for sample in drawn)
        values = policy.accumulate(batches(drawn), partial(cross_entropy, totals), tokens=read)
        yield sum(values), policy.step()


def keep(drawn: list[Sample]) -> list[Sample]:
    """Give every second sample kept sets of 1 to 5 ids; return the samples."""
    draw = np.random.default_rng(0)
    for sample in drawn[::2]:
        sample.kept = [
            np.union1d(draw.integers(0, MODEL.vocabulary_size, draw.integers(0, 5)), [token])
            for token in sample.response
        ]
    return drawn


def kept_logprobs(layout: LayoutSettings) -> dict[float, float]:
    """Return the sum of each sample's log-probabilities, by its (unique) advantage."""
    parts = batches(keep(samples(16)), count=2)
    found = {}
    for part, values in zip(parts, build(layout).target_logprobs(parts, 0.7), strict=False):
        sums = values.where(part.mask, 0.0).sum(1).tolist()
        found.update(zip((sample.advantage for sample in part.samples), sums, strict=True))
    return found


def expected_kept_logprobs() -> dict[float, float]:
    """Return the result of `kept_logprobs` in fp64 over the whole vocabulary, masked."""
    [part] = batches(keep(samples(16)))
    policy = build(LayoutSettings())
    [logits] = policy.response_logits([part])
    x = (logits.hidden @ logits.weight.T).detach().double() / 0.7
    for row, at in zip(x, part.place.tolist(), strict=True):
        kept = part.samples[at // part.mask.shape[1]].kept
        if kept is not None:
            dropped = torch.ones_like(row, dtype=torch.bool)
            dropped[kept[at % part.mask.shape[1]]] = False
            row[dropped] = -torch.inf
    chosen = x.log_softmax(1).gather(1, part.own_targets[:, None])[:, 0]
    values = torch.zeros(part.mask.numel(), dtype=torch.float64, device=x.device)
    values[part.place] = chosen
    sums = values.view(part.mask.shape).sum(1).tolist()
    return dict(zip((sample.advantage for sample in part.samples), sums, strict=True))


def gloo_loops() -> list[int]:
    """Return the number of gloo threads before, during and after a group with its own device."""
    from datetime import timedelta

    from parallel.cpu.gloo import separate_group

    def count(expected: int) -> int:
        """Return the number of threads; a thread names itself, so wait for it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            threads = Path("/proc/self/task").glob("*/comm")
            found = [thread.read_text().strip() for thread in threads].count("gloo_tcp_loop")
            if found == expected or time.monotonic() > deadline:
                return found
            time.sleep(0.01)

    before = count(1)
    group = separate_group(torch.distributed.HashStore(), 0, 1, timedelta(minutes=1))
    during = count(2)
    del group
    return [before, during, count(1)]


def held_experts(layout: LayoutSettings) -> set[str]:
    """Return the global names of the experts' weights that this rank holds."""
    from parallel.model.parameters import global_name

    [chunk] = build(layout).chunks
    names = (global_name(chunk, name) for name, _ in chunk.named_parameters())
    return {name for name in names if "experts" in name}


def replayed_routing(layout: LayoutSettings) -> dict[str, float]:
    """Return the effect of replay on the log-probabilities and on the router's gradient."""
    from stages.objectives.loss import Totals

    policy = build(layout)
    drawn = samples(16, routes=True)
    replay, own = batches(drawn, replay=True), batches(drawn)
    [forced], [free] = policy.target_logprobs(replay, 1.0), policy.target_logprobs(own, 1.0)
    [free_again] = policy.target_logprobs([replay[0].without_routes()], 1.0)
    policy.accumulate(replay, partial(cross_entropy, Totals(16, 100)), tokens=1.0)
    routers = [p for n, p in policy.chunks[0].named_parameters() if "router" in n]
    return {
        "changed": (forced - free)[replay[0].mask].abs().max().item(),
        "restored": (free_again - free)[replay[0].mask].abs().max().item(),
        "router_gradient": min(router.main_grad.norm().item() for router in routers),
    }


def forward_passes(layout: LayoutSettings, losses: RoutingLossSettings, count: int) -> set[float]:
    """Return the forward passes of this rank's routers per micro-batch, in a step of `count`."""
    policy = build(layout, losses=losses)
    passes = dict.fromkeys(policy.routers, 0)

    def see(router: torch.nn.Module, *_: Any) -> None:
        passes[router] += 1

    for router in policy.routers:
        router.register_forward_hook(see)
    drawn = samples(16)
    parts = batches(drawn, count)
    read = sum(sample.length for sample in drawn)
    policy.accumulate(parts, lambda r: (0.0 * r.logprobs().sum(), None), tokens=read)
    return {found / len(parts) for found in passes.values()}


def router_agreement(layout: LayoutSettings) -> dict[str, float]:
    """Return the agreement with random routes; equal with and without gradients."""
    policy = build(layout)
    drawn = samples(16, routes=True)
    policy.agreement.start()
    policy.target_logprobs(batches(drawn, replay=True), 1.0)
    found = policy.agreement.shares()
    policy.agreement.start()
    parts = batches(drawn, count=4, replay=True)
    policy.accumulate(parts, lambda r: (0.0 * r.logprobs().sum(), None), tokens=1.0)
    assert policy.agreement.shares() == found
    return found


def gradient_of_routing_losses(
    layout: LayoutSettings, losses: RoutingLossSettings
) -> dict[str, float]:
    """Return relative errors of the last router's gradient, trained on routing losses alone."""
    policy = build(layout, losses=losses)
    seen: dict[str, torch.Tensor] = {}
    router = policy.routers[-1]
    router.register_forward_hook(lambda _m, given, _o: seen.update(hidden=given[0].detach()))
    drawn = samples(12)
    parts = batches(drawn, padded=True)
    read = sum(sample.length for sample in drawn)
    policy.accumulate(parts, lambda r: (0.0 * r.logprobs().sum(), None), tokens=read)
    hidden = seen["hidden"].flatten(0, 1)[parts[0].row.real].double()
    weight = router.weight.detach().double().requires_grad_()
    logits = hidden @ weight.T
    chosen = logits.topk(MODEL.experts_per_token, -1).indices
    slots = torch.zeros(MODEL.experts, dtype=torch.float64)
    slots.scatter_add_(0, chosen.flatten(), torch.ones(chosen.numel(), dtype=torch.float64))
    share = slots / chosen.numel()
    balance = MODEL.experts * (share * logits.softmax(-1).mean(0)).sum()
    square = logits.exp().sum(-1).log().square().mean()
    (losses.load_balance * balance + losses.z_loss * square).backward()
    assert weight.grad is not None
    difference = (router.weight.main_grad - weight.grad).norm() / weight.grad.norm()
    return {"gradient": difference.item(), "tokens": abs(len(hidden) - read)}


def low_precision(layout: LayoutSettings) -> dict[str, Any]:
    """Return the dtypes of a bf16 policy's tensors, and its losses and an fp32 policy's."""
    low = build(layout, model=MODEL.model_copy(update={"precision": "bf16"}))
    full = build(layout)
    router_dtypes = set()
    for router in low.routers:
        router.register_forward_hook(lambda _m, _g, output: router_dtypes.add(output[0].dtype))
    losses = {"low": [], "full": []}
    for name, policy in (("low", low), ("full", full)):
        losses[name] = [loss for loss, _ in train(policy, range(1, 6))]
    parameters = [p for chunk in low.chunks for p in chunk.parameters()]
    states = [
        state
        for part in low.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
    ]
    masters = [
        parameter
        for part in low.optimizer.chained_optimizers
        for group in part.optimizer.param_groups
        for parameter in group["params"]
    ]
    return {
        "losses": losses,
        "weights": {p.dtype for p in parameters},
        "gradients": {p.main_grad.dtype for p in parameters},
        "masters": {p.dtype for p in masters},
        "moments": {state["exp_avg"].dtype for state in states},
        "routing": router_dtypes,
    }
