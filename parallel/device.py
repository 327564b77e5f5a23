"""The accelerator of this process: its device, its backend, its dtypes and the layers to build."""

from __future__ import annotations

import functools
import importlib
from typing import Literal

import torch

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # of `model.precision`


def backend() -> str:
    """Return the torch.distributed backend for this machine: "nccl" with CUDA, else "gloo"."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def device() -> torch.device:
    """Return the device of this rank's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def synchronize(where: torch.device) -> None:
    """Wait until the device has done all that was enqueued on it; a CPU always has.

    Copies between GPUs, and kernels, are enqueued only. What another process reads or writes by
    mapped memory is safe after both have waited.
    """
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def gpu_ordinals() -> dict[str, int]:
    """Return the number that CUDA gives to each GPU in this process, by UUID; {} without CUDA."""
    if not torch.cuda.is_available():
        return {}
    count = torch.cuda.device_count()
    return {str(torch.cuda.get_device_properties(each).uuid): each for each in range(count)}


@functools.cache
def layer_specs() -> Literal["transformer_engine", "local"]:
    """Return which of megatron-core's layers to build; TransformerEngine's need CUDA."""
    if not torch.cuda.is_available():
        return "local"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception:  # not installed, or whatever a build for another CUDA or torch raises
        return "local"
    return "transformer_engine"
