"""megatron-core's configuration of a model, through mbridge's description of its family."""

from __future__ import annotations

from typing import Any

import torch
from mbridge import AutoBridge
from mbridge.core import LLMBridge
from mbridge.models import DeepseekV3Bridge, Qwen3MoEBridge
from megatron.core.fusions.fused_bias_geglu import quick_gelu

from parallel.families import (
    Glm4MoeArchitecture,
    GptOssArchitecture,
    NothingFurther,
    Qwen35MoeArchitecture,
    architecture,
)
from parallel.hugging_face.config import hugging_face_config
from parallel.machine.capabilities import (
    check_capabilities,
    fuses_sinks,
    this_machine,
    transformer_flags,
)
from parallel.machine.device import DTYPES, device
from parallel.settings import LayoutSettings, ModelSettings

# megatron-core's names of YaRN's parameters, and gpt-oss's.
YARN = {
    "rotary_scaling_factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "correction_range_round_to_int": "truncate",
}


class _DeepseekV3(DeepseekV3Bridge):
    """mbridge's bridge, with a key of megatron-core 0.19.2."""

    def _build_base_config(self, *arguments: Any, **keywords: Any) -> Any:
        """Rename the key that mbridge 0.15.1 still calls as megatron-core before 0.16 did."""
        keywords["original_max_position_embeddings"] = keywords.pop("max_position_embeddings")
        return super()._build_base_config(*arguments, **keywords)


class _Qwen35Moe(Qwen3MoEBridge):
    """The bridge of a family that mbridge 0.15.1 does not have: all but these is Qwen3-MoE's."""

    def _get_gptmodel_args(self) -> dict[str, Any]:
        arguments = super()._get_gptmodel_args()
        return {**arguments, "rotary_percent": self.hf_config.partial_rotary_factor}


class _GptOss(LLMBridge):
    """The bridge of gpt-oss, which mbridge 0.15.1 does not have, as far as Braid uses one."""

    def _build_config(self) -> Any:
        published = self.hf_config
        windowed = [kind == "sliding_attention" for kind in published.layer_types]
        config = self._build_base_config(
            add_bias_linear=True,
            softmax_type="learnable",
            # The tokens before a query's own.
            window_size=(published.sliding_window - 1, 0),
            window_attn_skip_freq=[int(has_window) for has_window in windowed],
            # x * sigmoid(1.702 * x), whose factor megatron-core fixes.
            activation_func=quick_gelu,
            activation_func_clamp_value=published.swiglu_limit,
            glu_linear_offset=1.0,
            num_moe_experts=published.num_local_experts,
            moe_router_topk=published.num_experts_per_tok,
            moe_router_score_function="softmax",
            moe_ffn_hidden_size=published.intermediate_size,
        )
        # megatron-core reads these, and no field of TransformerConfig has them.
        for name, key in YARN.items():
            setattr(config, f"yarn_{name}", published.rope_parameters[key])
        config.yarn_mscale = config.yarn_mscale_all_dim = None  # the factor follows from the scale
        return config

    def _get_gptmodel_args(self) -> dict[str, Any]:
        return {**super()._get_gptmodel_args(), "position_embedding_type": "yarn"}


def build_bridge(settings: ModelSettings, layout: LayoutSettings) -> Any:
    """Return mbridge's description of the family under the current process groups.

    Raises:
        UserError: this machine cannot train the model under the layout.
    """
    machine = this_machine()
    check_capabilities(machine, settings, layout)
    config = hugging_face_config(settings)
    bridges = {
        "deepseek_v3": _DeepseekV3,
        "glm4_moe_lite": _DeepseekV3,  # of which mbridge 0.15.1 has none
        "gpt_oss": _GptOss,
        "qwen3_5_moe_text": _Qwen35Moe,
    }
    kind = bridges.get(settings.family, AutoBridge.from_config)
    bridge = kind(config, dtype=DTYPES[settings.precision])
    deterministic = device().type == "cuda" and torch.are_deterministic_algorithms_enabled()
    bridge.set_extra_args(
        attention_backend="auto",
        moe_enable_routing_replay=True,
        moe_router_dtype="fp32",
        # The chosen experts' gates sum to 1, as in transformers' Mixtral but not in mbridge's.
        moe_router_pre_softmax=False,
        **_further_arguments(settings),
        moe_router_bias_update_rate=0.0,
        # Braid computes the routers' losses (parallel/model/routing.py), over the whole step.
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        **transformer_flags(machine, settings, layout),
        attention_softmax_in_fp32=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Such as an embedding's gradient, which CUDA sums in any order otherwise.
        deterministic_mode=deterministic,
        perform_initialization=False,  # `initialize` gives equal weights under every layout
        # Losses arrive divided by their global denominator, so Megatron must only sum them.
        calculate_per_token_loss=True,
        **uneven_pipeline(layout),
        **_recomputation(layout),
    )
    # Read by gpt.py; no field of TransformerConfig has it.
    bridge.config.fuses_sinks = fuses_sinks(machine, settings, layout, deterministic)
    return bridge


def _further_arguments(settings: ModelSettings) -> dict[str, Any]:
    """Return the arguments that mbridge omits or sets differently from transformers."""
    further = architecture(settings)
    if isinstance(further, NothingFurther | GptOssArchitecture):
        return {}
    if isinstance(further, Qwen35MoeArchitecture):
        return _delta_net_arguments(further)
    shared = further.n_shared_experts * settings.expert_hidden_size
    arguments = {
        "moe_shared_expert_intermediate_size": shared,
        "moe_router_num_groups": further.n_group,
        "moe_router_group_topk": further.topk_group,
        "mtp_num_layers": None,
    }
    if isinstance(further, Glm4MoeArchitecture):
        arguments["add_qkv_bias"] = further.attention_bias
    elif further.rope_scaling is not None:
        renamed = {"type": "rope_type", "factor": "rotary_scaling_factor"}
        scaling = further.rope_scaling.model_dump()
        arguments |= {renamed.get(key, key): value for key, value in scaling.items()}
    return arguments


def _delta_net_arguments(further: Qwen35MoeArchitecture) -> dict[str, Any]:
    """Return the arguments of gated delta nets, gated attention and the gated shared expert."""
    names = [name for name in type(further).model_fields if name.startswith("linear_")]
    return {
        **{name: getattr(further, name) for name in names},
        # Read by gpt.py too. megatron-core then saves each layer's tensors by themselves: those of
        # two kinds cannot be stacked.
        "linear_attention_freq": further.full_attention_interval,
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "moe_shared_expert_intermediate_size": further.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }


def _recomputation(layout: LayoutSettings) -> dict[str, Any]:
    """Return megatron-core's arguments for the activations to recompute."""
    if layout.recompute == "none":
        return {}
    if layout.recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    attention = layout.recompute == "attention"
    modules = ["core_attn"] if attention else list(layout.recompute_modules)
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def uneven_pipeline(layout: LayoutSettings) -> dict[str, int | None]:
    """Return megatron-core's sizes of the first and the last pipeline stage."""
    first_stage, last_stage = layout.first_stage_layers, layout.last_stage_layers
    if layout.pipeline == 2 and first_stage is not None:
        # Of two stages the second follows from the first. Given both, megatron-core 0.19.2 divides
        # by the number of stages in between, 0, if the pipeline is virtual.
        last_stage = None
    return {
        "num_layers_in_first_pipeline_stage": first_stage,
        "num_layers_in_last_pipeline_stage": last_stage,
    }
