"""The table of what the trainer uses of a machine: kernels, overlap, and the dispatcher.

A CPU and CUDA without TransformerEngine run megatron-core's plain operations, and so does fp32 with
TransformerEngine but for its layers, so that their results can be compared. Fused kernels are used
with CUDA, TransformerEngine and bf16. Importing it imports no torch.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from parallel.errors import UserError
from parallel.families import traits
from parallel.settings import LayoutSettings, ModelSettings, OptimizerSettings

# Modules that megatron-core 0.19.2 recomputes with TransformerEngine alone, and what to use without
# it: its experts are grouped, and the checkpoint that drops an output asks it for the FP8 state, as
# `fp8 is not None` is true of the default, False (tensor_parallel/random.py).
OF_TRANSFORMER_ENGINE = {"layernorm": "moe", "mla_up_proj": "full", "moe_act": "moe"}


@dataclass(frozen=True)
class Machine:
    """A rank's device and packages."""

    cuda: bool = False
    transformer_engine: bool = False
    deep_ep: bool = False  # DeepEP's kernels for dispatch between nodes
    packed_sinks: bool = False  # cuDNN's attention takes sinks in packed rows
    gpus: int = 1  # of this node

    def fuses(self, model: ModelSettings) -> bool:
        """Return true if a model runs on fused kernels."""
        return self.transformer_engine and model.precision == "bf16"


def this_machine() -> Machine:
    """Return what this rank's device and packages offer."""
    import torch

    from parallel.machine.device import layer_specs

    cuda = torch.cuda.is_available()
    return Machine(
        cuda=cuda,
        transformer_engine=layer_specs() == "transformer_engine",
        deep_ep=cuda and find_spec("deep_ep") is not None,
        packed_sinks=cuda and _has_packed_sinks(),
        # A rank that Slurm bound to one GPU sees no other of its node.
        gpus=max(torch.cuda.device_count(), ranks_of_node()) if cuda else 1,
    )


def _has_packed_sinks() -> bool:
    """Return true if cuDNN's attention takes sinks in packed rows: from 9.18, on Hopper or later.

    Source: TransformerEngine 2.20.2, get_attention_backend in
    pytorch/attention/dot_product_attention/utils.py, and the architecture in its C++ source
    (common/fused_attn/fused_attn.cpp, "qkv format").
    """
    import torch

    version = torch.backends.cudnn.version() or 0
    return version >= 91800 and torch.cuda.get_device_capability() >= (9, 0)


def ranks_of_node() -> int:
    """Return the ranks of this node as torchrun or srun started them; 1 where neither says."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or "1"
    return int(ranks)


def fuses_sinks(
    machine: Machine, model: ModelSettings, layout: LayoutSettings, deterministic: bool
) -> bool:
    """Return true if TransformerEngine's attention takes the model's sinks in packed rows.

    If it has no kernel for them it computes whole score matrices, and with context parallelism
    nothing; Braid's attention is then used. Kernels with sinks have no deterministic backward pass.
    With context parallelism they only exchange heads ("a2a"), and an even number of a rank's
    key-value heads that they divide. Source: get_attention_backend of TransformerEngine 2.20.2;
    `tests/layouts/test_sinks.py` asks it.
    """
    heads = model.key_value_heads // layout.tensor
    exchanged = layout.context == 1 or heads % math.lcm(2, layout.context) == 0
    fits = model.head_dim % 8 == 0 and model.head_dim <= 128
    has_kernel = machine.fuses(model) and machine.packed_sinks and not deterministic
    return traits(model).sinks and has_kernel and exchanged and fits


def transformer_flags(
    machine: Machine, model: ModelSettings, layout: LayoutSettings
) -> dict[str, Any]:
    """Return the fields of megatron-core's TransformerConfig that depend on the machine."""
    fused = machine.fuses(model)
    return {
        "moe_grouped_gemm": machine.transformer_engine,
        "apply_rope_fusion": fused and traits(model).fuses_rope,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused and traits(model).fuses_bias_dropout,
        "moe_permute_fusion": fused,
        # The fused router does not ask RouterReplay for the experts to take.
        "moe_router_fusion": False,
        # It overlaps only with the dispatcher alltoall, on streams of its own.
        "moe_shared_expert_overlap": False,
        # Of Megatron's own attention and of apex's norms, which no layer here uses.
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        # The output head is Megatron's linear layer, which needs apex's extension for it.
        "gradient_accumulation_fusion": False,
        "moe_token_dispatcher_type": _dispatcher(machine, model, layout),
        # The only one of TransformerEngine's exchanges with a kernel for sinks. Its default, null,
        # sends keys and values around a ring.
        "cp_comm_type": "a2a" if traits(model).sinks else None,
    }


def data_parallel_flags(machine: Machine, model: ModelSettings) -> dict[str, bool]:
    """Return the fields of megatron-core's DistributedDataParallelConfig that depend on it."""
    return {
        # Buckets are summed during the backward pass; the sums are the same, unscaled.
        "overlap_grad_reduce": machine.fuses(model),
        # Weights would be complete only after the next forward pass; a refit, a checkpoint and an
        # average read them directly after the step.
        "overlap_param_gather": False,
    }


def rank_environment(layout: LayoutSettings) -> dict[str, str]:
    """Return the variables that must be set before CUDA starts in a rank."""
    if layout.tensor * layout.context == 1:
        return {}
    # Kernels then start in the order in which they are issued: Megatron overlaps a collective with
    # the product after it only if the collective starts first. Blackwell ignores it.
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def check_capabilities(machine: Machine, model: ModelSettings, layout: LayoutSettings) -> None:
    """Raise UserError with all that the settings ask for and the machine does not offer."""
    if missing := list(_missing(machine, model, layout)):
        raise UserError("\n".join(["this machine cannot run the settings:", *missing]))


def _missing(machine: Machine, model: ModelSettings, layout: LayoutSettings) -> Iterator[str]:
    """Yield the settings that the machine lacks something for, with the fix."""
    if layout.dispatcher == "flex" and not (machine.fuses(model) and machine.deep_ep):
        needs = "CUDA, TransformerEngine, DeepEP and model.precision: bf16"
        yield f"layout.dispatcher: flex needs {needs}; use auto or alltoall"
    lacking = [name for name in layout.recompute_modules if name in OF_TRANSFORMER_ENGINE]
    if lacking and not machine.transformer_engine:
        needs = f"{', '.join(lacking)}: needs TransformerEngine, and so CUDA"
        yield f"layout.recompute_modules: {needs}; use {OF_TRANSFORMER_ENGINE[lacking[0]]}"
    elif lacking and shutil.which(os.environ.get("CXX", "c++")) is None:
        # random.py: _get_share_storage, at the first backward pass.
        needs = f"{', '.join(lacking)}: megatron-core compiles an extension, and there is no c++"
        fix = f"install a C++ compiler on the nodes, or use {OF_TRANSFORMER_ENGINE[lacking[0]]}"
        yield f"layout.recompute_modules: {needs}; {fix}"


def check_optimizer(machine: Machine, optimizer: OptimizerSettings) -> None:
    """Raise UserError if the machine cannot run the optimizer."""
    if optimizer.precision_aware and not machine.transformer_engine:
        needs = "TransformerEngine's FusedAdam, and so CUDA"
        raise UserError(f"optimizer.precision_aware: needs {needs}; use false")


def _dispatcher(machine: Machine, model: ModelSettings, layout: LayoutSettings) -> str:
    if layout.dispatcher != "auto":
        return layout.dispatcher
    # Ranks that exchange tokens are neighbours.
    across_nodes = layout.expert * layout.expert_tensor > machine.gpus
    use_flex = across_nodes and machine.deep_ep and machine.fuses(model)
    return "flex" if use_flex else "alltoall"
