"""The bytes that a rank holds, from the settings alone. Never imports torch.

Parameters, gradients and optimizer state are counted as megatron-core lays them out, padding
included. Activations are an estimate.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace

from parallel.estimates.tensor_sizes import BYTES, FP32, Tensors, dense_widths, rank_chunks
from parallel.families import (
    DeepseekV3Architecture,
    Qwen35MoeArchitecture,
    architecture,
    is_linear,
    once_per_settings,
)
from parallel.layout_rules import chunk_layers
from parallel.settings import LayoutSettings, ModelSettings, OptimizerSettings

OPTIMIZER_STATES = {"adam": 2, "sgd": 1}  # fp32 numbers a parameter: two moments, or a momentum

# megatron-core's distributed optimizer starts every tensor of its buffers at a multiple of the
# first and ends every buffer at one of the second (param_and_grad_buffer.py).
TENSOR_ALIGNMENT, BUFFER_ALIGNMENT = 64, 128


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
class RankModels:
    """The models of a stage on one rank.

    `forward` are the activations of a pass without gradients, `routed` a layer's hidden states on
    the way to its experts. `frozen` is the largest of the frozen models, whose number counts on the
    host; `heads` are output heads of theirs that a loss still needs. `updates` are those of a step.
    """

    policy: RankMemory
    critic: RankMemory | None = None
    forward: int = 0
    routed: int = 0
    frozen: int = 0
    frozen_models: int = 0
    heads: int = 0
    updates: int = 1
    trains: bool = True

    @property
    def trained(self) -> list[RankMemory]:
        """The policy, and the critic where there is one; or the model that is only read."""
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    @property
    def memory(self) -> RankMemory:
        """The memory of all models together."""
        return self.policy if self.critic is None else self.policy.beside(self.critic)


@once_per_settings
def training_memory(
    model: ModelSettings,
    layout: LayoutSettings,
    optimizer: OptimizerSettings,
    row_tokens: int,
    frozen_models: int = 0,
    averages: int = 0,
    values: bool = False,
) -> list[RankMemory]:
    """Return the memory of one rank of every pipeline rank while it trains, first rank first.

    Args:
        model, layout: without `layout_violations`.
        row_tokens: tokens of the fullest micro-batch, on all context-parallel ranks together
            (`parallel.micro_batches.most_row_tokens`).
        frozen_models: references and teachers held beside the policy.
        averages: of the policy's weights over its updates, which are kept in fp32.
        values: true for a critic's model, whose head gives one value and no logits.
    """
    if optimizer.algorithm != "adam":  # megatron-core's distributed optimizer has only Adam
        layout = layout.model_copy(update={"distributed_optimizer": False})
    precision, low = BYTES[model.precision], model.precision == "bf16"
    moment = BYTES["bf16"] if low and optimizer.precision_aware else FP32
    # Of an element: its moments, and bf16's master weight in fp32.
    states = OPTIMIZER_STATES[optimizer.algorithm] * moment + low * FP32
    ranks = []
    for rank in range(layout.pipeline):
        chunks = rank_chunks(model, layout, rank, values)
        sizes = [_buffers(chunk, layout) for chunk in chunks]
        buffered, updated = (sum(counts) for counts in zip(*sizes, strict=True))
        weights = sum(chunk.elements for chunk in chunks)
        on_host = round(optimizer.cpu_offload * states * updated)
        ranks.append(
            RankMemory(
                parameters=precision * buffered,
                gradients=FP32 * buffered,
                optimizer=states * updated - on_host,
                frozen=weights * (precision * frozen_models + FP32 * averages),
                activations=kept_activations(model, layout, rank, row_tokens, values),
                host_optimizer=on_host,
            )
        )
    return ranks


def reading_memory(model: ModelSettings, layout: LayoutSettings) -> list[RankMemory]:
    """Return the memory of one rank of every pipeline rank for a model that is only read."""
    precision = BYTES[model.precision]
    return [
        RankMemory(precision * sum(chunk.elements for chunk in rank_chunks(model, layout, rank)))
        for rank in range(layout.pipeline)
    ]


def head_bytes(model: ModelSettings, layout: LayoutSettings) -> int:
    """Return the bytes of the output head on a rank of the last pipeline stage."""
    return BYTES[model.precision] * model.vocabulary_size * model.hidden_size // layout.tensor


def _buffers(chunk: Tensors, layout: LayoutSettings) -> tuple[int, int]:
    """Return the elements of a chunk's gradient buffers, and of the optimizer state on this rank.

    Of a sharded optimizer both are padded, as are the weights, and the rank has a share of the
    state. Each chunk has one buffer of dense weights and one of experts. Where megatron-core cuts
    them into buckets, to overlap reduction, the end of each is padded as well: this is not counted,
    since it is at most 254 bytes a bucket, and 0 for tensors of multiples of 128 elements.
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
