"""The bytes that a rank holds, from the settings alone. Never imports torch.

Parameters, gradients and optimizer state are counted as megatron-core lays them out, padding
included. Activations are an estimate: see `_layer_activations`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Literal

from parallel.families import (
    DeepseekV3Architecture,
    Glm4MoeArchitecture,
    GptOssArchitecture,
    NothingFurther,
    Qwen35MoeArchitecture,
    architecture,
    is_linear,
    routed_layers,
)
from parallel.layout_rules import chunk_layers
from parallel.settings import LayoutSettings, ModelSettings

BYTES = {"fp32": 4, "bf16": 2}
FP32 = BYTES["fp32"]
OPTIMIZER_STATES = {"adam": 2, "sgd": 1}  # fp32 numbers a parameter: two moments, or a momentum

# megatron-core's distributed optimizer starts every tensor of its buffers at a multiple of the
# first and ends every buffer at one of the second (param_and_grad_buffer.py).
TENSOR_ALIGNMENT, BUFFER_ALIGNMENT = 64, 128

# Of parallel.model.vocabulary: the largest chunk on a GPU, and the chunks that are alive at once.
LOSS_CHUNK_BYTES, LOSS_CHUNKS = 512 << 20, 3


@dataclass(frozen=True)
class RankMemory:
    """Bytes one rank holds while a stage runs; `frozen` are models that no optimizer changes.

    `host_optimizer` is the optimizer's state in host memory, besides all that the total counts.
    """

    parameters: int
    gradients: int = 0
    optimizer: int = 0
    frozen: int = 0
    activations: int = 0
    host_optimizer: int = 0

    @property
    def total(self) -> int:
        """All of them together, without the state in host memory."""
        models = self.parameters + self.gradients + self.optimizer + self.frozen
        return models + self.activations

    def beside(self, other: RankMemory) -> RankMemory:
        """Add a model that trains in turn with this one: only one at a time has activations."""
        both = RankMemory(*map(sum, zip(astuple(self), astuple(other), strict=True)))
        return replace(both, activations=max(self.activations, other.activations))


@dataclass(frozen=True)
class Tensors:
    """A rank's share of some weights, as (elements of a tensor, number of such tensors).

    Experts have separate buffers, since they are copied over other ranks than dense weights.
    """

    dense: list[tuple[int, int]]
    experts: list[tuple[int, int]]

    @property
    def elements(self) -> int:
        """All elements, without padding."""
        return sum(size * count for size, count in self.dense + self.experts)


def training_memory(
    model: ModelSettings,
    layout: LayoutSettings,
    algorithm: Literal["adam", "sgd"],
    micro_batch_tokens: int,
    frozen_models: int = 0,
    averages: int = 0,
    values: bool = False,
    precision_aware: bool = False,
    cpu_offload: float = 0.0,
) -> list[RankMemory]:
    """Return the memory of one rank of every pipeline rank while it trains, first rank first.

    Args:
        model, layout: without `layout_violations`.
        micro_batch_tokens: tokens of a micro-batch, before context parallelism splits it.
        frozen_models: references and teachers held beside the policy.
        averages: of the policy's weights over its updates, which are kept in fp32.
        values: true for a critic's model, whose head gives one value and no logits.
        precision_aware, cpu_offload: as in OptimizerSettings.
    """
    if algorithm != "adam":  # megatron-core's distributed optimizer has only Adam
        layout = layout.model_copy(update={"distributed_optimizer": False})
    precision = BYTES[model.precision]
    states = _state_bytes(model, algorithm, precision_aware)
    found = []
    for rank in range(layout.pipeline):
        chunks = _chunks(model, layout, rank, values)
        sizes = [_buffers(chunk, layout) for chunk in chunks]
        buffered, updated = (sum(each) for each in zip(*sizes, strict=True))
        weights = sum(chunk.elements for chunk in chunks)
        on_host = round(cpu_offload * states * updated)
        found.append(
            RankMemory(
                parameters=precision * buffered,
                gradients=FP32 * buffered,
                optimizer=states * updated - on_host,
                frozen=weights * (precision * frozen_models + FP32 * averages),
                activations=_activations(model, layout, rank, micro_batch_tokens, values),
                host_optimizer=on_host,
            )
        )
    return found


def reading_memory(model: ModelSettings, layout: LayoutSettings) -> list[RankMemory]:
    """Return the memory of one rank of every pipeline rank for a model that is only read."""
    precision = BYTES[model.precision]
    return [
        RankMemory(precision * sum(chunk.elements for chunk in _chunks(model, layout, rank)))
        for rank in range(layout.pipeline)
    ]


def forward_activations(model: ModelSettings, layout: LayoutSettings, tokens: int) -> int:
    """Return an estimate of what a forward pass without gradients needs on a rank: one layer."""
    share = tokens / (layout.context * layout.tensor)
    logits = _loss_buffers(model, layout, tokens)
    return round(share * _layer_activations(model, layout)) + logits


def head_bytes(model: ModelSettings, layout: LayoutSettings) -> int:
    """Return the bytes of the output head on a rank of the last pipeline stage."""
    return BYTES[model.precision] * model.vocabulary_size * model.hidden_size // layout.tensor


def routed_bytes(model: ModelSettings, layout: LayoutSettings, tokens: int) -> int:
    """Return the bytes of hidden states that a layer's dispatch to experts sends or receives.

    Tokens are assumed to spread evenly over the experts.
    """
    sent = tokens * model.experts_per_token * layout.expert_tensor
    return BYTES[model.precision] * sent * model.hidden_size // (layout.context * layout.tensor)


def parameter_count(model: ModelSettings) -> tuple[int, int]:
    """Return the model's parameters, and the number of them that a token uses."""
    [whole] = _chunks(model, LayoutSettings(), 0)
    expert = sum(expert_tensors(model))
    unused = len(routed_layers(model)) * (model.experts - model.experts_per_token) * expert
    return whole.elements, whole.elements - unused


def _chunks(
    model: ModelSettings, layout: LayoutSettings, rank: int, values: bool = False
) -> list[Tensors]:
    numbers = range(rank, layout.pipeline * layout.virtual_pipeline, layout.pipeline)
    return [_chunk(model, layout, number, values) for number in numbers]


def _chunk(model: ModelSettings, layout: LayoutSettings, number: int, values: bool) -> Tensors:
    """Return a chunk's layers, with the embedding before the first, the head after the last."""
    layers = chunk_layers(model, layout)
    count = len(layers[number])
    routed = sum(layer in routed_layers(model) for layer in layers[number])
    hidden, tensor = model.hidden_size, layout.tensor
    last = number == len(layers) - 1
    vocabulary = model.vocabulary_size * hidden // tensor
    dense = mixer_elements(model, tensor, layers[number])
    for width, layers_of_it in dense_widths(model, routed, count):
        part = width * hidden // tensor
        dense += [(2 * part, layers_of_it), (part, layers_of_it)]
    dense += [
        *((size, routed) for size in router_tensors(model)),  # whole on every tensor rank
        (hidden, routed * has_shared_gate(model)),
        (hidden, 2 * count + last),  # norms
        (vocabulary, int(number == 0)),
        (hidden if values else vocabulary, int(last)),  # the head
    ]
    held = routed * model.experts // layout.expert
    parts = layout.expert_tensor
    return Tensors(dense, [(size // parts, held) for size in expert_tensors(model)])


def expert_tensors(model: ModelSettings) -> list[int]:
    """Return the elements of each tensor of an expert."""
    hidden, width = model.hidden_size, model.expert_hidden_size
    biases = [2 * width, hidden] if model.family == "gpt_oss" else []
    return [2 * width * hidden, width * hidden, *biases]


def router_tensors(model: ModelSettings) -> list[int]:
    """Return the elements of each trained tensor of a router."""
    biases = [model.experts] if model.family == "gpt_oss" else []
    return [model.experts * model.hidden_size, *biases]


def dense_widths(model: ModelSettings, routed: int, layers: int) -> list[tuple[int, int]]:
    """Return (hidden size, layers) of the shared experts, and of the layers without experts."""
    further = architecture(model)
    if isinstance(further, NothingFurther | GptOssArchitecture):
        return []
    if isinstance(further, Qwen35MoeArchitecture):
        return [(further.shared_expert_intermediate_size, routed)]
    shared = further.n_shared_experts * model.expert_hidden_size
    return [(shared, routed), (further.intermediate_size, layers - routed)]


def has_shared_gate(model: ModelSettings) -> bool:
    """Return true if a gate of `hidden_size` weights scales the shared expert's output."""
    return isinstance(architecture(model), Qwen35MoeArchitecture)


def mixer_elements(
    model: ModelSettings, tensor: int, layers: Sequence[int]
) -> list[tuple[int, int]]:
    """Return (elements of a tensor on a tensor-parallel rank, layers) of attention or delta nets.

    Of these layers, counted from 0.
    """
    further = architecture(model)
    linear = sum(is_linear(further, layer) for layer in layers)
    full = len(layers) - linear
    found = [(size, full) for size in attention_elements(model, tensor)]
    if isinstance(further, Qwen35MoeArchitecture):
        found += [(size, linear) for size in _delta_net_elements(model, further, tensor)]
    return [(size, count) for size, count in found if count]


def _delta_net_elements(
    model: ModelSettings, further: Qwen35MoeArchitecture, tensor: int
) -> list[int]:
    heads, channels = further.linear_num_value_heads, further.linear_channels
    wide = heads * further.linear_value_head_dim
    return [
        (channels + wide + 2 * heads) * model.hidden_size // tensor,
        channels * further.linear_conv_kernel_dim // tensor,
        *[heads // tensor] * 2,
        further.linear_value_head_dim,
        wide * model.hidden_size // tensor,
    ]


def attention_elements(model: ModelSettings, tensor: int) -> list[int]:
    """Return the elements of each tensor of a layer's attention on a tensor-parallel rank."""
    further = architecture(model)
    hidden, heads = model.hidden_size, model.attention_heads
    if isinstance(further, DeepseekV3Architecture):
        query, latent = further.qk_nope_head_dim + model.head_dim, further.kv_lora_rank
        reads = further.q_lora_rank or hidden
        return [
            *([reads * hidden, reads] if further.q_lora_rank else []),
            heads * query * reads // tensor,
            (latent + model.head_dim) * hidden,
            latent,
            heads * (further.qk_nope_head_dim + further.v_head_dim) * latent // tensor,
            heads * further.v_head_dim * hidden // tensor,
        ]
    queries, keys = heads * model.head_dim, model.key_value_heads * model.head_dim
    gated = isinstance(further, Qwen35MoeArchitecture)
    read = (2 if gated else 1) * queries + 2 * keys
    sizes = [read * hidden // tensor, queries * hidden // tensor]
    if isinstance(further, GptOssArchitecture):  # biases, and a sink of each head
        return [*sizes, (queries + 2 * keys) // tensor, hidden, heads // tensor]
    glm = isinstance(further, Glm4MoeArchitecture)
    if glm and further.attention_bias:
        sizes.append((queries + 2 * keys) // tensor)
    if further.use_qk_norm if glm else (gated or model.family == "qwen3_moe"):
        sizes += [model.head_dim] * 2
    return sizes


def _state_bytes(model: ModelSettings, algorithm: str, precision_aware: bool) -> int:
    """Return the bytes of optimizer state of an element: moments, and bf16's master in fp32."""
    low = model.precision == "bf16"
    moment = BYTES["bf16"] if low and precision_aware else FP32
    return OPTIMIZER_STATES[algorithm] * moment + low * FP32


def _buffers(chunk: Tensors, layout: LayoutSettings) -> tuple[int, int]:
    """Return the elements of a chunk's gradient buffers, and of the optimizer state on this rank.

    Of a sharded optimizer both are padded, as are the weights, and the rank has a share of the
    state. Each chunk has one buffer of dense weights and one of experts: without overlapped
    reduction megatron-core does not cut them into buckets.
    """
    if not layout.distributed_optimizer:
        return chunk.elements, chunk.elements
    dense = layout.ranks // (layout.tensor * layout.pipeline)  # ranks with a copy of each weight
    experts = layout.ranks // (layout.expert_tensor * layout.expert * layout.pipeline)
    sizes = _padded(chunk.dense, dense), _padded(chunk.experts, experts)
    return sum(sizes), sizes[0] // dense + sizes[1] // experts


def _padded(tensors: list[tuple[int, int]], copies: int) -> int:
    aligned = sum(count * _up(size, TENSOR_ALIGNMENT) for size, count in tensors)
    return _up(aligned, math.lcm(copies, BUFFER_ALIGNMENT))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _activations(
    model: ModelSettings, layout: LayoutSettings, rank: int, tokens: int, values: bool
) -> int:
    """Return the bytes that forward passes keep for their backward passes on a pipeline rank."""
    # The most chunks between forward and backward pass (1F1B, a full pipeline).
    in_flight = layout.pipeline - rank
    if layout.virtual_pipeline > 1:
        in_flight = 2 * in_flight - 1 + (layout.virtual_pipeline - 1) * layout.pipeline
    in_flight *= len(chunk_layers(model, layout)[rank])  # all chunks of a stage are equal
    share = tokens / (layout.context * layout.tensor)
    layer = share * _layer_activations(model, layout)
    if layout.recompute == "full":  # every layer keeps its input, and one at a time is recomputed
        kept = in_flight * share * model.hidden_size * BYTES[model.precision] + layer
    else:  # of the modules that are recomputed, one layer's at a time
        again = share * _recomputed_activations(model, layout)
        kept = in_flight * (layer - again) + again
    if rank == layout.pipeline - 1 and not values:
        # The logits and their gradient; the loss computes in fp32 on one chunk of them at a time.
        kept += 2 * share * model.vocabulary_size * BYTES[model.precision]
        kept += _loss_buffers(model, layout, tokens)
    return round(kept)


def _loss_buffers(model: ModelSettings, layout: LayoutSettings, tokens: int) -> int:
    """Return the bytes of the chunks of logits in fp32 that are alive at once in the loss."""
    whole = FP32 * tokens * model.vocabulary_size // (layout.context * layout.tensor)
    return LOSS_CHUNKS * min(LOSS_CHUNK_BYTES, whole)


def _layer_activations(model: ModelSettings, layout: LayoutSettings) -> float:
    """Return the bytes a layer keeps of a token, times `tensor`, over which all are split.

    As plain torch keeps them; fused kernels keep up to a third less. Assumed are tokens spread
    evenly over the experts, and an attention that keeps no scores, only their normaliser.

    Of the hidden size: both norms' input, normalised input and output. Of attention: the joint
    projection; queries and keys each raw (queries only), normalised and rotated; the output. Of
    each of a token's experts: its input, and of its hidden size the joint projection and four
    steps of the gated activation. Layers without experts are taken for layers with some.
    """
    numbers = 6 * model.hidden_size + _attention_activations(model)
    routed = layout.expert_tensor * model.hidden_size + 6 * model.expert_hidden_size
    numbers += model.experts_per_token * routed
    numbers += sum(6 * width * layers for width, layers in dense_widths(model, 1, 1))
    router = model.experts * (FP32 + 1)  # a weight, and whether it was chosen
    normaliser = 0 if layout.recompute == "attention" else FP32 * model.attention_heads
    return numbers * BYTES[model.precision] + router + normaliser


def _recomputed_activations(model: ModelSettings, layout: LayoutSettings) -> int:
    """Return what `recompute_modules` take of `_layer_activations`; their inputs are kept.

    Of moe_act the four steps of the experts' gated activation. Not counted are layernorm and
    mla_up_proj, nor mlp, which layers with experts do not have.
    """
    modules, size = layout.recompute_modules, BYTES[model.precision]
    shared = sum(6 * width * layers for width, layers in dense_widths(model, 1, 1))
    if "moe" in modules:
        routed = layout.expert_tensor * model.hidden_size + 6 * model.expert_hidden_size
        router = model.experts * (FP32 + 1)
        return size * (model.experts_per_token * routed + shared) + router
    steps = 4 * model.experts_per_token * model.expert_hidden_size
    return size * (("moe_act" in modules) * steps + ("shared_experts" in modules) * shared)


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
