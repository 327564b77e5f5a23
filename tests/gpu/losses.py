"""The vocabulary's fused functions against plain torch, and their time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.gpu.findings import Finding
from tests.gpu.part import Lane, one_rank

TEMPERATURE = 0.7
# Errors relative above 1: rounding of fp32 sums, and one rounding of a gradient to bf16.
BOUNDS = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (2e-5, 2**-7)}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits, others, targets -> values [n]


def _fused() -> dict[str, Loss]:
    from parallel.model import vocabulary

    return {
        "logprobs": lambda x, y, t: vocabulary.logprobs(x, t, TEMPERATURE),
        "entropy": lambda x, y, t: vocabulary.entropy(x, TEMPERATURE),
        "kl": lambda x, y, t: vocabulary.kl(x, y, TEMPERATURE),
    }


def _plain(precise: torch.dtype) -> dict[str, Loss]:
    def log_p(x: Tensor) -> Tensor:
        return (x.to(precise) / TEMPERATURE).log_softmax(-1)

    return {
        "logprobs": lambda x, y, t: log_p(x).gather(1, t[:, None])[:, 0],
        "entropy": lambda x, y, t: -(log_p(x).exp() * log_p(x)).sum(-1),
        "kl": lambda x, y, t: (log_p(x).exp() * (log_p(x) - log_p(y))).sum(-1),
    }


def _logits(rows: int, size: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    first, second = (torch.randn(rows, size, generator=draw) * 3 for _ in range(2))
    targets = torch.randint(0, size, (rows,), generator=draw)
    return first.to(device, dtype), second.to(device, dtype), targets.to(device)


def losses(lane: Lane) -> list[Finding]:
    """Compare values and gradients with float64."""
    rows, size = (16, 512) if lane.small else (256, 151_936)
    found = []
    with one_rank():
        for dtype, (of_values, of_gradients) in BOUNDS.items():
            first, second, targets = _logits(rows, size, dtype, lane.device)
            plain = _plain(torch.float64)
            for name, fused in _fused().items():
                ours, truth = first.clone().requires_grad_(), first.clone().requires_grad_()
                values = fused(ours, second, targets)
                expected = plain[name](truth, second, targets)
                values.sum().backward()
                expected.sum().backward()
                label = f"{name} {str(dtype).removeprefix('torch.')}"
                found.append(Finding(f"{label} value", _error(values, expected), "", of_values))
                error = _error(ours.grad, truth.grad)
                found.append(Finding(f"{label} gradient", error, "", of_gradients))
    return found


def _error(found: Any, truth: Any) -> float:
    """Return the largest error, relative above 1."""
    truth = truth.detach().double()
    return float(((found.detach().double() - truth).abs() / truth.abs().clamp(min=1)).max())


def loss_speed(lane: Lane) -> list[Finding]:
    """Time forward and backward from bf16 logits, fused and plain, and measure their memory."""
    rows, size = (64, 2048) if lane.small else (4096, 151_936)
    found = []
    with one_rank():
        first, second, targets = _logits(rows, size, torch.bfloat16, lane.device)
        for kind, functions in (("fused", _fused()), ("plain fp32", _plain(torch.float32))):
            for name, function in functions.items():
                run = lambda: _both_ways(function, first, second, targets)  # noqa: B023, E731
                seconds, peak = timed(run, lane.device)
                found.append(Finding(f"{name} {kind}", rows / seconds, "tokens/s"))
                if lane.device == "cuda":
                    found.append(Finding(f"{name} {kind} memory", peak / 2**20, "MiB"))
    return found


def _both_ways(function: Loss, first: Tensor, second: Tensor, targets: Tensor) -> None:
    ours = first.detach().requires_grad_()
    function(ours, second, targets).sum().backward()


def timed(run: Callable[[], Any], device: str, repeats: int = 3) -> tuple[float, float]:
    """Return the least seconds of several runs after a first one, and the bytes of their peak."""
    run()
    synchronize(device)
    before = 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    return min(seconds), float(peak)


def synchronize(device: str) -> None:
    """Wait for the device: calls on CUDA return when work is enqueued."""
    if device == "cuda":
        torch.cuda.synchronize()
