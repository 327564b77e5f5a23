"""The seconds of the trainer's passes over a step's sequences."""

from __future__ import annotations

import math

from parallel.estimates.roofline.hardware import DataSheet, Efficiencies
from parallel.estimates.roofline.work import StepWorkload, always_used, expert_elements, score_flops
from parallel.estimates.tensor_sizes import BYTES
from parallel.families import routed_layers
from parallel.layout_rules import chunk_layers
from parallel.settings import LayoutSettings, ModelSettings

# Of a forward pass: what `recompute` repeats in the backward pass.
REPEATED = {"none": 0.0, "attention": 0.2, "selective": 0.5, "full": 1.0}
LAUNCHES_BACKWARD = 1.5  # kernels of a layer's backward pass for each of its forward pass


def training_seconds(
    model: ModelSettings,
    layout: LayoutSettings,
    work: StepWorkload,
    gpu: DataSheet,
    reached: Efficiencies,
) -> tuple[float, float, float]:
    """Return the seconds of a pass without gradients, of all updates, and the bubble's share.

    The slowest pipeline rank sets the pace; `1 / virtual_pipeline` of its first micro-batches is
    what the bubble costs (arXiv 2104.04473).
    """
    per_rank = work.tokens / layout.data / work.updates
    tokens = min(work.row_tokens, per_rank)
    products, links = _layer_seconds(model, layout, work, tokens, gpu, reached)
    forward = max(products + links, reached.layer)
    backward = max(2 * products + links, LAUNCHES_BACKWARD * reached.layer)
    again = REPEATED[layout.recompute] * forward
    layers = _most_layers(model, layout)
    share = tokens / (layout.context * layout.tensor)
    head = 2 * share * model.vocabulary_size * model.hidden_size / (gpu.flops * reached.dense)
    head /= layout.pipeline  # at least one stage has fewer layers beside it, or hides a part of it
    hop = 0.0  # to the next stage, of every chunk of layers
    if layout.pipeline > 1:
        sent = share * model.hidden_size * BYTES["bf16"] * layout.virtual_pipeline
        hop = sent / (gpu.network_bandwidth * reached.network)
    filling = (layout.pipeline - 1) / layout.virtual_pipeline
    rounds = math.ceil(per_rank / tokens) + filling
    passed = math.ceil(work.tokens / layout.data / tokens) + filling
    both = layers * (forward + backward + again) + 3 * head + 2 * hop
    return passed * (layers * forward + head + hop), work.updates * rounds * both, filling / rounds


def _most_layers(model: ModelSettings, layout: LayoutSettings) -> int:
    """Return the layers of the pipeline rank that has most."""
    chunks = [len(layers) for layers in chunk_layers(model, layout)]
    return max(sum(chunks[rank :: layout.pipeline]) for rank in range(layout.pipeline))


def _layer_seconds(
    model: ModelSettings,
    layout: LayoutSettings,
    work: StepWorkload,
    tokens: float,
    gpu: DataSheet,
    reached: Efficiencies,
) -> tuple[float, float]:
    """Return the seconds of a layer's forward pass on a rank: products, and waits for links."""
    share = tokens / (layout.context * layout.tensor)
    length = min(tokens, work.mean_tokens)
    scores = share * length * score_flops(model)  # half of a square: causal
    dense = 2 * share * always_used(model) / model.layers + scores
    routed = len(routed_layers(model)) / model.layers
    experts_per_token = model.experts_per_token * work.imbalance
    experts = 2 * share * routed * experts_per_token * expert_elements(model)
    products = dense / (gpu.flops * reached.dense) + experts / (gpu.flops * reached.experts)
    group = layout.expert * layout.expert_tensor
    sent = share * experts_per_token * model.hidden_size * BYTES["bf16"] * (group - 1) / group
    near, far = gpu.link_bandwidth * reached.link, gpu.network_bandwidth * reached.network
    links = 2 * routed * sent / (near if group <= gpu.linked else far)
    whole = share * layout.tensor * model.hidden_size * BYTES["bf16"]
    links += 4 * whole * (layout.tensor - 1) / layout.tensor / near
    return products, links
