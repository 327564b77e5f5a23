"""The accelerator of this process: its device, its backend, its dtypes and the layers to build."""

from __future__ import annotations

import functools
import importlib
from typing import Literal

import torch

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
