"""The accelerator of this process: its device, its backend, its dtypes and the layers to build."""

from __future__ import annotations

import functools
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

from parallel.machine import cuda_packages

CPU = torch.device("cpu")
# The largest chunk of fp32 logits in the loss (parallel.model.vocabulary), by type of device; up to
# three are alive at once. glibc keeps freed blocks up to 32 MiB and returns larger ones to the
# kernel, which clears every page again. A GPU needs products of some thousand rows to be busy, and
# reads the whole head for each.
LOSS_CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # of `model.precision`


def backend() -> str:
    """Return the torch.distributed backend for this machine: "nccl" with CUDA, else "gloo"."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def device() -> torch.device:
    """Return the device of this rank's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def peak_memory() -> dict[str, int]:
    """Return the most bytes that this process has had resident, and torch has had on its GPU."""
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    on_gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"peak_bytes": int(resident.split()[1]) << 10, "peak_gpu_bytes": on_gpu}


def synchronize(where: torch.device) -> None:
    """Wait until the device has done all that was enqueued on it; a CPU always has.

    Copies between GPUs, and kernels, are enqueued only. What another process reads or writes by
    mapped memory is safe after both have waited.
    """
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def forget_error() -> None:
    """Clear the error of a failed CUDA call, which torch would raise after its next kernel."""
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            torch.zeros(1, device=device())


def gpu_ordinals() -> dict[str, int]:
    """Return the number that CUDA gives to each GPU in this process, by UUID; {} without CUDA."""
    if not torch.cuda.is_available():
        return {}
    count = torch.cuda.device_count()
    # torch leaves out the prefix that the driver and CUDA_VISIBLE_DEVICES use.
    uuids = (str(torch.cuda.get_device_properties(ordinal).uuid) for ordinal in range(count))
    return {f"GPU-{uuid.removeprefix('GPU-')}": ordinal for ordinal, uuid in enumerate(uuids)}


@functools.cache
def layer_specs() -> Literal["transformer_engine", "local"]:
    """Return which of megatron-core's layers to build; TransformerEngine's need CUDA.

    Decided once, before megatron-core is imported: where the answer is "local" megatron-core sees
    no TransformerEngine either (parallel.cpu.megatron).
    """
    if torch.cuda.is_available() and cuda_packages.transformer_engine_error() is None:
        return "transformer_engine"
    return "local"


def has_apex() -> bool:
    """Return whether NVIDIA's apex is here with its extensions, and CUDA to run them."""
    return torch.cuda.is_available() and cuda_packages.apex() == "nvidia"


def fallbacks() -> list[str]:
    """Return a sentence for each CUDA package that this process does without; none on a CPU."""
    return cuda_packages.notices() if torch.cuda.is_available() else []
