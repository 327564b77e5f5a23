"""The losses of a merge's methods, and their gradients, on one rank and under layouts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from parallel.sample import Sample
from parallel.settings import LayoutSettings
from tests.layouts.cases import SGD, batches, build, grade, samples, worst_gradient

# Of every method the variant that reads most: rewards, a start, a nucleus, a tail.
METHODS: dict[str, dict[str, Any]] = {
    "full_vocab_reverse_kl": {},
    "forward_kl": {},
    "jsd": {"beta": 0.3},
    "top_k_reverse_kl": {"k": 7, "tail": "lumped"},
    "sampled_token": {"reward_weight": 0.5},
    "exopd": {"lambda": 1.5, "top_p": 0.5},
    "exopd sampled": {"lambda": 1.5, "top_p": 0.5, "over": "sampled"},
    "opd_reward": {"teacher_weight": 2.0},
    "iw_opd": {"gamma": 0.7},
}


def taught(settings: Any, responses: Any) -> Any:
    """Return what the method compares; mu is as near to the policy as an engine's."""
    from stages.kinds.distill.teaching import TaughtTokens
    from stages.objectives.surrogate import correction_weights

    part, logprobs = responses.batch, responses.logprobs()
    mu = logprobs.detach() + part.engine_logprobs / 10
    part.weights = correction_weights(logprobs.detach(), mu, part.mask, settings.weighing)
    return TaughtTokens(responses, part.teachers[0].load(), part.reference, logprobs, 1.0)


def loss(settings: Any, totals: Any, responses: Any) -> tuple[torch.Tensor, float]:
    from stages.objectives.loss import token_mean
    from stages.objectives.registry import METHODS as REGISTERED

    values = REGISTERED[settings.name].function(taught(settings, responses), settings)
    value = token_mean(values, responses.batch.mask, totals)
    return value, value.item()


def models(layout: LayoutSettings) -> list[Any]:
    """Return student, teacher and start, whose logits differ enough for a gradient to matter."""
    found = [build(layout, SGD, seed) for seed in range(3)]
    with torch.no_grad():
        for policy in found:
            if policy.chunks[-1].post_process:
                policy.chunks[-1].output_layer.weight.mul_(10)
            policy.weights_changed()
    return found


def accumulated(name: str, trained: list[Any], drawn: list[Sample], count: int) -> float:
    """Accumulate the gradients of a method; return its loss."""
    from parallel.distributed import sum_over_data
    from stages.kinds.distill.losses import MethodSettings
    from stages.objectives.loss import Totals

    policy, teacher, start = trained
    settings: Any = TypeAdapter(MethodSettings).validate_python(
        {"name": name.split()[0], **METHODS[name]}
    )
    parts = batches(drawn, count)
    grade(parts, teacher)
    for part, logits in zip(parts, start.response_logits(parts), strict=False):
        part.reference = logits
    totals = Totals(len(drawn), sum(len(sample.response) for sample in drawn))
    read = sum(sample.length for sample in drawn)
    values = policy.accumulate(parts, partial(loss, settings, totals), tokens=read)
    return sum_over_data({"loss": sum(values)})["loss"]


def reference(directory: str) -> None:
    """Write one process's loss and gradients of one micro-batch, for `differences`."""
    trained = models(LayoutSettings(distributed_optimizer=False))
    for name in METHODS:
        value = accumulated(name, trained, samples(24), 1)
        named = trained[0].chunks[0].named_parameters()
        gradients = {key: parameter.main_grad.clone() for key, parameter in named}
        torch.save((value, gradients), Path(directory) / f"{name}.pt")


def differences(layout: LayoutSettings, directory: str) -> dict[str, tuple[float, float, str]]:
    """Return this layout's errors of every method: the loss's, and the worst gradient's."""
    trained = models(layout.model_copy(update={"distributed_optimizer": False}))
    found = {}
    for name in METHODS:
        value = accumulated(name, trained, samples(24), 4)
        expected, gradients = torch.load(Path(directory) / f"{name}.pt")
        error = abs(value - expected) / max(1.0, abs(expected))
        found[name] = (error, *worst_gradient(trained[0], gradients))
    return found
