"""One update in float64: gradients by sample, the routers' losses, clipping, AdamW or SGD."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.audit.model import Model, Read, Weights, norm
from stages.audit.recorded import RecordedSample

ADAM_EPSILON = 1e-8
NORM_EPSILON = 1e-6  # beside the norm that gradients are clipped by


@dataclass
class Optimizer:
    """The state of AdamW or SGD after `updates` of `total` updates: buffers by name and weight."""

    settings: dict[str, Any]
    buffers: dict[str, Weights]
    updates: int
    total: int

    def learning_rate(self) -> float:
        """Return the learning rate of the next update.

        It rises linearly from 1 / warmup_steps of the peak in the first update to the peak in the
        update after the warmup, and falls from there to final_ratio of the peak after the last.
        """
        top = float(self.settings["learning_rate"])
        warmup = min(self.settings["warmup_steps"], self.total - 1)
        if self.updates < warmup:
            start = top / max(1, self.settings["warmup_steps"])
            return start + (top - start) * self.updates / warmup
        if self.settings["decay"] == "constant":
            return top
        bottom = top * self.settings["final_ratio"]
        done = min((self.updates - warmup) / (self.total - warmup), 1.0)
        linear = self.settings["decay"] == "linear"
        left = 1 - done if linear else (1 + math.cos(math.pi * done)) / 2
        return bottom + (top - bottom) * left

    def step(self, model: Model, gradients: Weights) -> float:
        """Update a model and the buffers by unclipped gradients; return the gradients' 2-norm."""
        rate, size = self.learning_rate(), norm(gradients)
        scale = min(1.0, self.settings["clip_norm"] / (size + NORM_EPSILON))
        self.updates += 1
        update = self._adam if self.settings["algorithm"] == "adam" else self._sgd
        with torch.no_grad():
            for name, weight in model.parameters.items():
                # Of one dimension, as norms and biases, none decays.
                decay = float(self.settings["weight_decay"]) if weight.dim() > 1 else 0.0
                weight.copy_(update(name, weight, gradients[name] * scale, rate, decay))
        return size

    def _adam(
        self, name: str, weight: torch.Tensor, gradient: torch.Tensor, rate: float, decay: float
    ) -> torch.Tensor:
        beta1, beta2 = self.settings["betas"]
        mean = beta1 * self._buffer("exp_avg", name, weight) + (1 - beta1) * gradient
        square = self._buffer("exp_avg_sq", name, weight)
        square = beta2 * square + (1 - beta2) * gradient.square()
        self.buffers["exp_avg"][name], self.buffers["exp_avg_sq"][name] = mean, square
        unbiased = mean / (1 - beta1**self.updates)
        scale = (square / (1 - beta2**self.updates)).sqrt() + ADAM_EPSILON
        return weight * (1 - rate * decay) - rate * unbiased / scale

    def _sgd(
        self, name: str, weight: torch.Tensor, gradient: torch.Tensor, rate: float, decay: float
    ) -> torch.Tensor:
        decayed = self.settings["momentum"] * self._buffer("momentum_buffer", name, weight)
        momentum = decayed + gradient + decay * weight
        self.buffers["momentum_buffer"][name] = momentum
        return weight - rate * momentum

    def _buffer(self, kind: str, name: str, weight: torch.Tensor) -> torch.Tensor:
        return self.buffers.setdefault(kind, {}).setdefault(name, torch.zeros_like(weight))


def take_update(
    model: Model,
    optimizer: Optimizer,
    samples: Sequence[RecordedSample],
    routing: dict[str, Any],
    replay: bool,
    loss: Callable[[Read], torch.Tensor],
) -> dict[str, float]:
    """Update a model by the sum of every sample's loss and the routers' losses.

    Return the routers' losses in use, as means over layers, and the 2-norm of the gradients.
    """
    tokens = sum(len(sample.tokens) for sample in samples)
    shares = _expert_shares(model, samples, replay) if routing["load_balance"] else 0.0
    sums = {name: 0.0 for name in ("load_balance", "z_loss") if routing[name]}
    model.module.zero_grad(set_to_none=True)
    for sample in samples:
        read = model.read(sample, replay)
        logits, value = read.router_logits, loss(read)
        for name in sums:
            router_loss = (
                logits.shape[-1] * (logits.softmax(-1).sum(1) * shares).sum()
                if name == "load_balance"
                else logits.logsumexp(-1).square().sum()
            )
            value = value + routing[name] * router_loss / tokens
            sums[name] += router_loss.item() / tokens / len(logits)
        torch.autograd.backward(value)
    gradients = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.parameters.items()
    }
    return {**sums, "gradient_norm": optimizer.step(model, gradients)}


def _expert_shares(model: Model, samples: Sequence[RecordedSample], replay: bool) -> torch.Tensor:
    """Return the share of an update's tokens that each expert processes, [layers, experts].

    The load balance E sum_e f_e P_e needs these f of the whole update, so they are counted first.
    """
    counts = []
    with torch.no_grad():
        for sample in samples:
            read = model.read(sample, replay)
            used = torch.nn.functional.one_hot(read.experts, read.router_logits.shape[-1])
            counts.append(used.sum((1, 2)).double())
    total = torch.stack(counts).sum(0)
    return total / total[0].sum()
