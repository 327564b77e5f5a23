"""Gradients of one update, sample by sample, including the routers' losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stages.audit.model import Model, Read, Weights
from stages.audit.recorded import RecordedSample


class RouterLosses:
    """Load balance and z-loss over all tokens of an update (spec, section 6).

    E sum_e f_e P_e needs the experts' shares f of the whole update, so they are counted first.
    """

    def __init__(self, settings: dict[str, Any], samples: Sequence[RecordedSample]) -> None:
        self.settings = settings
        self.tokens = sum(len(sample.tokens) for sample in samples)
        self.shares: torch.Tensor | None = None  # [layers, experts]
        self.sums = {"load_balance": 0.0, "z_loss": 0.0}

    def count(self, model: Model, samples: Sequence[RecordedSample], replay: bool) -> None:
        """Count which experts the samples use."""
        if not self.settings["load_balance"]:
            return
        counts: torch.Tensor | float = 0.0
        slots = 0
        with torch.no_grad():
            for sample in samples:
                read = model.read(sample, replay)
                experts = read.router_logits.shape[-1]
                used = torch.nn.functional.one_hot(read.chosen, experts)
                counts = counts + used.sum((1, 2)).double()
                slots += read.chosen[0].numel()
        assert isinstance(counts, torch.Tensor)
        self.shares = counts / slots

    def of(self, read: Read) -> torch.Tensor:
        """Return one sample's part of both losses."""
        logits = read.router_logits
        total = logits.new_zeros(())
        if self.shares is not None:
            scores = logits.softmax(-1).sum(1) / self.tokens
            balance = logits.shape[-1] * (scores * self.shares).sum()
            total = total + self.settings["load_balance"] * balance
            self.sums["load_balance"] += balance.item() / len(logits)
        if self.settings["z_loss"]:
            square = logits.logsumexp(-1).square().sum() / self.tokens
            total = total + self.settings["z_loss"] * square
            self.sums["z_loss"] += square.item() / len(logits)
        return total

    def logged(self) -> dict[str, float]:
        """Return the means over layers of the losses that are in use."""
        return {name: value for name, value in self.sums.items() if self.settings[name]}


def gradients(
    model: Model,
    samples: Sequence[RecordedSample],
    replay: bool,
    losses: RouterLosses,
    loss: Callable[[Read], torch.Tensor],
) -> Weights:
    """Return the summed gradients of every sample's part of the loss and the routers' losses."""
    losses.count(model, samples, replay)
    model.module.zero_grad(set_to_none=True)
    for sample in samples:
        read = model.read(sample, replay)
        torch.autograd.backward(loss(read) + losses.of(read))
    return {
        name: torch.zeros_like(each) if each.grad is None else each.grad.detach().clone()
        for name, each in model.parameters.items()
    }
