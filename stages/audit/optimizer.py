"""One optimizer step from its gradients: schedule, clipping, and AdamW or SGD, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from stages.audit.model import Weights

ADAM_EPSILON = 1e-8
NORM_EPSILON = 1e-6  # beside the norm that gradients are clipped by


def learning_rate(settings: dict[str, Any], updates: int, total: int) -> float:
    """Return the learning rate of the update after `updates` others, of `total` in the stage.

    It rises linearly from 1 / warmup_steps of the peak in the first update to the peak in the
    update after the warmup, and falls from there to final_ratio of the peak after the last.
    """
    top = float(settings["learning_rate"])
    warmup = min(settings["warmup_steps"], total - 1)
    if updates < warmup:
        start = top / max(1, settings["warmup_steps"])
        return start + (top - start) * updates / warmup
    if settings["decay"] == "constant":
        return top
    bottom = top * settings["final_ratio"]
    done = min((updates - warmup) / (total - warmup), 1.0)
    left = 1 - done if settings["decay"] == "linear" else (1 + math.cos(math.pi * done)) / 2
    return bottom + (top - bottom) * left


def norm(gradients: Weights) -> float:
    """Return the 2-norm of all gradients together."""
    return math.sqrt(sum(float(each.square().sum()) for each in gradients.values()))


@dataclass
class Optimizer:
    """The state of AdamW or SGD after `updates` updates: its buffers by name, then by weight."""

    settings: dict[str, Any]
    buffers: dict[str, Weights]
    updates: int
    total: int

    def step(self, weights: Weights, gradients: Weights) -> Weights:
        """Return the weights after one update by unclipped gradients, and update the buffers."""
        rate = learning_rate(self.settings, self.updates, self.total)
        scale = min(1.0, self.settings["clip_norm"] / (norm(gradients) + NORM_EPSILON))
        self.updates += 1
        update = self._adam if self.settings["algorithm"] == "adam" else self._sgd
        return {
            name: update(name, weight, gradients[name] * scale, rate)
            for name, weight in weights.items()
        }

    def _decay(self, weight: torch.Tensor) -> float:
        """Return the weight decay of a parameter: 0 for one dimension, such as norms and biases."""
        return float(self.settings["weight_decay"]) if weight.dim() > 1 else 0.0

    def _adam(
        self, name: str, weight: torch.Tensor, gradient: torch.Tensor, rate: float
    ) -> torch.Tensor:
        first, second = self.settings["betas"]
        mean = first * self._buffer("exp_avg", name, weight) + (1 - first) * gradient
        square = self._buffer("exp_avg_sq", name, weight)
        square = second * square + (1 - second) * gradient.square()
        self.buffers["exp_avg"][name], self.buffers["exp_avg_sq"][name] = mean, square
        unbiased = mean / (1 - first**self.updates)
        scale = (square / (1 - second**self.updates)).sqrt() + ADAM_EPSILON
        return weight * (1 - rate * self._decay(weight)) - rate * unbiased / scale

    def _sgd(
        self, name: str, weight: torch.Tensor, gradient: torch.Tensor, rate: float
    ) -> torch.Tensor:
        kept = self.settings["momentum"] * self._buffer("momentum_buffer", name, weight)
        momentum = kept + gradient + self._decay(weight) * weight
        self.buffers["momentum_buffer"][name] = momentum
        return weight - rate * momentum

    def _buffer(self, kind: str, name: str, weight: torch.Tensor) -> torch.Tensor:
        return self.buffers.setdefault(kind, {}).setdefault(name, torch.zeros_like(weight))
