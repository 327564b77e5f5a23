"""The policy's model: megatron-core's GPTModel with mixture-of-experts layers of local specs."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from mbridge import AutoBridge
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch.nn import functional

from parallel import device, hugging_face
from parallel.attention import PackedAttention
from parallel.settings import ModelSettings


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm with its weight marked for sequence parallelism.

    Megatron's WrappedTorchNorm refuses sequence parallelism, and its fused norms need CUDA.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of `hidden`, of any shape; computed in fp32."""
        return functional.rms_norm(
            hidden.float(), hidden.shape[-1:], self.weight.float(), self.eps
        ).to(hidden.dtype)


def build_bridge(settings: ModelSettings) -> Any:
    """mbridge's description of the family under the current process groups.

    Its fusions assume TransformerEngine or CUDA; they are turned off, which leaves the plain
    operations that both devices share.
    """
    bridge = AutoBridge.from_config(
        hugging_face.hugging_face_config(settings), dtype=hugging_face.DTYPES[settings.precision]
    )
    bridge.set_extra_args(
        moe_grouped_gemm=False,
        moe_enable_routing_replay=True,
        moe_router_dtype="fp32",
        moe_router_bias_update_rate=0.0,
        moe_permute_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        attention_softmax_in_fp32=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,  # `initialize` does it, alike under every layout
        # Losses arrive divided by their global denominator, so Megatron must only sum them.
        calculate_per_token_loss=True,
    )
    return bridge


def build_model(settings: ModelSettings, bridge: Any) -> GPTModel:
    """This rank's shard of a GPTModel, on its device. The weights are not initialised."""
    config = bridge.config
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = PackedAttention
    parts.sharded_state_dict_keys_map = {}  # the norms are not fused into the linear layers
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layer] * config.num_layers, layer_norm=RMSNorm
        ),
        vocab_size=settings.vocabulary_size,
        max_sequence_length=settings.max_positions,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=settings.rope_base,
    )
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            # Megatron marks experts apart from the dense weights only when they are sharded; marked
            # always, the optimizer has the same structure under every layout.
            parameter.allreduce = False
    return model.to(device.device())


@torch.no_grad()
def initialize(model: GPTModel, settings: ModelSettings, seed: int) -> None:
    """Draw a random start that is the same under every layout.

    Every tensor has a generator of its own, seeded by the run's seed and the tensor's global name.
    Linear layers have standard deviation hidden_size ** -0.5, and the two that write to the
    residual stream are scaled by (2 * layers) ** -0.5 more; norms start at one.
    """
    residual_scale = (2 * settings.layers) ** -0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        std = settings.hidden_size**-0.5
        if "word_embeddings" in name:
            std = settings.initialization.embedding_std
        elif "router" in name:
            std = settings.initialization.router_std
        elif "linear_proj" in name or "linear_fc2" in name:
            std *= residual_scale
        digest = hashlib.sha256(f"{seed}/{global_name(model, name)}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def global_name(model: GPTModel, name: str) -> str:
    """A parameter's name with its expert numbered over all expert-parallel ranks."""
    local = model.config.num_moe_experts // model.config.expert_model_parallel_size
    first = parallel_state.get_expert_model_parallel_rank() * local
    return re.sub(r"local_experts\.(\d+)\.", lambda m: f"local_experts.{int(m[1]) + first}.", name)
