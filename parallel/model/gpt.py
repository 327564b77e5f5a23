"""The policy's model: this rank's parts of megatron-core's GPTModel, with experts."""

from __future__ import annotations

import hashlib
import importlib
import re
from copy import copy
from typing import Any

import torch
from mbridge import AutoBridge
from mbridge.models import DeepseekV3Bridge, Qwen3MoEBridge
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch.nn import functional

from parallel.capabilities import check_capabilities, this_machine, transformer_flags
from parallel.cpu.attention import PackedAttention
from parallel.device import DTYPES, device, layer_specs
from parallel.families import (
    Glm4MoeArchitecture,
    GptOssArchitecture,
    NothingFurther,
    Qwen35MoeArchitecture,
    architecture,
)
from parallel.hugging_face.config import hugging_face_config
from parallel.model.delta_net import DeltaNetSubmodules, GatedDeltaNet, GatedSelfAttention
from parallel.model.gpt_oss import GptOss
from parallel.model.routing import Router
from parallel.settings import LayoutSettings, ModelSettings

FIRST_DIMENSION_SPLIT = (
    r"word_embeddings|output_layer|linear_qkv\.(weight|bias)|linear_fc1\.weight"
    r"|linear_(q|q_up|kv_up)_proj\.weight|softmax_offset|in_proj\.weight|conv_weight|A_log|dt_bias"
)
SECOND_DIMENSION_SPLIT = r"(linear_proj|linear_fc2|out_proj)\.weight"


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm with its weight marked for sequence parallelism.

    Megatron's WrappedTorchNorm refuses sequence parallelism, and its fused norms need CUDA.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps, self.centre = eps, self._centre(config)
        start = torch.full((hidden_size,), 1 - self.centre, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(start)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of `hidden`, of any shape; computed in fp32."""
        shape, weight = hidden.shape[-1:], self.weight.float() + self.centre
        return functional.rms_norm(hidden.float(), shape, weight, self.eps).to(hidden.dtype)

    @staticmethod
    def _centre(config: Any) -> float:
        """Return what the weight is stored as the difference from."""
        return float(config.layernorm_zero_centered_gamma)


class PlainRMSNorm(RMSNorm):
    """The norm of a delta net's heads, whose weight is the factor in every family."""

    @staticmethod
    def _centre(config: Any) -> float:
        return 0.0


class _DeepseekV3(DeepseekV3Bridge):
    def _build_base_config(self, *arguments: Any, **keywords: Any) -> Any:
        """Rename the key that mbridge 0.15.1 still calls as megatron-core did before 0.16."""
        keywords["original_max_position_embeddings"] = keywords.pop("max_position_embeddings")
        return super()._build_base_config(*arguments, **keywords)


class _Qwen35Moe(Qwen3MoEBridge):
    """The bridge of a family that mbridge 0.15.1 does not have: all but these is Qwen3-MoE's."""

    def _get_gptmodel_args(self) -> dict[str, Any]:
        found = super()._get_gptmodel_args()
        return {**found, "rotary_percent": self.hf_config.partial_rotary_factor}


def build_bridge(settings: ModelSettings, layout: LayoutSettings) -> Any:
    """Return mbridge's description of the family under the current process groups."""
    machine = this_machine()
    check_capabilities(machine, settings, layout)
    config = hugging_face_config(settings)
    own = {"deepseek_v3": _DeepseekV3, "gpt_oss": GptOss, "qwen3_5_moe_text": _Qwen35Moe}
    kind = own.get(settings.family, AutoBridge.from_config)
    bridge = kind(config, dtype=DTYPES[settings.precision])
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
        deterministic_mode=device().type == "cuda" and torch.are_deterministic_algorithms_enabled(),
        perform_initialization=False,  # `initialize` gives equal weights under every layout
        # Losses arrive divided by their global denominator, so Megatron must only sum them.
        calculate_per_token_loss=True,
        **uneven_pipeline(layout),
        **_recomputation(layout),
    )
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
    names = [name for name in type(further).model_fields if name.startswith("linear_")]
    return {
        **{name: getattr(further, name) for name in names},
        # Layers of two kinds have separate tensors in a checkpoint, not stacked ones.
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
    first, last = layout.first_stage_layers, layout.last_stage_layers
    if layout.pipeline == 2 and first is not None:
        # Of two stages the second follows from the first. Given both, megatron-core 0.16.1 divides
        # by the number of stages in between, 0, if the pipeline is virtual.
        last = None
    return {
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
    }


def build_chunks(bridge: Any) -> list[GPTModel]:
    """Return this rank's parts of the model, not initialised; several with a virtual pipeline."""
    parts = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return [_build_chunk(bridge, stage) for stage in (range(parts) if parts else [None])]


def _build_chunk(bridge: Any, virtual_stage: int | None) -> GPTModel:
    where = {"ignore_virtual": False, "vp_stage": virtual_stage}
    model = GPTModel(
        config=bridge.config,
        transformer_layer_spec=_block_spec(bridge.config, virtual_stage),
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        vp_stage=virtual_stage,
        **bridge._get_gptmodel_args(),
    )
    for module in model.modules() if bridge.config.add_bias_linear else ():
        if getattr(module, "is_expert", False) and hasattr(module, "explicit_expert_comm"):
            # Whole experts reduce nothing. megatron-core 0.16.1 would still pass their output
            # through a reduction over one rank, whose view the addition of a bias cannot change.
            module.explicit_expert_comm = True
    for name, parameter in model.named_parameters():
        dimension = split_dimension(name)
        if dimension is not None and not hasattr(parameter, "tensor_model_parallel"):
            # Megatron marks its linear layers only while it initialises them.
            set_tensor_model_parallel_attributes(parameter, True, dimension, 1)
        if ".experts." in name:
            # Megatron marks experts only when they are sharded; marking them always gives the
            # optimizer the same structure under every layout.
            parameter.allreduce = False
            # Megatron marks their biases too, whose gradients are whole on each rank.
            parameter.sequence_parallel = False
    return model.to(device())


def _block_spec(config: Any, virtual_stage: int | None) -> Any:
    """Return the layer specs of one part of the model."""
    local = layer_specs() == "local"
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=not local, normalization="RMSNorm", vp_stage=virtual_stage
    )
    first = get_transformer_layer_offset(config, vp_stage=virtual_stage)
    # megatron-core gives equal layers one specification.
    block.layer_specs = [copy(layer) for layer in block.layer_specs]
    for number, layer in enumerate(block.layer_specs, first):
        parts = layer.submodules = copy(layer.submodules)
        if hasattr(parts.mlp.submodules, "router"):
            parts.mlp.submodules.router = Router
        attention = parts.self_attention.submodules
        if local or config.softmax_type == "learnable":
            # TransformerEngine 2.11 has no kernel with sinks for packed rows.
            attention.core_attention = PackedAttention
        if local:
            parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
            if config.multi_latent_attention:
                # Replicated, as with TransformerEngine: if they are split, megatron-core 0.16.1
                # leaves parts of the key's gradient unsummed.
                attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
            for norm in ("q_layernorm", "k_layernorm", "kv_layernorm"):
                if config.qk_layernorm and hasattr(attention, norm):
                    setattr(attention, norm, RMSNorm)
            parts.sharded_state_dict_keys_map = {}  # the norms are not fused into the linear layers
        if config.linear_attention_freq is not None:
            _hybridise(parts, (number + 1) % config.linear_attention_freq > 0, local)
    if local:
        block.layer_norm = RMSNorm
    return block


def _hybridise(parts: Any, linear: bool, local: bool) -> None:
    """Change a layer's specs to a gated delta net, or to attention with an output gate."""
    if not linear:
        parts.self_attention.module = GatedSelfAttention
        return
    given = parts.self_attention.submodules
    in_proj, out_proj = given.linear_qkv, given.linear_proj
    if not local:
        # TransformerEngine's layer of attention includes the norm before it.
        engine = importlib.import_module("megatron.core.extensions.transformer_engine")
        in_proj, parts.input_layernorm = engine.TEColumnParallelLinear, engine.TENorm
    inside = DeltaNetSubmodules(in_proj, PlainRMSNorm, out_proj)
    parts.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=inside)


@torch.no_grad()
def initialize(model: GPTModel, settings: ModelSettings, seed: int) -> None:
    """Initialise the weights at random, identically under every layout.

    Every whole tensor has a separate generator, seeded by the run's seed and the tensor's global
    name; this rank keeps its shard. Linear layers have standard deviation hidden_size ** -0.5; the
    two that write to the residual stream are also scaled by (2 * layers) ** -0.5. Norms start at
    one; biases and attention sinks at zero; the rates at which delta nets forget are spread over
    [1, 16].
    """
    residual_scale = (2 * settings.layers) ** -0.5
    centred = model.config.layernorm_zero_centered_gamma
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and not name.endswith("A_log"):
            zero = re.search(r"\.bias\d*$|softmax_offset", name) or (
                centred and "layernorm" in name
            )
            parameter.fill_(0.0 if zero else 1.0)
            continue
        std = settings.hidden_size**-0.5
        if "word_embeddings" in name:
            std = settings.initialization.embedding_std
        elif "router" in name:
            std = settings.initialization.router_std
        elif "conv_weight" in name:
            std = parameter.shape[-1] ** -0.5
        elif split_dimension(name) == 1:
            std *= residual_scale
        digest = hashlib.sha256(f"{seed}/{global_name(model, name)}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        size, rank = tensor_split(name)
        shape = list(parameter.shape)
        dimension = split_dimension(name)
        if dimension is not None:
            shape[dimension] *= size
        if name.endswith("A_log"):
            whole = (1 + 15 * torch.rand(shape, generator=generator)).log()
        else:
            whole = torch.randn(shape, generator=generator) * std
        parameter.copy_(shard(name, whole, size, rank))


def split_dimension(name: str) -> int | None:
    """Return the dimension of a weight that tensor parallelism splits, None for replicas."""
    if re.search(SECOND_DIMENSION_SPLIT, name):
        return 1
    return 0 if re.search(FIRST_DIMENSION_SPLIT, name) else None


def tensor_split(name: str) -> tuple[int, int]:
    """Return the number of tensor-parallel ranks of a weight, and this rank's index."""
    if ".experts." in name:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    return group.size(), group.rank()


def shard(name: str, whole: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Return one rank's part of a whole weight; gate and up projection are split separately."""
    dimension = split_dimension(name)
    if dimension is None or size == 1:
        return whole
    halves = whole.chunk(2) if "linear_fc1" in name else [whole]
    return torch.cat([half.chunk(size, dimension)[rank] for half in halves])


def global_name(model: GPTModel, name: str) -> str:
    """Return a parameter's name with its layer and its expert numbered over all ranks."""
    experts = model.config.num_moe_experts // model.config.expert_model_parallel_size
    first_expert = parallel_state.get_expert_model_parallel_rank() * experts
    first_layer = model.decoder.layers[0].layer_number - 1
    name = re.sub(r"layers\.(\d+)\.", lambda m: f"layers.{int(m[1]) + first_layer}.", name)
    # Where experts are one module, as with TransformerEngine, their weights carry the number.
    return re.sub(
        r"(local_experts\.|experts\.linear_fc[12]\.(?:weight|bias))(\d+)",
        lambda m: f"{m[1]}{int(m[2]) + first_expert}",
        name,
    )
