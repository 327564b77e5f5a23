"""The engines that the tests share, and their models."""

from parallel.settings import EngineSettings, ModelSettings

MODEL = ModelSettings(
    vocabulary_size=80,
    hidden_size=32,
    layers=2,
    attention_heads=4,
    key_value_heads=2,
    head_dim=32,
    experts=4,
    experts_per_token=2,
    expert_hidden_size=32,
)
_LATENT = MODEL.model_copy(
    update={
        "family": "deepseek_v3",
        "key_value_heads": MODEL.attention_heads,
        "head_dim": 64,  # this, and kv_lora_rank, as vLLM 0.32's only kernel for a CPU has them
        "architecture": {
            "first_k_dense_replace": 1,
            "intermediate_size": 48,
            "n_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "q_lora_rank": 24,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 12,
            "v_head_dim": 20,
        },
    }
)
MODELS = {
    "qwen3_moe": MODEL,
    "mixtral": MODEL.model_copy(update={"family": "mixtral"}),
    "bf16": MODEL.model_copy(update={"precision": "bf16"}),
    "bf16_head": MODEL.model_copy(update={"precision": "bf16", "head_precision": "fp32"}),
    # vLLM 0.32's delta net has no fp32 kernel for a CPU.
    "qwen3_5_moe_text": MODEL.model_copy(
        update={
            "family": "qwen3_5_moe_text",
            "precision": "bf16",
            "architecture": {
                "full_attention_interval": 2,
                "shared_expert_intermediate_size": 32,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 64,
                "linear_value_head_dim": 64,
            },
        }
    ),
    "glm4_moe": MODEL.model_copy(
        update={
            "family": "glm4_moe",
            "architecture": {
                "first_k_dense_replace": 1,
                "intermediate_size": 48,
                "n_shared_experts": 2,
                "n_group": 2,
                "topk_group": 1,
                "routed_scaling_factor": 1.5,
                "attention_bias": True,
                "use_qk_norm": True,
            },
        }
    ),
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT.model_copy(update={"family": "glm4_moe_lite", "norm_epsilon": 1e-5}),
    "gpt_oss": MODEL.model_copy(
        update={
            "family": "gpt_oss",
            "norm_epsilon": 1e-5,
            "expert_hidden_size": 64,  # a multiple of 32 on each of two ranks
            "architecture": {
                "sliding_window": 20,  # shorter than the longest prompt
                "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 64},
            },
        }
    ),
}
ENGINE = EngineSettings(max_sequences=64, max_model_tokens=256)
