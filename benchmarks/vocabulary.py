"""Chunked log-probabilities against torch's own: time and memory at a real vocabulary's size.

    python benchmarks/vocabulary.py --rows 1024

One rank, one core, forward and backward from bf16 logits. Each way runs in a process of its own,
so that what one leaves behind does not count for the other. Errors are against fp64.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any

import torch
from machine import measured
from torch import Tensor

from parallel.distributed import process_groups
from parallel.model import vocabulary
from parallel.settings import LayoutSettings

VOCABULARY = 151_936  # Qwen3's
CHECKED = 64  # rows
MEBIBYTE = 1 << 20


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.rows, arguments.runs), indent=1))


def measure(rows: int = 1024, runs: int = 3) -> dict[str, Any]:
    """Of both ways the median seconds, peak MiB beyond the logits and errors; and the ratios."""
    found: dict[str, Any] = {**measured(), "rows": rows, "vocabulary": VOCABULARY}
    for name in WAYS:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            found[name] = process.submit(run, name, rows, runs).result()
    plain, chunked = found["plain"], found["chunked"]
    return {
        **found,
        "speedup": plain["seconds"] / chunked["seconds"],
        "memory_ratio": plain["peak_mebibytes"] / chunked["peak_mebibytes"],
    }


def run(name: str, rows: int, runs: int) -> dict[str, Any]:
    """One way, in this process. Memory is that of the first run, which finds the process fresh."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    with process_groups(LayoutSettings(), seed=0):
        logits = torch.randn((rows, VOCABULARY), dtype=torch.bfloat16).mul_(3).requires_grad_()
        targets = torch.randint(0, VOCABULARY, (rows,))
        before, seconds = peak_mebibytes(), []
        for _ in range(runs):
            logits.grad = None
            start = time.perf_counter()
            found = WAYS[name](logits, targets)
            found.sum().backward()
            seconds.append(time.perf_counter() - start)
            if len(seconds) == 1:
                used = peak_mebibytes() - before
        assert logits.grad is not None
        value, gradient = reference(logits[:CHECKED], targets[:CHECKED])
    return {
        "seconds": median(seconds),
        "peak_mebibytes": used,
        "gradient_mebibytes": logits.nbytes / MEBIBYTE,
        "value_error": (found[:CHECKED] - value).abs().max().item(),
        "gradient_error": (logits.grad[:CHECKED] - gradient).abs().max().item(),
    }


def reference(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Value and gradient in fp64."""
    wide = logits.detach().double().requires_grad_()
    value = wide.log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    [gradient] = torch.autograd.grad(value.sum(), wide)
    return value.detach(), gradient


def plain(logits: Tensor, targets: Tensor) -> Tensor:
    """What most trainers write."""
    log_softmax = logits.float().log_softmax(-1)
    return log_softmax.gather(1, targets.unsqueeze(1)).squeeze(1)


def peak_mebibytes() -> float:
    """The most memory that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": plain,
    "chunked": vocabulary.logprobs,
}


if __name__ == "__main__":
    main()
