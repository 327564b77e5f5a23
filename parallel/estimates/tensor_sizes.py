"""The elements of a model's tensors on a rank, from the settings alone. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.families import (
    DeepseekV3Architecture,
    Glm4MoeArchitecture,
    GptOssArchitecture,
    NothingFurther,
    Qwen35MoeArchitecture,
    architecture,
    full_attention_layers,
    is_linear,
    routed_layers,
    traits,
)
from parallel.layout_rules import chunk_layers
from parallel.settings import LayoutSettings, ModelSettings

BYTES = {"fp32": 4, "bf16": 2}  # of an element, by model.precision
FP32 = BYTES["fp32"]


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


def parameter_count(model: ModelSettings) -> tuple[int, int]:
    """Return the model's parameters, and the number of them that a token uses."""
    [whole] = rank_chunks(model, LayoutSettings(), 0)
    expert = sum(expert_tensors(model))
    unused = len(routed_layers(model)) * (model.experts - model.experts_per_token) * expert
    return whole.elements, whole.elements - unused


def cached_elements(model: ModelSettings, ranks: int) -> int:
    """Return the elements of a token's keys and values on a tensor-parallel rank of an engine."""
    further = architecture(model)
    # The latent, or at least one key-value head, is on every rank.
    per_layer = 2 * max(1, model.key_value_heads // ranks) * model.head_dim
    if isinstance(further, DeepseekV3Architecture):
        per_layer = further.kv_lora_rank + model.head_dim
    return len(full_attention_layers(model)) * per_layer


def rank_chunks(
    model: ModelSettings, layout: LayoutSettings, rank: int, values: bool = False
) -> list[Tensors]:
    """Return the tensors of a pipeline rank's chunks, one for each of its virtual stages.

    `values` is true of a critic, whose head has one output in place of the vocabulary.
    """
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
        elements = width * hidden // tensor
        dense += [(2 * elements, layers_of_it), (elements, layers_of_it)]
    dense += [
        *((size, routed) for size in router_tensors(model)),  # whole on every tensor rank
        (hidden, routed * has_shared_gate(model)),
        (hidden, 2 * count + last),  # norms
        (vocabulary, int(number == 0)),
        (hidden if values else vocabulary, int(last)),  # the head
    ]
    experts = routed * model.experts // layout.expert
    expert_tensor = layout.expert_tensor
    return Tensors(dense, [(size // expert_tensor, experts) for size in expert_tensors(model)])


def expert_tensors(model: ModelSettings) -> list[int]:
    """Return the elements of each tensor of an expert."""
    hidden, width = model.hidden_size, model.expert_hidden_size
    biases = [2 * width, hidden] if traits(model).biased_experts else []
    return [2 * width * hidden, width * hidden, *biases]


def router_tensors(model: ModelSettings) -> list[int]:
    """Return the elements of each trained tensor of a router."""
    biases = [model.experts] if traits(model).biased_experts else []
    return [model.experts * model.hidden_size, *biases]


def dense_widths(model: ModelSettings, routed: int, layers: int) -> list[tuple[int, int]]:
    """Return (intermediate size, layers) of the shared experts and of the layers without experts.

    Of `layers` layers, `routed` have experts.
    """
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
    """Return the tensors of these layers' attention and delta nets on a tensor-parallel rank.

    Each is (its elements, the number of layers with one); `layers` are numbered from 0.
    """
    further = architecture(model)
    hybrid = isinstance(further, Qwen35MoeArchitecture)
    linear = sum(is_linear(further, layer) for layer in layers) if hybrid else 0
    full = len(layers) - linear
    tensors = [(size, full) for size in _attention_elements(model, tensor)]
    if hybrid:
        tensors += [(size, linear) for size in _delta_net_elements(model, further, tensor)]
    return [(size, count) for size, count in tensors if count]


def _delta_net_elements(
    model: ModelSettings, further: Qwen35MoeArchitecture, tensor: int
) -> list[int]:
    """Return the elements of each tensor of a gated delta net on a tensor-parallel rank."""
    heads, channels = further.linear_num_value_heads, further.linear_channels
    wide = heads * further.linear_value_head_dim
    return [
        (channels + wide + 2 * heads) * model.hidden_size // tensor,
        channels * further.linear_conv_kernel_dim // tensor,
        *[heads // tensor] * 2,  # A_log and dt_bias
        further.linear_value_head_dim,
        wide * model.hidden_size // tensor,
    ]


def _attention_elements(model: ModelSettings, tensor: int) -> list[int]:
    """Return the elements of each tensor of a layer's attention on a tensor-parallel rank."""
    further = architecture(model)
    hidden, heads = model.hidden_size, model.attention_heads
    if isinstance(further, DeepseekV3Architecture):
        query, latent = further.qk_nope_head_dim + model.head_dim, further.kv_lora_rank
        reads = further.q_lora_rank or hidden
        # Projections to the compressed queries and keys are whole on every rank; heads are split.
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
    if further.use_qk_norm if glm else traits(model).qk_norm:
        sizes += [model.head_dim] * 2
    return sizes
