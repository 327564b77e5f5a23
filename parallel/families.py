"""The model families: the keys of each config.json, and what differs in the model. No torch.

Other files ask for a trait (`traits(model).sinks`) and never for a family by its name: a new family
states here what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Annotated, Any, Literal

from pydantic import Field

from parallel.settings import (
    Count,
    Experts,
    LayoutSettings,
    ModelSettings,
    Natural,
    Positive,
    Settings,
    Tokens,
)

MOST_RESULTS = 1024  # of a function, that are kept


class RopeScaling(Settings):
    """The parameters of YaRN (arXiv 2309.00071), named as in DeepSeek-V3's config.json."""

    type: Literal["yarn"] = "yarn"
    factor: Positive
    original_max_position_embeddings: Tokens
    beta_fast: Positive = 32
    beta_slow: Positive = 1
    mscale: Positive = 1.0
    mscale_all_dim: Positive = 1.0


class GptOssRopeScaling(Settings):
    """The parameters of gpt-oss' YaRN, whose attention factor follows from `factor`."""

    rope_type: Literal["yarn"] = "yarn"
    factor: Positive = 32.0
    original_max_position_embeddings: Tokens = 4096
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = False


class NothingFurther(Settings):
    """The architecture of a family that ModelSettings describe completely: no further keys."""


class Glm4MoeArchitecture(Settings):
    """GLM-4-MoE: dense layers first, shared experts, routing by groups; transformers' defaults."""

    first_k_dense_replace: Natural = 1
    intermediate_size: Count = 10944
    n_shared_experts: Experts = 1
    n_group: Experts = 1
    topk_group: Experts = 1
    routed_scaling_factor: Positive = 1.0
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    attention_bias: bool = False
    use_qk_norm: bool = False


class DeepseekV3Architecture(Settings):
    """DeepSeek-V3: as GLM-4-MoE, with multi-latent attention. Defaults are transformers'."""

    first_k_dense_replace: Natural = 3
    intermediate_size: Count = 18432
    n_shared_experts: Experts = 1
    n_group: Experts = 8
    topk_group: Experts = 4
    routed_scaling_factor: Positive = 2.5
    q_lora_rank: Count | None = 1536
    kv_lora_rank: Count = 512
    qk_nope_head_dim: Count = 128
    v_head_dim: Count = 128
    rope_scaling: RopeScaling | None = None


class Glm4MoeLiteArchitecture(DeepseekV3Architecture):
    """GLM-4.7-Flash: DeepSeek-V3's layers in other sizes. Defaults are transformers'."""

    first_k_dense_replace: Natural = 1
    intermediate_size: Count = 10240
    n_group: Experts = 1
    topk_group: Experts = 1
    routed_scaling_factor: Positive = 1.8
    q_lora_rank: Count | None = 768
    qk_nope_head_dim: Count = 192
    v_head_dim: Count = 256


class GptOssArchitecture(Settings):
    """gpt-oss: every other layer attends to a window of tokens. Defaults are the published ones."""

    sliding_window: Tokens = 128
    rope_scaling: GptOssRopeScaling = GptOssRopeScaling()


class Qwen35MoeArchitecture(Settings):
    """Qwen3.5-MoE's text model: gated delta nets between layers of attention, a shared expert.

    Every `full_attention_interval`-th layer has attention. Defaults are transformers'.
    """

    full_attention_interval: Count = 4
    shared_expert_intermediate_size: Count = 512
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_conv_kernel_dim: Count = 4
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 0.25

    @property
    def linear_channels(self) -> int:
        """The channels of a delta net's convolution: of all queries, keys and values."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim


@dataclass(frozen=True)
class Family:
    """A family: its config.json in ModelSettings' terms, and its traits.

    A trait's default is what most families have.

    Example: gpt-oss' head has a learned sink, so `FAMILIES["gpt_oss"].sinks` is true.

        >>> [name for name, family in FAMILIES.items() if family.biased_experts]
        ['gpt_oss']
        >>> FAMILIES["qwen3_moe"].names["num_experts"]  # a key of config.json, a field of the model
        'experts'
    """

    # Keys of config.json, to fields of ModelSettings, and to the only value that runs here.
    names: dict[str, str]
    fixed: dict[str, Any]
    # The keys that model.architecture sets.
    further: type[Settings] = NothingFurther
    # Keys that vLLM reads and transformers' configuration of the family does not have.
    unlisted: dict[str, Any] = field(default_factory=dict)
    # The oldest transformers whose reading of an export is compared with the settings.
    transformers: str = "4.57"
    # Published checkpoints have layers for multi-token prediction.
    drafts: bool = False

    # Attention is multi-latent: keys and values are compressed, and heads have no groups.
    latent_attention: bool = False
    # Each head's query and key are normalised, always; GLM-4-MoE sets `use_qk_norm`.
    qk_norm: bool = False
    # Every second layer attends to a window of tokens.
    windows: bool = False
    # Each head has a learned attention sink, and the projections of attention have biases.
    sinks: bool = False
    # Most layers are gated delta nets instead of attention.
    delta_nets: bool = False
    # The first layers are dense.
    dense_layers: bool = False
    # Routed layers have a shared expert, or several.
    shared_experts: bool = False
    # The router adds a correction bias to its scores before it selects.
    correction_bias: bool = False
    # The router and the experts have biases, and a checkpoint stacks the experts.
    biased_experts: bool = False
    # The only epsilon that all of transformers, vLLM and megatron-core compute with, and why.
    epsilon: tuple[float, str] | None = None

    # megatron-core 0.19.2: rotary embeddings have a fused kernel. The one for latent attention it
    # calls experimental, and takes for YaRN alone.
    fuses_rope: bool = True
    # megatron-core 0.19.2: bias and dropout are fused; grouped experts with biases refuse it.
    fuses_bias_dropout: bool = True
    # Why `quantize` has no scheme for it.
    unquantized: str | None = None

    # vLLM 0.32: the class is in a module that imports the family's vision model too.
    beside_vision: bool = False
    # vLLM 0.32 on a CPU: a cached prefix may be continued. Not the states of delta nets, which are
    # cached at the chunks of a prefill alone, and not the keys of CPU_MLA (vllm/platforms/cpu.py).
    prefix_caching_on_cpu: bool = True
    # vLLM 0.32 on a CPU: an expert's width on a rank must be a multiple; elsewhere vLLM pads it.
    expert_multiple_on_cpu: int = 1


ATTENTION = {
    "vocab_size": "vocabulary_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "attention_heads",
    "num_key_value_heads": "key_value_heads",
    "num_experts_per_tok": "experts_per_token",
    "rms_norm_eps": "norm_epsilon",
    "rope_theta": "rope_base",
}
EVERY = {**ATTENTION, "head_dim": "head_dim"}
ROUTED = {"n_routed_experts": "experts", "moe_intermediate_size": "expert_hidden_size"}
FIXED = {"hidden_act": "silu", "tie_word_embeddings": False}
NORMALISED = {**FIXED, "norm_topk_prob": True}

ADDING_A_FAMILY = "docs/how-to/model-family.md adds one"  # ends the message of an unknown one
FAMILIES = {
    "qwen3_moe": Family(
        names={**EVERY, "num_experts": "experts", "moe_intermediate_size": "expert_hidden_size"},
        fixed={
            **NORMALISED,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "attention_bias": False,
            "sliding_window": None,
        },
        qk_norm=True,
    ),
    "mixtral": Family(
        names={**EVERY, "num_local_experts": "experts", "intermediate_size": "expert_hidden_size"},
        fixed={**FIXED, "sliding_window": None},
    ),
    "glm4_moe": Family(
        names={**EVERY, **ROUTED},
        fixed=NORMALISED,
        further=Glm4MoeArchitecture,
        drafts=True,
        dense_layers=True,
        shared_experts=True,
        correction_bias=True,
    ),
    "deepseek_v3": Family(
        names={**ATTENTION, **ROUTED, "qk_rope_head_dim": "head_dim"},
        fixed={**NORMALISED, "attention_bias": False, "rope_interleave": True},
        further=DeepseekV3Architecture,
        # Without them vLLM creates no correction bias, and routes by a softmax.
        unlisted={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        drafts=True,
        latent_attention=True,
        dense_layers=True,
        shared_experts=True,
        correction_bias=True,
        # transformers builds the norms of compressed queries, keys and values without rms_norm_eps,
        # vLLM and megatron-core with it.
        epsilon=(1e-6, "must be 1e-06, which transformers hard-codes in some norms of this family"),
        fuses_rope=False,
        prefix_caching_on_cpu=False,
    ),
    "glm4_moe_lite": Family(
        names={**ATTENTION, **ROUTED, "qk_rope_head_dim": "head_dim"},
        fixed={**NORMALISED, "attention_bias": False, "rope_interleave": True},
        further=Glm4MoeLiteArchitecture,
        transformers="5.0",
        drafts=True,
        latent_attention=True,
        dense_layers=True,
        shared_experts=True,
        correction_bias=True,
        # No `epsilon`: the published one is 1e-5, which vLLM and megatron-core compute with
        # everywhere. transformers alone hard-codes 1e-6 in the norms that DeepSeek-V3's has it in.
        fuses_rope=False,
        prefix_caching_on_cpu=False,
    ),
    "gpt_oss": Family(
        names={**EVERY, "num_local_experts": "experts", "intermediate_size": "expert_hidden_size"},
        fixed={**FIXED, "attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        further=GptOssArchitecture,
        windows=True,
        sinks=True,
        biased_experts=True,
        epsilon=(1e-5, "must be 1e-05, which vLLM hard-codes in the norms of this family"),
        fuses_bias_dropout=False,
        unquantized="its checkpoints stack the experts with their biases",
        expert_multiple_on_cpu=32,
    ),
    "qwen3_5_moe_text": Family(
        names={**EVERY, "num_experts": "experts", "moe_intermediate_size": "expert_hidden_size"},
        fixed={**FIXED, "attention_bias": False},
        further=Qwen35MoeArchitecture,
        transformers="5.2",
        drafts=True,
        qk_norm=True,
        delta_nets=True,
        shared_experts=True,
        unquantized="no engine has loaded delta nets quantized",
        beside_vision=True,
        prefix_caching_on_cpu=False,
    ),
}


def traits(settings: ModelSettings) -> Family:
    """Return the family of a model, whose fields say what differs in it."""
    return FAMILIES[settings.family]


def families_with(trait: str) -> list[str]:
    """Return the names of the families that have a trait, for messages."""
    return [name for name, family in FAMILIES.items() if getattr(family, trait)]


def text_configuration(config_json: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json's keys of the text model, where it is of a vision-language model.

    A null that transformers computes has the computed value, or is absent.
    """
    inner = config_json.get("text_config")
    config = config_json
    if config_json.get("model_type") == "qwen3_5_moe" and isinstance(inner, dict):
        config = {**config_json, **inner}
    nulls = {key: computed for key, computed in _computed(config) if config.get(key, 0) is None}
    stated = {key: value for key, value in config.items() if key not in nulls}
    return stated | {key: value for key, value in nulls.items() if value is not None}


def _computed(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each key that transformers computes where it is null, and the value, None of a list.

    4.57 writes `"head_dim": null` for Mixtral. Only these: `q_lora_rank: null` compresses nothing.
    """
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    sized = isinstance(width, int) and isinstance(heads, int) and heads > 0
    yield "head_dim", int(width or 0) // int(heads or 1) if sized else None
    yield "num_key_value_heads", heads
    yield "mlp_only_layers", []
    yield "layer_types", None  # of the family's own rule


def fp8_blocks(quantization: Any) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale in a checkpoint in FP8, as DeepSeek-V3's.

    `quantization` is the `quantization_config` of its config.json; None for any other.
    """
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "fp8":
        return None
    size = quantization.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2:
        return None
    rows, columns = size
    # torch's integers have 64 bits.
    fit = all(type(length) is int and 0 < length < 1 << 63 for length in size)
    return (rows, columns) if fit else None


def is_readable(quantization: Any) -> bool:
    """Return whether weights with a `quantization_config` are read: in FP8, or experts in MXFP4."""
    packed = isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"
    return packed or fp8_blocks(quantization) is not None


def once_per_settings[**Arguments, Result](
    function: Callable[Arguments, Result],
) -> Callable[Arguments, Result]:
    """Return a function of blocks of settings, and numbers, that computes each result once.

    A search of layouts asks two million times for one model's architecture, and validating it was
    two thirds of the search. By the identity of the blocks, which are frozen: not all of them can
    be hashed. They are kept with the result, so that no others get their ids.
    """
    results: dict[tuple[Any, ...], tuple[Any, Result]] = {}

    @wraps(function)
    def computed(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        values = (*arguments, *named, *named.values())
        key = tuple(id(value) if isinstance(value, Settings) else value for value in values)
        if (entry := results.get(key)) is None:
            if len(results) >= MOST_RESULTS:
                results.clear()
            entry = results[key] = values, function(*arguments, **named)
        return entry[1]

    return computed


@once_per_settings
def architecture(settings: ModelSettings) -> Any:
    """Return `model.architecture` as the family's settings; raise pydantic's ValidationError."""
    return traits(settings).further.model_validate(settings.architecture, strict=True)


def configuration(settings: ModelSettings) -> dict[str, Any]:
    """Return the keys of the family's config.json that decide what the model computes."""
    family = traits(settings)
    from_settings = {key: getattr(settings, name) for key, name in family.names.items()}
    further = architecture(settings)
    config = {**family.fixed, **further.model_dump(), **from_settings}
    if isinstance(further, Qwen35MoeArchitecture):
        del config["full_attention_interval"]
        linear = [is_linear(further, layer) for layer in range(settings.layers)]
        kinds = ("full_attention", "linear_attention")
        config["layer_types"] = [kinds[is_delta_net] for is_delta_net in linear]
    if isinstance(further, Glm4MoeLiteArchitecture):
        # transformers reads this list alone, and vLLM the number of dense layers.
        kinds = ("dense", "sparse")
        routed = routed_layers(settings)
        config["mlp_layer_types"] = [kinds[layer in routed] for layer in range(settings.layers)]
    if windows := windowed_layers(settings):
        kinds = ("full_attention", "sliding_attention")
        config["layer_types"] = [kinds[layer in windows] for layer in range(settings.layers)]
    return config


def windowed_layers(settings: ModelSettings) -> range:
    """Return the layers that attend to a window of tokens, counted from 0."""
    return range(0, settings.layers if traits(settings).windows else 0, 2)


def is_linear(further: Any, layer: int) -> bool:
    """Return true if a layer of this architecture, counted from 0, is a gated delta net."""
    hybrid = isinstance(further, Qwen35MoeArchitecture)
    return hybrid and (layer + 1) % further.full_attention_interval > 0


def full_attention_layers(settings: ModelSettings) -> list[int]:
    """Return the layers, counted from 0, whose keys and values an engine caches."""
    further = architecture(settings)
    return [layer for layer in range(settings.layers) if not is_linear(further, layer)]


def routed_layers(settings: ModelSettings) -> range:
    """Return the layers that have experts, counted from 0; dense layers come first."""
    return range(getattr(architecture(settings), "first_k_dense_replace", 0), settings.layers)


def family_violations(settings: ModelSettings, layout: LayoutSettings) -> Iterator[tuple[str, str]]:
    """Yield the rules of the family that are violated, as (dotted key, message with the fix).

    megatron-core and transformers route alike only within these rules. `model.architecture` must
    have been validated.
    """
    per_token, heads = settings.experts_per_token, settings.attention_heads
    family, further = traits(settings), architecture(settings)
    if per_token == 1:
        yield "model.experts_per_token", "1 gives the router no gradient; use 2 or more"
    if family.latent_attention and settings.key_value_heads != heads:
        message = f"must be model.attention_heads = {heads}: multi-latent attention has no groups"
        yield "model.key_value_heads", f"{settings.key_value_heads} {message}"
    if family.epsilon is not None and settings.norm_epsilon != family.epsilon[0]:
        yield "model.norm_epsilon", f"{settings.norm_epsilon:g} {family.epsilon[1]}"
    if isinstance(further, Qwen35MoeArchitecture):
        yield from _delta_net_violations(settings, further, layout)
    if family.biased_experts and layout.expert_tensor > 1:
        # Every rank would add the bias of an expert's output, and the ranks' outputs are summed.
        message = "must be 1: megatron-core does not split experts with biases; use layout.expert"
        yield "layout.expert_tensor", f"{layout.expert_tensor} {message}"
    if isinstance(further, NothingFurther | GptOssArchitecture | Qwen35MoeArchitecture):
        return
    key = "model.architecture"
    if (dense := further.first_k_dense_replace) >= settings.layers:
        message = f"leave none of model.layers = {settings.layers} with experts"
        yield f"{key}.first_k_dense_replace", f"{dense} dense layers {message}"
    groups, top = further.n_group, further.topk_group
    if groups > 1 and per_token != 2 * top:
        yield f"{key}.topk_group", f"{top} must be half of model.experts_per_token = {per_token}"
    if top > groups:
        yield f"{key}.topk_group", f"{top} is more than n_group = {groups}"
    shared = further.n_shared_experts * settings.expert_hidden_size
    for name, whole, divisor in (
        ("n_group", settings.experts, groups),
        ("intermediate_size", further.intermediate_size, layout.tensor),
        ("n_shared_experts", shared, layout.tensor),
    ):
        if whole % divisor:
            yield f"{key}.{name}", f"{whole} is not a multiple of {divisor}"


def _delta_net_violations(
    settings: ModelSettings, further: Qwen35MoeArchitecture, layout: LayoutSettings
) -> Iterator[tuple[str, str]]:
    keys, values = further.linear_num_key_heads, further.linear_num_value_heads
    if (interval := further.full_attention_interval) > settings.layers:
        message = f"leaves none of model.layers = {settings.layers} with attention"
        yield "model.architecture.full_attention_interval", f"{interval} {message}"
    rotated = settings.head_dim * further.partial_rotary_factor
    for name, whole, divisor in (
        ("linear_num_value_heads", values, keys),
        ("linear_num_key_heads", keys, layout.tensor),
        ("shared_expert_intermediate_size", further.shared_expert_intermediate_size, layout.tensor),
    ):
        if whole % divisor:
            yield f"model.architecture.{name}", f"{whole} is not a multiple of {divisor}"
    if rotated % 2:
        message = f"rotates {rotated:g} of model.head_dim = {settings.head_dim}; must be even"
        yield "model.architecture.partial_rotary_factor", message
