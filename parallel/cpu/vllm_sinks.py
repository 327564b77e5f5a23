"""Attention sinks for vLLM 0.30's attention on a CPU, whose kernel reads them as bf16 alone."""

from __future__ import annotations

from typing import Any

import torch


def provide() -> None:
    """Round the sinks of models in fp32 where the kernel is called; their parameters stay fp32.

    Call in the engine's process, before the engine is created.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    CPUAttentionBackendImpl.sinks = property(_rounded, _keep)


def _rounded(attention: Any) -> torch.Tensor | None:
    sinks = attention.__dict__["sinks"]
    return None if sinks is None else sinks.to(torch.bfloat16)


def _keep(attention: Any, sinks: torch.Tensor | None) -> None:
    attention.__dict__["sinks"] = sinks
