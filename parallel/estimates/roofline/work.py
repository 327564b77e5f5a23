"""The work of a step: its sequences, and the elements and FLOPs of a model's parts."""

from __future__ import annotations

from dataclasses import dataclass

from parallel.estimates.tensor_sizes import (
    dense_widths,
    expert_tensors,
    has_shared_gate,
    mixer_elements,
    router_tensors,
)
from parallel.families import (
    DeepseekV3Architecture,
    architecture,
    full_attention_layers,
    once_per_settings,
    routed_layers,
)
from parallel.settings import ModelSettings


@dataclass(frozen=True)
class StepWorkload:
    """The sequences of a step, in tokens of prompt and response: their mean, and the longest.

    `row_tokens` are a micro-batch's on all context-parallel ranks together. `passes` are those of
    log-probabilities over all sequences before the updates. `steps_in_flight` is 1 where sampling
    and training alternate, else the steps whose prompts are sampled at once. `imbalance` is the
    tokens of the fullest expert-parallel rank over their mean.
    """

    sequences: int
    mean_tokens: float
    most_tokens: int
    row_tokens: float
    passes: int = 1
    updates: int = 1
    steps_in_flight: int = 1
    imbalance: float = 1.0

    @property
    def tokens(self) -> float:
        """The tokens of all sequences."""
        return self.sequences * self.mean_tokens


@once_per_settings
def expert_elements(model: ModelSettings) -> int:
    """Return the elements of one routed expert of one layer."""
    return sum(expert_tensors(model))


@once_per_settings
def always_used(model: ModelSettings) -> int:
    """Return the elements of all layers that every token uses: all but the routed experts."""
    routed = len(routed_layers(model))
    widths = sum(width * layers for width, layers in dense_widths(model, routed, model.layers))
    router = routed * (sum(router_tensors(model)) + has_shared_gate(model) * model.hidden_size)
    mixers = mixer_elements(model, 1, range(model.layers))
    return sum(size * layers for size, layers in mixers) + router + 3 * widths * model.hidden_size


def score_flops(model: ModelSettings) -> float:
    """Return the FLOPs of a layer's attention of a token for each token before it, halved.

    The mean over all layers: gated delta nets, whose states have one size, count as 0.
    """
    further = architecture(model)
    if isinstance(further, DeepseekV3Architecture):
        widths = further.qk_nope_head_dim + model.head_dim + further.v_head_dim
    else:
        widths = 2 * model.head_dim
    return model.attention_heads * widths * len(full_attention_layers(model)) / model.layers
