"""megatron-core's configuration of gpt-oss, which mbridge 0.15.1 does not know."""

from __future__ import annotations

from typing import Any

from mbridge.core import LLMBridge
from megatron.core.fusions.fused_bias_geglu import quick_gelu

YARN = {
    "rotary_scaling_factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "correction_range_round_to_int": "truncate",
}


class GptOss(LLMBridge):
    """mbridge's description of gpt-oss, as far as Braid uses one."""

    def _build_config(self) -> Any:
        given = self.hf_config
        windowed = [kind == "sliding_attention" for kind in given.layer_types]
        config = self._build_base_config(
            add_bias_linear=True,
            softmax_type="learnable",
            # The tokens before a query's own.
            window_size=(given.sliding_window - 1, 0),
            window_attn_skip_freq=[int(each) for each in windowed],
            # x * sigmoid(1.702 * x), whose factor megatron-core fixes.
            activation_func=quick_gelu,
            activation_func_clamp_value=given.swiglu_limit,
            glu_linear_offset=1.0,
            num_moe_experts=given.num_local_experts,
            moe_router_topk=given.num_experts_per_tok,
            moe_router_score_function="softmax",
            moe_ffn_hidden_size=given.intermediate_size,
        )
        # megatron-core reads these, and no field of TransformerConfig has them.
        for name, key in YARN.items():
            setattr(config, f"yarn_{name}", given.rope_parameters[key])
        config.yarn_mscale = config.yarn_mscale_all_dim = None  # the factor follows from the scale
        return config

    def _get_gptmodel_args(self) -> dict[str, Any]:
        return {**super()._get_gptmodel_args(), "position_embedding_type": "yarn"}
