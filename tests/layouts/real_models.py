"""The sizes of real models, as their config.json has them."""

from __future__ import annotations

from parallel.settings import ModelSettings

QWEN3_30B = ModelSettings(
    family="qwen3_moe",
    vocabulary_size=151936,
    hidden_size=2048,
    layers=48,
    attention_heads=32,
    key_value_heads=4,
    head_dim=128,
    experts=128,
    experts_per_token=8,
    expert_hidden_size=768,
    max_positions=40960,
    rope_base=1e6,
    precision="bf16",
)
GLM_AIR = ModelSettings(
    family="glm4_moe",
    vocabulary_size=151552,
    hidden_size=4096,
    layers=46,
    attention_heads=96,
    key_value_heads=8,
    head_dim=128,
    experts=128,
    experts_per_token=8,
    expert_hidden_size=1408,
    max_positions=131072,
    rope_base=1e6,
    norm_epsilon=1e-5,
    precision="bf16",
    architecture={
        "first_k_dense_replace": 1,
        "intermediate_size": 10944,
        "n_shared_experts": 1,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
)
DEEPSEEK_V3 = ModelSettings(
    family="deepseek_v3",
    vocabulary_size=129280,
    hidden_size=7168,
    layers=61,
    attention_heads=128,
    key_value_heads=128,
    head_dim=64,
    experts=256,
    experts_per_token=8,
    expert_hidden_size=2048,
    max_positions=163840,
    precision="bf16",
    architecture={
        "first_k_dense_replace": 3,
        "intermediate_size": 18432,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
)
