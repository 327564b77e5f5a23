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


@dataclass(frozen=True)
class Family:
    """A family in the terms of its config.json.

    `names` maps its keys to fields of ModelSettings, and `fixed` to the only value that runs here.
    """

    names: dict[str, str]
    fixed: dict[str, Any] = field(default_factory=dict)


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
}


def configuration(settings: ModelSettings) -> dict[str, Any]:
    """The keys of the family's config.json that decide what the model computes."""
    family = FAMILIES[settings.family]
    named = {key: getattr(settings, name) for key, name in family.names.items()}
    return {**family.fixed, **named}
