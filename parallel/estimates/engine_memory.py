"""The memory of an engine: on a CPU its cache, on each GPU also what vLLM needs beside it.

Never imports torch. Weights and cache are counted; what a process takes for itself is a constant,
and vLLM's workspace an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from parallel.errors import UserError
from parallel.estimates.tensor_sizes import BYTES, FP32, cached_elements
from parallel.families import (
    Qwen35MoeArchitecture,
    architecture,
    full_attention_layers,
    once_per_settings,
    routed_layers,
)
from parallel.settings import EngineSettings, ModelSettings
from parallel.weights.names import ModelWeights, Weight, is_precise
from parallel.weights.needs import needed_of

# Tokens that the engine's cache takes at once for a sequence; vLLM's kernels for CPUs want a
# multiple of 32, and its own 128 would leave short prompts uncached and most of a block unused.
CACHE_BLOCK = 32

GIB = 1 << 30
# On a GPU every process has a CUDA context, with its modules; every pair of a process and a GPU of
# another one whose memory it maps has one as well. Not measured here; 0.5 GiB is usual on Hopper.
CONTEXT_BYTES = GIB // 2
# NCCL's buffers of an engine of several ranks: 958 MiB a GPU with tensor and expert parallelism
# over 8 GPUs (vllm-project/vllm#46234). They stay while the engine sleeps.
COMMUNICATOR_BYTES = GIB
# The pool of captured CUDA graphs: 1.5 GB at 256 sequences (vllm-project/vllm#47654); it stays
# while the engine sleeps (vllm-project/vllm#56373).
GRAPH_BYTES = 3 * GIB // 2
# Left free on every GPU: peaks of kernels and libraries that no estimate has.
RESERVE_BYTES = GIB
BATCHED_TOKENS = 8192  # tokens of a step; on a GPU at least one for every sequence


@dataclass(frozen=True)
class EngineMemory:
    """The memory that vLLM gets on a GPU: a part to check at its start, and the cache's bytes."""

    gpu_memory_utilization: float
    kv_cache_memory_bytes: int


@dataclass(frozen=True)
class EngineShare:
    """The bytes of an engine on each of its GPUs.

    `process` is what it keeps while it sleeps, `bucket` the largest part of its weights that a
    refit stages at once. `least_cache` is for one sequence of max_model_tokens, `whole_cache` for
    max_sequences of them; both are the given size where there is one.
    """

    weights: int
    bucket: int
    workspace: int
    process: int
    least_cache: int
    whole_cache: int

    @property
    def least(self) -> int:
        """The fewest bytes of a GPU that it starts in."""
        return self.weights + self.workspace + self.process + RESERVE_BYTES + self.least_cache

    def cache(self, available: int | None) -> int:
        """Return the bytes of the cache in what is available to the engine, None being enough."""
        if available is None:
            return self.whole_cache
        fixed = self.least - self.least_cache
        return max(self.least_cache, min(self.whole_cache, available - fixed))


def engine_memory(
    model: ModelSettings,
    engine: EngineSettings,
    total_bytes: int,
    free_bytes: int,
    gpu_memory_bytes: int | None = None,
) -> EngineMemory:
    """Return the memory to start an engine with on GPUs.

    vLLM's GPU workers refuse to start unless gpu_memory_utilization of the total is free once they
    have a context and communicators, also where the cache's bytes are given, which then decide
    alone (vllm/v1/worker: utils.request_memory, gpu_worker.determine_available_memory).

    Args:
        total_bytes, free_bytes: of the engine's fullest GPU, before the engine has a context.
        gpu_memory_bytes: the most that the engine may use of it; None is all that is free.

    Raises:
        UserError: weights and the cache of one sequence do not fit.
    """
    share, available = engine_share(model, engine), free_bytes
    if gpu_memory_bytes is not None:
        available = min(available, gpu_memory_bytes)
    if (over := share.least - available) > 0:
        raise UserError(
            f"engine: weights {gib(share.weights)}, workspace {gib(share.workspace)}, context, "
            f"graphs and reserve {gib(share.process + RESERVE_BYTES)} and a KV cache of "
            f"{gib(share.least_cache)} GiB exceed the {gib(available)} GiB that it may use of a GPU"
            f" of {gib(total_bytes)} GiB by {gib(over)} GiB; raise engine.tensor, or lower "
            "engine.max_model_tokens or engine.kv_cache_mebibytes"
        )
    cache = share.cache(available)
    used = (share.weights + share.workspace + cache) / total_bytes
    return EngineMemory(max(math.floor(used * 10_000) / 10_000, 0.0001), cache)


@once_per_settings
def engine_share(model: ModelSettings, engine: EngineSettings) -> EngineShare:
    """Return what an engine holds on each of its GPUs."""
    one_sequence = engine.model_copy(update={"max_sequences": 1})
    bucket = max(size for _, size in _buckets(model, engine))
    several = COMMUNICATOR_BYTES if engine.ranks > 1 else 0
    return EngineShare(
        weights=engine_weights(model, engine),
        bucket=bucket,
        workspace=max(bucket, _workspace(model, engine)),  # a refit stages while nothing computes
        process=CONTEXT_BYTES + several + GRAPH_BYTES,
        least_cache=cache_bytes(model, one_sequence),
        whole_cache=cache_bytes(model, engine),
    )


def engine_weights(model: ModelSettings, engine: EngineSettings) -> int:
    """Return the bytes of the weights on an engine's first GPU, or rank on a CPU.

    The experts are split over all ranks, by number or by width; all else over `tensor` ranks.
    """
    return sum(count * bucket for count, bucket in _buckets(model, engine))


def cache_bytes(model: ModelSettings, engine: EngineSettings) -> int:
    """Return the bytes of an engine rank's KV cache; unless set, just enough for its sequences."""
    if engine.kv_cache_mebibytes is not None:
        return engine.kv_cache_mebibytes << 20
    further = architecture(model)
    if isinstance(further, Qwen35MoeArchitecture):
        return (engine.max_sequences + 1) * _hybrid_sequence(model, further, engine)
    blocks = engine.max_sequences * -(-engine.max_model_tokens // CACHE_BLOCK)
    return (blocks + 1) * CACHE_BLOCK * _cached_token(model, engine)  # vLLM keeps one to itself


def cached_tokens(model: ModelSettings, engine: EngineSettings) -> int:
    """Return the tokens that fit into an engine's KV cache."""
    return tokens_in(cache_bytes(model, engine), model, engine)


def tokens_in(cache: int, model: ModelSettings, engine: EngineSettings) -> int:
    """Return the tokens that fit into this many bytes of each rank of an engine.

    Of a model with delta nets, in sequences of max_model_tokens.
    """
    further = architecture(model)
    if isinstance(further, Qwen35MoeArchitecture):
        return cache // _hybrid_sequence(model, further, engine) * engine.max_model_tokens
    return cache // _cached_token(model, engine)


def response_bytes(model: ModelSettings) -> int:
    """Return the bytes of a token of a response in host memory and in the response log.

    Of every routed layer the chosen experts (uint16); the token, its log-probability and the
    version of its weights (4 bytes each). Kept sets of top-k and top-p come on top.
    """
    return 2 * len(routed_layers(model)) * model.experts_per_token + 3 * 4


def gib(count: int) -> str:
    """Return bytes in GiB with two digits after the point, without the unit."""
    return f"{count / GIB:,.2f}"


def _hybrid_sequence(
    model: ModelSettings, further: Qwen35MoeArchitecture, engine: EngineSettings
) -> int:
    """Return the bytes of a sequence's cache where some layers keep a state, on a rank.

    vLLM gives all layers pages of one size, at least a state's, in groups of equally many layers. A
    delta net has a page for its state, and with cached prefixes another; the state is in fp32.
    """
    full = len(full_attention_layers(model))
    groups = -(-(model.layers - full) // full)
    widths = further.linear_key_head_dim * further.linear_value_head_dim
    past = further.linear_channels * (further.linear_conv_kernel_dim - 1)
    state = FP32 * further.linear_num_value_heads * widths + BYTES[model.precision] * past
    token = _cached_token(model, engine) // full
    page = token * CACHE_BLOCK
    page *= -(-state // engine.tensor // page) or 1
    return full * page * (-(-engine.max_model_tokens * token // page) + 2 * groups)


def _cached_token(model: ModelSettings, engine: EngineSettings) -> int:
    """Return the bytes of a token in the cache of an engine rank."""
    return cached_elements(model, engine.tensor) * BYTES[model.precision]


def _buckets(model: ModelSettings, engine: EngineSettings) -> Iterator[tuple[int, int]]:
    """Yield the number of buckets of each kind, and the bytes of one of them on the first GPU."""
    description = ModelWeights(model)
    kinds = [description.kind(key) for key in description.buckets]
    for kind in dict.fromkeys(kinds):
        in_layer = kind not in ("embedding", "head")
        weights = description.weights[kind]
        yield (
            kinds.count(kind),
            sum(_weight_bytes(weight, model, engine, in_layer) for weight in weights),
        )


def _weight_bytes(
    weight: Weight, model: ModelSettings, engine: EngineSettings, in_layer: bool
) -> int:
    if weight.experts:
        whole = sum(math.prod(part.shape) for part in weight.tensors) * weight.experts
        shares = 1 if weight.once and not engine.expert_parallel else engine.ranks
        return whole // shares * _bytes_of(weight, model, engine, in_layer)
    boxes = needed_of((weight,), engine.ranks, 0, engine.expert_parallel, engine.data)
    elements = sum(math.prod(sizes) for _, (_, sizes) in boxes)
    return elements * _bytes_of(weight, model, engine, in_layer)


def _bytes_of(weight: Weight, model: ModelSettings, engine: EngineSettings, in_layer: bool) -> int:
    """Return the bytes of an element; in fp8 vLLM keeps routers, norms, biases and tables."""
    [tensor, *_] = (part.tensor for part in weight.tensors)
    if is_precise(tensor):
        return FP32
    matrix = len(weight.tensors[0].shape) == 2 and not tensor.endswith(".gate.weight")
    quantised = engine.weights == "fp8" and in_layer and matrix
    return 1 if quantised else BYTES[model.precision]


def _workspace(model: ModelSettings, engine: EngineSettings) -> int:
    """Return an estimate of the largest step's activations on a GPU, with its logits.

    A token's experts each take its hidden state and give one, with the joint projection and the
    gated activation between them; the residual stream and attention take some 8 hidden states.
    The sampler has logits, probabilities and their order in fp32. A rank's experts may get the
    tokens of all members.
    """
    tokens = max(BATCHED_TOKENS, engine.max_sequences)
    inner = 3 * model.expert_hidden_size // (1 if engine.expert_parallel else engine.ranks)
    routed = engine.data * model.experts_per_token * (2 * model.hidden_size + inner)
    numbers = routed + 8 * model.hidden_size
    logits = 3 * FP32 * engine.max_sequences * model.vocabulary_size
    return tokens * numbers * BYTES[model.precision] + logits
