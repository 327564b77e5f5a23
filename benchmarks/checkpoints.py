"""How long a stage stands still for a checkpoint: written beside the training, and at once.

    python benchmarks/checkpoints.py

One rank and a model of some 70 million parameters, with either kind of optimizer. Prints JSON.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from machine import measured

from parallel.distributed import process_groups
from parallel.settings import LayoutSettings, ModelSettings, OptimizerSettings, RoutingLossSettings

MODEL = ModelSettings(
    vocabulary_size=1024,
    hidden_size=512,
    layers=8,
    attention_heads=8,
    key_value_heads=4,
    head_dim=64,
    experts=8,
    experts_per_token=2,
    expert_hidden_size=640,
)
ROUNDS = 5


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """Median seconds of several checkpoints, which take turns so that both see the same machine.

    `stall`: the loop stands still. `until_named`: the whole of it, while nothing else is computed.
    """
    found: dict[str, Any] = {**measured()}
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    with process_groups(LayoutSettings(), seed=0), tempfile.TemporaryDirectory() as directory:
        for distributed in (False, True):
            policy = trainable(distributed)
            found["parameters"] = sum(p.numel() for p in policy.chunks[0].parameters())
            kind = "distributed_optimizer" if distributed else "plain_optimizer"
            found[kind] = stalls(policy, Path(directory) / kind, rounds)
    return found


def stalls(policy: Any, directory: Path, rounds: int) -> dict[str, Any]:
    """Medians of both ways, and how many bytes a checkpoint is."""
    from parallel.checkpoint.save import Saver

    ways = {"asynchronous": True, "synchronous": False}
    savers = {name: Saver(directory / name, asynchronous=way) for name, way in ways.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for step in range(rounds + 1):
        for name, saver in savers.items():
            taken[name].append(stall(saver, policy, step))
    found: dict[str, Any] = {}
    for name, times in taken.items():
        stood, whole = zip(*times[1:], strict=True)  # the first one also creates what is reused
        found[name] = {"stall": round(median(stood), 3), "until_named": round(median(whole), 3)}
    ratio = found["synchronous"]["stall"] / found["asynchronous"]["stall"]
    files = (directory / "synchronous").rglob("*.distcp")
    return {
        **found,
        "times_shorter": round(ratio, 1),
        "bytes": sum(path.stat().st_size for path in files),
    }


def stall(saver: Any, policy: Any, step: int) -> tuple[float, float]:
    """Seconds the loop stands still for one checkpoint, and seconds until it has its name."""
    begun = time.monotonic()
    saver.begin(policy, step, {})
    stood = time.monotonic() - begun
    while saver.writing:
        time.sleep(0.01)
    ended = time.monotonic()
    saver.finish()
    named = time.monotonic()
    return stood + (named - ended), named - begun


def trainable(distributed: bool) -> Any:
    """A policy with random weights and all of its optimizer's state."""
    from parallel.model.policy import TrainedPolicy

    layout = LayoutSettings(distributed_optimizer=distributed)
    settings = OptimizerSettings(learning_rate=1e-4)
    policy = TrainedPolicy(MODEL, layout, settings, steps=10, losses=RoutingLossSettings())
    policy.start_fresh(seed=0)
    for parameter in policy.chunks[0].parameters():
        parameter.main_grad.normal_()
    policy.step()
    return policy


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
