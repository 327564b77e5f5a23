"""vLLM's kernels for CPUs: the models that they can run, and the fused RMS norms.

vLLM 0.30 ships the norms, but registers them as `vllm_c` for GPUs only and composes a CPU's norm
from five operations, about a fifth of a small model's step (docs/explanation/rollouts.md). This
module registers them for CPUs through `vllm.ir`; shapes that they do not support use vLLM's
composition.
"""

from typing import Any  # annotations must be evaluated: vLLM makes operators' schemas of them

import torch
from torch import Tensor

from parallel.families import Qwen35MoeArchitecture, architecture
from parallel.settings import ModelSettings

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM 0.30's attention
# Of experts' widths on an engine's rank; vLLM pads them in other families.
EXPERT_MULTIPLE = 32
LINEAR_HEAD_DIMS = (64, 128)  # of its chunked delta rule
NAME = "vllm_cpu"
VECTOR = 8  # the kernels take only rows of a multiple of this many numbers


def unsupported(model: ModelSettings) -> str | None:
    """Return the known reason why vLLM cannot run the model on a CPU, or None."""
    if (why := _delta_net_unsupported(model)) is not None:
        return why
    if model.family == "deepseek_v3":
        if model.precision == "fp32":
            return "model.family: vLLM's latent attention has no kernel for fp32"
    elif model.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        return f"model.head_dim = {model.head_dim}: vLLM's attention has kernels for {known} alone"
    if model.family == "gpt_oss" and model.expert_hidden_size % EXPERT_MULTIPLE:
        width = f"model.expert_hidden_size = {model.expert_hidden_size}"
        return f"{width}: vLLM's experts of gpt_oss need a multiple of {EXPERT_MULTIPLE} on a rank"
    return None


def _delta_net_unsupported(model: ModelSettings) -> str | None:
    """Return the reason why vLLM cannot run the model's gated delta nets on a CPU, or None."""
    further = architecture(model)
    if not isinstance(further, Qwen35MoeArchitecture):
        return None
    if model.precision == "fp32":
        return "model.family: vLLM's gated delta net has kernels for bf16 alone"
    widths = further.linear_key_head_dim, further.linear_value_head_dim
    if widths[0] != widths[1] or widths[0] not in LINEAR_HEAD_DIMS:
        shown, known = " and ".join(map(str, widths)), ", ".join(map(str, LINEAR_HEAD_DIMS))
        return (
            f"model.architecture: linear key and value heads are {shown} wide: vLLM's gated delta"
            f" net has kernels for equal widths of {known} alone"
        )
    return None


def prefer(kernel_config: Any) -> None:
    """Register the norms; call in the engine's process, before the engine is created."""
    from vllm import ir
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    for operator in ("rms_norm", "fused_add_rms_norm"):
        setattr(kernel_config.ir_op_priority, operator, [NAME, "native"])
    if NAME in ir.ops.rms_norm.impls:
        return
    supported = hasattr(torch.ops._C, "rms_norm")
    ir.ops.rms_norm.register_impl(NAME, supported=supported, supports_args=_fits)(_rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(
        NAME, supported=supported, supports_args=_fits_with_residual, inplace=True
    )(_fused_add_rms_norm)


def _fits(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    plain = variance_size is None and weight is not None and weight.dtype == x.dtype
    return plain and x.shape[-1] % VECTOR == 0


def _fits_with_residual(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    whole = x.is_contiguous() and x_residual.is_contiguous()
    return whole and _fits(x, weight, epsilon, variance_size)


def _rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    rows = x.contiguous()  # the kernel knows no strides, which the heads of a fused QKV have
    output = torch.empty_like(rows)
    torch.ops._C.rms_norm(output, rows, weight, epsilon)
    return output


def _fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
