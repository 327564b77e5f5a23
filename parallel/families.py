"""What each model family's config.json calls our settings. Never imports torch."""

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
    Settings,
    Tokens,
)

PositiveFloat = Annotated[float, Field(gt=0)]


class RopeScaling(Settings):
    """YaRN (arXiv 2309.00071), in DeepSeek-V3's terms."""

    type: Literal["yarn"] = "yarn"
    factor: PositiveFloat
    original_max_position_embeddings: Tokens
    beta_fast: PositiveFloat = 32
    beta_slow: PositiveFloat = 1
    mscale: PositiveFloat = 1.0
    mscale_all_dim: PositiveFloat = 1.0


class NothingFurther(Settings):
    """A family that ModelSettings describe whole."""


class Glm4MoeArchitecture(Settings):
    """Dense layers before the first with experts, experts that every token uses, and routing to
    the best groups of experts only. Defaults are those of transformers."""

    first_k_dense_replace: Natural = 1
    intermediate_size: Count = 10944
    n_shared_experts: Experts = 1
    n_group: Experts = 1
    topk_group: Experts = 1
    routed_scaling_factor: PositiveFloat = 1.0
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    attention_bias: bool = False
    use_qk_norm: bool = False


class DeepseekV3Architecture(Settings):
    """As GLM-4-MoE's, with multi-latent attention. Defaults are those of transformers."""

    first_k_dense_replace: Natural = 3
    intermediate_size: Count = 18432
    n_shared_experts: Experts = 1
    n_group: Experts = 8
    topk_group: Experts = 4
    routed_scaling_factor: PositiveFloat = 2.5
    q_lora_rank: Count | None = 1536
    kv_lora_rank: Count = 512
    qk_nope_head_dim: Count = 128
    v_head_dim: Count = 128
    rope_scaling: RopeScaling | None = None


@dataclass(frozen=True)
class Family:
    """A family in the terms of its config.json.

    `names` maps its keys to fields of ModelSettings and `fixed` to the only value that runs here;
    `further` are the keys that model.architecture sets.
    """

    names: dict[str, str]
    fixed: dict[str, Any]
    further: type[Settings] = NothingFurther


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
    "glm4_moe": Family(names={**EVERY, **ROUTED}, fixed=NORMALISED, further=Glm4MoeArchitecture),
    "deepseek_v3": Family(
        names={**ATTENTION, **ROUTED, "qk_rope_head_dim": "head_dim"},
        fixed={**NORMALISED, "attention_bias": False, "rope_interleave": True},
        further=DeepseekV3Architecture,
    ),
}


def architecture(settings: ModelSettings) -> Any:
    """`model.architecture` as the family's own settings.

    Raises pydantic's ValidationError where a key is unknown or a value is wrong.
    """
    return FAMILIES[settings.family].further.model_validate(settings.architecture, strict=True)


def configuration(settings: ModelSettings) -> dict[str, Any]:
    """The keys of the family's config.json that decide what the model computes."""
    family = FAMILIES[settings.family]
    named = {key: getattr(settings, name) for key, name in family.names.items()}
    return {**family.fixed, **architecture(settings).model_dump(), **named}


def routed_layers(settings: ModelSettings) -> range:
    """The layers that have experts, counted from 0; dense ones come before."""
    return range(getattr(architecture(settings), "first_k_dense_replace", 0), settings.layers)


def family_violations(settings: ModelSettings, layout: LayoutSettings) -> Iterator[tuple[str, str]]:
    """What the family forbids, as (dotted key, message with the mend); model.architecture parses.

    megatron-core and transformers route alike only within these rules.
    """
    chosen = settings.experts_per_token
    if chosen == 1:
        yield "model.experts_per_token", "1 leaves the router nothing to weigh; use 2 or more"
    if settings.family == "deepseek_v3" and settings.key_value_heads != settings.attention_heads:
        yield (
            "model.key_value_heads",
            f"{settings.key_value_heads} should be model.attention_heads = "
            f"{settings.attention_heads}, since multi-latent attention has no groups",
        )
    if settings.family == "deepseek_v3" and settings.norm_epsilon != 1e-6:
        # transformers builds the norms of compressed queries, keys and values without rms_norm_eps,
        # vLLM and megatron-core with it.
        yield (
            "model.norm_epsilon",
            f"{settings.norm_epsilon:g} should be 1e-06, which is all that transformers has for"
            " some norms of this family",
        )
    further = architecture(settings)
    if isinstance(further, NothingFurther):
        return
    key = "model.architecture"
    if further.first_k_dense_replace >= settings.layers:
        yield (
            f"{key}.first_k_dense_replace",
            f"{further.first_k_dense_replace} leaves none of model.layers = {settings.layers} "
            "with experts",
        )
    if further.n_group > 1 and chosen != 2 * further.topk_group:
        yield (
            f"{key}.topk_group",
            f"{further.topk_group} should be half of model.experts_per_token = {chosen}",
        )
    if further.topk_group > further.n_group:
        yield f"{key}.topk_group", f"{further.topk_group} is more than n_group = {further.n_group}"
    for name, whole, parts in (
        ("n_group", settings.experts, further.n_group),
        ("intermediate_size", further.intermediate_size, layout.tensor),
        (
            "n_shared_experts",
            further.n_shared_experts * settings.expert_hidden_size,
            layout.tensor,
        ),
    ):
        if whole % parts:
            yield f"{key}.{name}", f"{whole} is not a multiple of {parts}"
