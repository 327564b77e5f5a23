"""What each model family's config.json calls our settings. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parallel.settings import ModelSettings

EVERY = {
    "vocab_size": "vocabulary_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "attention_heads",
    "num_key_value_heads": "key_value_heads",
    "head_dim": "head_dim",
    "num_experts_per_tok": "experts_per_token",
    "rms_norm_eps": "norm_epsilon",
    "rope_theta": "rope_base",
}
FIXED = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "sliding_window": None,
    "rope_type": "default",
}
GROUPED = {"n_routed_experts": "experts", "moe_intermediate_size": "expert_hidden_size"}
# Dense layers before the first with experts; experts that every token uses; and routing to the
# best groups of experts only, its gates scaled.
DENSE_AND_SHARED = {
    "first_k_dense_replace": 1,
    "intermediate_size": 10944,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}


@dataclass(frozen=True)
class Family:
    """A family in the terms of its config.json.

    `names` maps its keys to fields of ModelSettings, `fixed` to the only value that runs here, and
    `further` to the value they have where model.architecture does not set them.
    """

    names: dict[str, str]
    fixed: dict[str, Any]
    further: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "qwen3_moe": Family(
        names={**EVERY, "num_experts": "experts", "moe_intermediate_size": "expert_hidden_size"},
        fixed={
            **FIXED,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "attention_bias": False,
        },
    ),
    "mixtral": Family(
        names={**EVERY, "num_local_experts": "experts", "intermediate_size": "expert_hidden_size"},
        fixed=FIXED,
    ),
    "glm4_moe": Family(
        names={**EVERY, **GROUPED},
        fixed={**FIXED, "norm_topk_prob": True},
        further={
            **DENSE_AND_SHARED,
            "partial_rotary_factor": 0.5,
            "attention_bias": False,
            "use_qk_norm": False,
        },
    ),
    "deepseek_v3": Family(
        names={
            **{key: name for key, name in EVERY.items() if key != "head_dim"},
            **GROUPED,
            "qk_rope_head_dim": "head_dim",
        },
        fixed={
            **FIXED,
            "norm_topk_prob": True,
            "attention_bias": False,
            "rope_interleave": True,
        },
        further={
            **DENSE_AND_SHARED,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
    ),
}


def configuration(settings: ModelSettings) -> dict[str, Any]:
    """The keys of the family's config.json that decide what the model computes."""
    family = FAMILIES[settings.family]
    named = {key: getattr(settings, name) for key, name in family.names.items()}
    return {**family.fixed, **family.further, **settings.architecture, **named}
