"""The model families: keys of each config.json, as fields of ModelSettings; never imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    """A family in the terms of its config.json.

    `names` maps its keys to fields of ModelSettings and `fixed` to the only value that runs here;
    `further` are the keys that model.architecture sets. Published checkpoints of a family that
    `drafts` have layers for multi-token prediction. `transformers` is the oldest version whose
    reading of an export is compared with the settings.
    """

    names: dict[str, str]
    fixed: dict[str, Any]
    further: type[Settings] = NothingFurther
    drafts: bool = False
    transformers: str = "4.57"


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
    ),
    "mixtral": Family(
        names={**EVERY, "num_local_experts": "experts", "intermediate_size": "expert_hidden_size"},
        fixed={**FIXED, "sliding_window": None},
    ),
    "glm4_moe": Family(
        names={**EVERY, **ROUTED}, fixed=NORMALISED, further=Glm4MoeArchitecture, drafts=True
    ),
    "deepseek_v3": Family(
        names={**ATTENTION, **ROUTED, "qk_rope_head_dim": "head_dim"},
        fixed={**NORMALISED, "attention_bias": False, "rope_interleave": True},
        further=DeepseekV3Architecture,
        drafts=True,
    ),
    "gpt_oss": Family(
        names={**EVERY, "num_local_experts": "experts", "intermediate_size": "expert_hidden_size"},
        fixed={**FIXED, "attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        further=GptOssArchitecture,
    ),
    "qwen3_5_moe_text": Family(
        names={**EVERY, "num_experts": "experts", "moe_intermediate_size": "expert_hidden_size"},
        fixed={**FIXED, "attention_bias": False},
        further=Qwen35MoeArchitecture,
        drafts=True,
        transformers="5.2",
    ),
}


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


def architecture(settings: ModelSettings) -> Any:
    """Return `model.architecture` as the family's settings; raise pydantic's ValidationError."""
    return FAMILIES[settings.family].further.model_validate(settings.architecture, strict=True)


def configuration(settings: ModelSettings) -> dict[str, Any]:
    """Return the keys of the family's config.json that decide what the model computes."""
    family = FAMILIES[settings.family]
    from_settings = {key: getattr(settings, name) for key, name in family.names.items()}
    further = architecture(settings)
    config = {**family.fixed, **further.model_dump(), **from_settings}
    if isinstance(further, Qwen35MoeArchitecture):
        del config["full_attention_interval"]
        linear = [is_linear(further, layer) for layer in range(settings.layers)]
        kinds = ("full_attention", "linear_attention")
        config["layer_types"] = [kinds[is_delta_net] for is_delta_net in linear]
    if windows := windowed_layers(settings):
        kinds = ("full_attention", "sliding_attention")
        config["layer_types"] = [kinds[layer in windows] for layer in range(settings.layers)]
    return config


def windowed_layers(settings: ModelSettings) -> range:
    """Return the layers that attend to a window of tokens, counted from 0."""
    return range(0, settings.layers if settings.family == "gpt_oss" else 0, 2)


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
    epsilon, further = settings.norm_epsilon, architecture(settings)
    if per_token == 1:
        yield "model.experts_per_token", "1 gives the router no gradient; use 2 or more"
    if settings.family == "deepseek_v3" and settings.key_value_heads != heads:
        message = f"must be model.attention_heads = {heads}: multi-latent attention has no groups"
        yield "model.key_value_heads", f"{settings.key_value_heads} {message}"
    if settings.family == "deepseek_v3" and epsilon != 1e-6:
        # transformers builds the norms of compressed queries, keys and values without rms_norm_eps,
        # vLLM and megatron-core with it.
        message = "must be 1e-06, which transformers hard-codes in some norms of this family"
        yield "model.norm_epsilon", f"{epsilon:g} {message}"
    if isinstance(further, Qwen35MoeArchitecture):
        yield from _delta_net_violations(settings, further, layout)
    if isinstance(further, GptOssArchitecture):
        yield from _gpt_oss_violations(settings, layout)
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


def _gpt_oss_violations(
    settings: ModelSettings, layout: LayoutSettings
) -> Iterator[tuple[str, str]]:
    if settings.norm_epsilon != 1e-5:
        message = "must be 1e-05, which vLLM hard-codes in the norms of this family"
        yield "model.norm_epsilon", f"{settings.norm_epsilon:g} {message}"
    if layout.expert_tensor > 1:
        # Every rank would add the bias of an expert's output, and the ranks' outputs are summed.
        message = "must be 1: megatron-core does not split experts with biases; use layout.expert"
        yield "layout.expert_tensor", f"{layout.expert_tensor} {message}"


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
