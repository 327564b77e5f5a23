"""The cases of a bf16 model whose output head has fp32 logits, which ranks run."""

from __future__ import annotations

from typing import Any

import torch

from parallel.settings import LayoutSettings
from tests.layouts.cases import ADAM, MODEL, NO_LOSSES, batches, samples


def differences(layout: LayoutSettings, head_precision: str) -> dict[str, float]:
    """Return the largest errors of log-probabilities and gradients against float64.

    The reference has the same hidden states and head, and the whole vocabulary of all ranks. The
    error of a gradient is relative to its largest element.
    """
    from parallel.model.policy import TrainedPolicy

    update = {"precision": "bf16", "head_precision": head_precision}
    policy = TrainedPolicy(MODEL.model_copy(update=update), layout, ADAM, 10, NO_LOSSES)
    policy.start_fresh(3)
    with torch.no_grad():
        policy.chunks[-1].output_layer.weight.mul_(8)  # logits of up to 20, as of real models
    policy.weights_changed()
    drawn = samples(8)
    [batch] = batches(drawn)
    [lazy] = policy.response_logits([batch])
    logprobs: list[Any] = []

    def loss(responses: Any) -> tuple[torch.Tensor, None]:
        found = responses.logprobs()
        logprobs.append(found.detach()[batch.mask].double())
        return -found[batch.mask].sum(), None

    policy.accumulate([batch], loss, sum(each.length for each in drawn))
    weight = policy.chunks[-1].output_layer.weight
    [evaluated] = policy.target_logprobs([batch], 1.0)

    hidden, head = lazy.hidden.double(), _whole(weight.detach()).double().requires_grad_()
    expected = (hidden @ head.T).log_softmax(-1).gather(1, batch.own_targets[:, None]).squeeze(1)
    expected = batch.spread(expected.detach().float())[batch.mask].double()
    (hidden @ head.T).log_softmax(-1).gather(1, batch.own_targets[:, None]).sum().neg().backward()
    assert head.grad is not None
    gradient = _whole(weight.main_grad).double()
    return {
        "training": (logprobs[0] - expected).abs().max().item(),
        "evaluation": (evaluated[batch.mask].double() - expected).abs().max().item(),
        "gradient": ((gradient - head.grad).abs().max() / head.grad.abs().max()).item(),
        "embedding": float(policy.chunks[0].embedding.word_embeddings.weight.main_grad.norm()),
    }


def _whole(part: torch.Tensor) -> torch.Tensor:
    """Return the rows of every tensor-parallel rank."""
    from parallel.model.vocabulary import across_ranks

    return across_ranks(part.contiguous()).flatten(0, 1)
