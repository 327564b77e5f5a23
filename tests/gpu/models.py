"""The models of the GPU lane, and random samples for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from parallel.sample import Sample
from parallel.settings import LayoutSettings, ModelSettings, OptimizerSettings
from tests.layouts.real_models import QWEN3_30B

LAYOUT = LayoutSettings(distributed_optimizer=False)
# Sizes that TransformerEngine's kernels accept.
TINY = ModelSettings(
    vocabulary_size=512,
    hidden_size=128,
    layers=2,
    attention_heads=4,
    key_value_heads=2,
    head_dim=64,
    experts=8,
    experts_per_token=2,
    expert_hidden_size=64,
)
QWEN3_30B_LAYERS = QWEN3_30B.layers
ADAM = OptimizerSettings(learning_rate=1e-3)


def qwen3_30b(layers: int) -> ModelSettings:
    """Return the first layers of Qwen3-30B-A3B at their full width, in bf16."""
    return QWEN3_30B.model_copy(update={"layers": layers})


def samples(model: ModelSettings, count: int, length: int, seed: int = 0) -> list[Sample]:
    """Return random samples of `length` tokens, half of them prompt, with mu and routes."""
    draw = np.random.default_rng(seed)
    half = length // 2
    found = []
    for _ in range(count):
        tokens = draw.integers(0, model.vocabulary_size, 2 * half, dtype=np.int32)
        chosen = np.argsort(draw.random((2 * half - 1, model.layers, model.experts)), -1)
        found.append(
            Sample(
                domain="a",
                prompt=tokens[:half],
                response=tokens[half:],
                logprobs=-draw.random(half).astype(np.float32),
                routes=chosen[..., : model.experts_per_token].astype(np.uint16),
                advantage=float(draw.normal()),
            )
        )
    return found


def trained_policy(model: ModelSettings, layout: LayoutSettings = LAYOUT) -> Any:
    """Return a policy with an optimizer, of the process's only rank, not initialised."""
    from parallel.model.policy import TrainedPolicy
    from parallel.settings import RoutingLossSettings

    return TrainedPolicy(model, layout, ADAM, steps=10, losses=RoutingLossSettings())
