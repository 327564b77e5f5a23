"""Layers of Qwen3-30B-A3B at full width: tokens a second, MFU, and the memory model's error."""

from __future__ import annotations

import time
from typing import Any

import torch

from parallel.estimates.memory import training_memory
from parallel.estimates.tensor_sizes import parameter_count
from parallel.settings import LayoutSettings, ModelSettings, OptimizerSettings
from tests.gpu.findings import Finding
from tests.gpu.losses import synchronize
from tests.gpu.models import QWEN3_30B_LAYERS, TINY, qwen3_30b, samples, trained_policy
from tests.gpu.part import Lane, one_rank
from tests.layouts.cases import accumulate, batches

# Dense bf16 FLOP/s, from NVIDIA's data sheets.
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
STEPS = 3
MICRO_BATCH = 4096  # tokens, of tests.layouts.cases.batches
LAYOUT = LayoutSettings()


def model_speed(lane: Lane) -> list[Finding]:
    """Train a few steps on replayed routes and time each half of a step."""
    model = TINY if lane.small else qwen3_30b(2)
    count, length = (4, 64) if lane.small else (4, 2048)
    with one_rank():
        started = time.perf_counter()
        policy = trained_policy(model, LAYOUT)
        _fill(policy)
        synchronize(lane.device)
        built = time.perf_counter() - started
        drawn = samples(model, count, length)
        seconds: dict[str, list[float]] = {"forward and backward": [], "optimizer": []}
        for _ in range(STEPS + 1):
            parts = batches(drawn, replay=True)
            for name, run in (
                ("forward and backward", lambda: _backward(policy, drawn, parts)),  # noqa: B023
                ("optimizer", policy.step),
            ):
                synchronize(lane.device)
                started = time.perf_counter()
                run()
                synchronize(lane.device)
                seconds[name].append(time.perf_counter() - started)
        tokens = sum(each.length for each in drawn)
        least = {name: min(each[1:]) for name, each in seconds.items()}
        found = [Finding(name, each, "s") for name, each in least.items()]
        found += [Finding("built and filled", built, "s")]
        return found + _speed(model, tokens, least) + _memory(model, tokens, lane)


def _backward(policy: Any, drawn: Any, parts: Any) -> None:
    accumulate(policy, "cross_entropy", drawn, parts)


@torch.no_grad()
def _fill(policy: Any) -> None:
    """Fill the weights on the device; drawing them on the host takes as long as the rest."""
    for tensor in policy.named_weights().values():
        tensor.normal_(0, 0.02) if tensor.dim() > 1 else tensor.fill_(1)
    policy.weights_changed()


def _speed(model: ModelSettings, tokens: int, seconds: dict[str, float]) -> list[Finding]:
    _, active = parameter_count(model)
    active -= model.vocabulary_size * model.hidden_size  # the embedding is read, not multiplied
    took = seconds["forward and backward"]
    flops = 6 * active * tokens / took
    found = [
        Finding("tokens of a step", float(tokens)),
        Finding(f"of {model.layers} layers and both ends", tokens / took, "tokens/s"),
        Finding("FLOP/s, 6 a parameter that a token uses", flops / 1e12, "TFLOP/s"),
    ]
    if not torch.cuda.is_available():
        return found
    name = torch.cuda.get_device_name()
    peak = next((value for part, value in PEAK.items() if part in name), None)
    if peak is not None:
        found.append(Finding(f"MFU, of {peak / 1e12:g} TFLOP/s", 100 * flops / peak, "%"))
    return found


def _memory(model: ModelSettings, tokens: int, lane: Lane) -> list[Finding]:
    adam = OptimizerSettings(learning_rate=1e-6)
    [predicted] = training_memory(model, LAYOUT, adam, min(tokens, MICRO_BATCH))
    held = predicted.parameters + predicted.gradients + predicted.optimizer
    whole = parameter_count(model.model_copy(update={"layers": QWEN3_30B_LAYERS}))[0]
    found = [Finding("weights, gradients, optimizer, predicted", held / 2**30, "GiB")]
    if not lane.small:
        found.append(Finding("parameters of all layers", whole / 1e9, "billion"))
    if lane.device != "cuda":
        return found
    measured = torch.cuda.memory_allocated()
    peak = torch.cuda.max_memory_allocated()
    return [
        *found,
        Finding("the same, measured", measured / 2**30, "GiB"),
        Finding("the same, prediction's error", abs(measured / held - 1), "", 0.1),
        Finding("largest, predicted", predicted.total / 2**30, "GiB"),
        Finding("largest, measured", peak / 2**30, "GiB"),
    ]
