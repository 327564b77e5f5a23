"""Python's share of a weight sync on an engine rank: experts stacked beside one tensor at a time.

    python benchmarks/weight_loading.py [--layers 48] [--experts 128]

A real engine of vLLM with the layers and experts of Qwen3-30B-A3B and matrices of 32 x 32, so that
bytes cost nothing. Both ways load the same tensors in turn, three times. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from machine import measured

from parallel.engine.core import Core
from parallel.engine.wire import Refit
from parallel.settings import EngineJob, EngineSettings, LayoutSettings, ModelSettings
from parallel.weights.boxes import Box
from parallel.weights.planner import Bucket, EngineSizes, Plan

ROUNDS = 3


class Contents:
    """An inbox whose buckets arrive at once, full of zeros."""

    received_bytes = staging_bytes = 0

    def __init__(self, model: ModelSettings) -> None:
        self.buckets = Plan(model, LayoutSettings(ranks=1), EngineSizes((1,))).receive(0)

    def start(self) -> None:
        """Do nothing: there is no trainer to connect to."""

    def take(self, bucket: Bucket) -> dict[tuple[str, Box], torch.Tensor]:
        """Return the contents of a bucket."""
        return {(name, box): torch.zeros(box[1]) for name, box in bucket.needs}


def measure(layers: int, experts: int) -> dict[str, Any]:
    """Return the seconds of a weight sync each way."""
    model = ModelSettings(
        vocabulary_size=128,
        hidden_size=32,
        layers=layers,
        attention_heads=2,
        key_value_heads=1,
        head_dim=32,
        experts=experts,
        experts_per_token=2,
        expert_hidden_size=32,
    )
    with tempfile.TemporaryDirectory() as scratch:
        address = Path(scratch) / "address"
        core = Core(
            EngineJob(model=model, engine=EngineSettings(), address=address, seed=0, index=0)
        )
        core._on_every_rank("prepare", model.model_dump_json())
        worker = core._vllm.engine_core.engine_core.model_executor.driver_worker.worker
        worker._inbox, stacks = Contents(model), worker._stacks
        seconds: dict[str, list[float]] = {"stacked": [], "one at a time": []}
        for _ in range(ROUNDS):
            for way, used in zip(seconds, (stacks, {}), strict=True):
                worker._stacks, begin = used, time.perf_counter()
                worker.refit(msgspec.msgpack.encode(Refit(1, False)))
                seconds[way].append(time.perf_counter() - begin)
        core.shutdown()
    count = sum(len(each.tensors) for each in Contents(model).buckets)
    medians = {way: round(median(each), 2) for way, each in seconds.items()}
    ratio = medians["one at a time"] / medians["stacked"]
    return {"tensors": count, "seconds": medians, "ratio": round(ratio, 1)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    given = parser.parse_args()
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    print(json.dumps(measured() | measure(given.layers, given.experts), indent=1))
