"""The policy's model: this rank's parts of megatron-core's GPTModel, with experts and a head."""

from __future__ import annotations

import importlib
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from parallel.cpu.attention import PackedAttention
from parallel.machine.device import device, layer_specs
from parallel.model.delta_net import DeltaNetSubmodules, GatedDeltaNet, GatedSelfAttention
from parallel.model.parameters import split_dimension
from parallel.model.routing import Router
from parallel.model.vocabulary import head_logits


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


def build_chunks(bridge: Any) -> list[GPTModel]:
    """Return this rank's parts of the model, not initialised; several with a virtual pipeline."""
    virtual_stages = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return [
        _build_chunk(bridge, stage)
        for stage in (range(virtual_stages) if virtual_stages else [None])
    ]


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
            # Whole experts reduce nothing. megatron-core 0.19.2 would still pass their output
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
    first_layer = get_transformer_layer_offset(config, vp_stage=virtual_stage)
    # megatron-core gives equal layers one specification.
    block.layer_specs = [copy(layer) for layer in block.layer_specs]
    for number, layer in enumerate(block.layer_specs, first_layer):
        submodules = layer.submodules = copy(layer.submodules)
        if submodules.mlp.func is MoELayer:
            routed = replace(submodules.mlp.keywords["submodules"], router=Router)
            submodules.mlp = partial(MoELayer, submodules=routed)
        attention = submodules.self_attention.submodules
        if local or (config.softmax_type == "learnable" and not config.fuses_sinks):
            attention.core_attention = PackedAttention
        if local:
            submodules.input_layernorm = submodules.pre_mlp_layernorm = RMSNorm
            if config.multi_latent_attention:
                # Replicated, as with TransformerEngine: if they are split, megatron-core 0.19.2
                # leaves parts of the key's gradient unsummed.
                attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
            for norm in ("q_layernorm", "k_layernorm", "kv_layernorm"):
                if config.qk_layernorm and hasattr(attention, norm):
                    setattr(attention, norm, RMSNorm)
            # The norms are not fused into the linear layers.
            submodules.sharded_state_dict_keys_map = {}
        if config.linear_attention_freq is not None:
            _hybridise(submodules, (number + 1) % config.linear_attention_freq > 0, local)
    if local:
        block.layer_norm = RMSNorm
    return block


def _hybridise(submodules: Any, linear: bool, local: bool) -> None:
    """Change a layer's specs to a gated delta net, or to attention with an output gate."""
    if not linear:
        submodules.self_attention.module = GatedSelfAttention
        return
    attention = submodules.self_attention.submodules
    in_proj, out_proj = attention.linear_qkv, attention.linear_proj
    if not local:
        # TransformerEngine's layer of attention includes the norm before it.
        engine = importlib.import_module("megatron.core.extensions.transformer_engine")
        in_proj, submodules.input_layernorm = engine.TEColumnParallelLinear, engine.TENorm
    inside = DeltaNetSubmodules(in_proj, PlainRMSNorm, out_proj)
    submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=inside)


def keep_sums(head: Any) -> None:
    """Have megatron-core's output layer return fp32 logits."""

    def forward(
        hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Return the rank's logits for hidden [n, 1, H]; the signature is megatron-core's."""
        # As megatron-core's layer does, the gradient of its input is summed over the ranks.
        hidden = copy_to_tensor_model_parallel_region(hidden)
        return _PreciseHead.apply(hidden, head.weight if weight is None else weight), None

    head.forward = forward


class _PreciseHead(torch.autograd.Function):
    """The output head of a bf16 model whose logits are not rounded (`model.head_precision: fp32`).

    The operands stay bf16, whose products fp32 represents exactly; only their sums are no longer
    rounded to bf16, of which the large logits of a likely token have two or three digits. vLLM's
    `head_dtype: float32` computes the same. Source: MiniMax-M1, arXiv 2506.13585, which found the
    rounded head to be the main cause of the training-inference mismatch.

    torch's own product has no derivative on every device. The gradient of the logits is rounded to
    bf16 before its two products, as that of bf16 logits.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        rows = head_logits(hidden.flatten(0, -2), weight, precise=True)
        return rows.view(*hidden.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        rows = upstream.flatten(0, -2).to(hidden.dtype)
        to_hidden = (rows @ weight).view(hidden.shape)
        return to_hidden, rows.T @ hidden.flatten(0, -2)
