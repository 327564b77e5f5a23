"""vLLM's fused RMS norms for CPUs.

vLLM 0.32 ships the norms, but registers them as `vllm_c` for GPUs only and composes a CPU's norm
from five operations, about a fifth of a small model's step (docs/explanation/rollouts.md). This
module registers them for CPUs through `vllm.ir`; shapes that they do not support use vLLM's
composition.
"""

from typing import Any  # annotations must be evaluated: vLLM makes operators' schemas of them

import torch
from torch import Tensor

NAME = "vllm_cpu"
VECTOR = 8  # the kernels take only rows of a multiple of this many numbers


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
