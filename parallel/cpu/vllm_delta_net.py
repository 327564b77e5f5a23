"""vLLM's gated delta nets on a CPU, in a step of a single token.

Their convolution's kernel asks for the strides of a transposed matrix. In vLLM 0.32 its input is a
slice of a wider projection, which `.contiguous()` copies unless it has one row
(model_executor/layers/mamba/ops/cpu/gdn_attention.py, _cpu_gdn_attention_nonspec): a prefill of one
token alone ended the engine, "expect x to be transposed".
"""

from __future__ import annotations

import importlib
from typing import Any

import torch


def provide() -> None:
    """Copy the input of such a step; call before an engine's workers are forked."""
    module: Any = importlib.import_module("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention")
    original = module.ops.causal_conv1d_fwd_cpu
    if getattr(original, "__module__", "") == __name__:
        return

    def convolved(*, x: torch.Tensor, **options: Any) -> torch.Tensor:
        rows = x.transpose(0, 1)
        if len(rows) == 1:
            rows = rows.clone(memory_format=torch.contiguous_format)
        return original(x=rows.transpose(0, 1), **options)

    module.ops.causal_conv1d_fwd_cpu = convolved
