"""The losses of a merge against nvidia-modelopt's distillation losses, values and gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from modelopt.torch.distill import LogitsDistillationLoss
from modelopt.torch.distill.plugins.megatron import LogitsKLLoss
from torch import Tensor

from stages.kinds.distill.losses.jsd import JSDSettings
from tests.stages.objectives.test_distillation import batch, drawn, values

pytestmark = pytest.mark.usefixtures("one_rank")

BOUND = 1e-6  # nats, in fp32


def theirs(student: Tensor, teacher: Tensor, reverse: bool) -> Tensor:
    """Return the loss of modelopt's plugin for Megatron, [n]: its tensors are [s, b, vocabulary].

    Only the student has a gradient.
    """
    config: Any = SimpleNamespace(tensor_model_parallel_size=1, sequence_parallel=False)
    loss = LogitsKLLoss(config, reverse=reverse)
    return loss(student.unsqueeze(1), teacher.unsqueeze(1))[0].squeeze(0)


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    return theirs(student, teacher, reverse=False)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    return theirs(student, teacher, reverse=True)


def logits_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    losses: Tensor = LogitsDistillationLoss(reduction="none")(student, teacher)
    return losses


def jsd(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the JSD as a sum of modelopt's KLs: it has no loss of that name.

    A KL of theirs has the gradient of one side, so that KL(S || M) is taken once for each side;
    the second time only for its gradient.
    """
    beta = JSDSettings().beta
    mixture = (beta * teacher.softmax(-1) + (1 - beta) * student.softmax(-1)).log()
    other_side = reverse_kl(student, mixture)
    both = forward_kl(mixture, student) + other_side - other_side.detach()
    return beta * forward_kl(mixture, teacher) + (1 - beta) * both


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("forward_kl", forward_kl),
        ("forward_kl", logits_distillation),
        ("full_vocab_reverse_kl", reverse_kl),
        ("jsd", jsd),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_losses_are_modelopt_s(name: str, loss: Any, seed: int) -> None:
    micro_batch = batch()
    logits = drawn(int(micro_batch.mask.sum()), torch.float32, seed)
    weights = torch.rand(len(logits["student"]), generator=torch.Generator().manual_seed(seed))
    by_side = {}
    for whose in ("ours", "theirs"):
        student = logits["student"].clone().requires_grad_()
        if whose == "ours":
            value = values({"name": name}, {**logits, "student": student}, micro_batch)
        else:
            value = loss(student, logits["teacher"])
        (value * weights).sum().backward()
        by_side[whose] = value.detach(), student.grad
    for ours, other in zip(by_side["ours"], by_side["theirs"], strict=True):
        assert ours is not None and ours.abs().max() > 1e-3
        torch.testing.assert_close(ours, other, rtol=0, atol=BOUND)
