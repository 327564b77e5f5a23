"""Estimates of a rank's activations in bytes, from the settings alone. Never imports torch."""

from __future__ import annotations

from parallel.estimates.tensor_sizes import BYTES, FP32, dense_widths
from parallel.families import DeepseekV3Architecture, Qwen35MoeArchitecture, architecture, is_linear
from parallel.layout_rules import chunk_layers
from parallel.settings import LayoutSettings, ModelSettings

# Of parallel.model.vocabulary: the largest chunk on a GPU, and the chunks that are alive at once.
LOSS_CHUNK_BYTES, LOSS_CHUNKS = 512 << 20, 3


def kept_activations(
    model: ModelSettings, layout: LayoutSettings, rank: int, tokens: int, values: bool
) -> int:
    """Return the bytes that forward passes keep for their backward passes on a pipeline rank.

    `tokens` are of a micro-batch's whole row, which context-parallel ranks share; `values` is true
    of a critic, which has no logits.
    """
    # The most chunks between forward and backward pass (1F1B, a full pipeline).
    in_flight = layout.pipeline - rank
    if layout.virtual_pipeline > 1:
        in_flight = 2 * in_flight - 1 + (layout.virtual_pipeline - 1) * layout.pipeline
    in_flight *= len(chunk_layers(model, layout)[rank])  # all chunks of a stage are equal
    share = tokens / (layout.context * layout.tensor)
    layer = share * _layer_activations(model, layout)
    if layout.recompute == "full":  # every layer keeps its input, and one at a time is recomputed
        activations = in_flight * share * model.hidden_size * BYTES[model.precision] + layer
    else:  # of the modules that are recomputed, one layer's at a time
        again = share * _recomputed_activations(model, layout)
        activations = in_flight * (layer - again) + again
    if rank == layout.pipeline - 1 and not values:
        # The logits and their gradient; the loss computes in fp32 on one chunk of them at a time.
        size = FP32 if model.precise_head else BYTES[model.precision]
        activations += 2 * share * model.vocabulary_size * size
        activations += _loss_buffers(model, layout, tokens)
    return round(activations)


def forward_activations(model: ModelSettings, layout: LayoutSettings, tokens: int) -> int:
    """Return what a forward pass of a row of `tokens` without gradients needs: one layer.

    Bytes on a rank, estimated.
    """
    share = tokens / (layout.context * layout.tensor)
    logits = _loss_buffers(model, layout, tokens)
    return round(share * _layer_activations(model, layout)) + logits


def routed_bytes(model: ModelSettings, layout: LayoutSettings, tokens: int) -> int:
    """Return the bytes of hidden states that a layer's dispatch to experts sends or receives.

    Tokens are assumed to spread evenly over the experts.
    """
    sent = tokens * model.experts_per_token * layout.expert_tensor
    return BYTES[model.precision] * sent * model.hidden_size // (layout.context * layout.tensor)


def _loss_buffers(model: ModelSettings, layout: LayoutSettings, tokens: int) -> int:
    """Return the bytes of the chunks of logits in fp32 that are alive at once in the loss."""
    whole = FP32 * tokens * model.vocabulary_size // (layout.context * layout.tensor)
    return LOSS_CHUNKS * min(LOSS_CHUNK_BYTES, whole)


def _layer_activations(model: ModelSettings, layout: LayoutSettings) -> float:
    """Return the bytes that a layer keeps of a token, over the tensor-parallel ranks, which share.

    As plain torch keeps them; fused kernels keep up to a third less. Assumed are tokens spread
    evenly over the experts, and an attention that keeps no scores, only their normaliser.

    Of the hidden size: both norms' input, normalised input and output. Of attention: the joint
    projection; queries and keys each raw (queries only), normalised and rotated; the output. Of
    each of a token's experts: its input, and of its hidden size the joint projection and four
    steps of the gated activation. Layers without experts are taken for layers with some.
    """
    numbers = 6 * model.hidden_size + _attention_activations(model)
    numbers += _routed_activations(model, layout) + _shared_activations(model)
    normaliser = 0 if layout.recompute == "attention" else FP32 * model.attention_heads
    return numbers * BYTES[model.precision] + _router_bytes(model) + normaliser


def _recomputed_activations(model: ModelSettings, layout: LayoutSettings) -> int:
    """Return what `recompute_modules` take of `_layer_activations`; their inputs are kept.

    Of moe_act the four steps of the experts' gated activation. Not counted are layernorm and
    mla_up_proj, nor mlp, which layers with experts do not have.
    """
    modules, size = layout.recompute_modules, BYTES[model.precision]
    shared = _shared_activations(model)
    if "moe" in modules:
        return size * (_routed_activations(model, layout) + shared) + _router_bytes(model)
    steps = 4 * model.experts_per_token * model.expert_hidden_size
    return size * (("moe_act" in modules) * steps + ("shared_experts" in modules) * shared)


def _routed_activations(model: ModelSettings, layout: LayoutSettings) -> int:
    """Return the numbers that a token's routed experts keep of it."""
    one = layout.expert_tensor * model.hidden_size + 6 * model.expert_hidden_size
    return model.experts_per_token * one


def _shared_activations(model: ModelSettings) -> int:
    """Return the numbers that the shared experts of a layer keep of a token."""
    return sum(6 * width * layers for width, layers in dense_widths(model, 1, 1))


def _router_bytes(model: ModelSettings) -> int:
    """Return the bytes that a router keeps of a token."""
    return model.experts * (FP32 + 1)  # a weight in fp32, and whether the expert was chosen


def _attention_activations(model: ModelSettings) -> float:
    """Return the numbers that a layer's attention keeps of a token; the mean of hybrid layers.

    Multi-latent: the compressed ones, raw and normalised; queries raw and rotated; keys and values
    joint and apart; the output. An output gate: itself, its sigmoid, the output before it. Delta
    nets compute their convolution and states again, and keep what goes into these; in fp32 the
    heads' outputs and gates, raw and normalised or activated; the product.
    """
    further, heads = architecture(model), model.attention_heads
    if isinstance(further, Qwen35MoeArchitecture):
        wide = further.linear_num_value_heads * further.linear_value_head_dim
        linear = further.linear_channels + wide * (1 + 4 * FP32 / BYTES[model.precision])
        full = (8 * heads + 4 * model.key_value_heads) * model.head_dim
        share = sum(is_linear(further, layer) for layer in range(model.layers)) / model.layers
        return share * linear + (1 - share) * full
    if isinstance(further, DeepseekV3Architecture):
        query = further.qk_nope_head_dim + model.head_dim
        compressed = 3 * ((further.q_lora_rank or 0) + further.kv_lora_rank) + model.head_dim
        joint = further.qk_nope_head_dim + further.v_head_dim
        return compressed + heads * (3 * query + joint + 2 * further.v_head_dim)
    return (5 * heads + 4 * model.key_value_heads) * model.head_dim
