"""Training tokens a second, packed against padded, at lengths that vary as responses do.

    python benchmarks/packing.py --samples 256

One rank, one core, forward and backward of the cross-entropy on the quickstart's model. Both ways
take turns in one process and compute the same gradient.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml
from machine import measured

from parallel.distributed import process_groups
from parallel.sample import Sample
from parallel.settings import LayoutSettings, ModelSettings, OptimizerSettings, RoutingLossSettings

HERE = Path(__file__).parent
MODEL = HERE.parent / "configs" / "models" / "tiny-moe.yaml"
BUDGET = 4096  # tokens of a micro-batch
LONGEST = 512


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.samples, arguments.runs), indent=1))


def measure(samples: int = 256, runs: int = 3) -> dict[str, Any]:
    """Of both ways the median of real tokens a second and the share of computed tokens that are
    real; and the ratio of the speeds."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    with process_groups(LayoutSettings(), seed=0):
        drawn = draw(samples)
        ways = {name: way(drawn, padded=name == "padded") for name in ("packed", "padded")}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(runs):
            for name, (train, _) in ways.items():
                start = time.perf_counter()
                train()
                seconds[name].append(time.perf_counter() - start)
    read = sum(sample.length for sample in drawn)
    found: dict[str, Any] = {
        name: {
            "tokens_a_second": read / median(seconds[name]),
            "token_efficiency": efficiency,
        }
        for name, (_, efficiency) in ways.items()
    }
    ratio = found["packed"]["tokens_a_second"] / found["padded"]["tokens_a_second"]
    return {**measured(), "samples": samples, **found, "speedup": ratio}


def draw(count: int) -> list[Sample]:
    """Prompts of 16 tokens and responses of log-normally spread lengths, a few very long."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(mean=3.8, sigma=0.9, size=count), 4, LONGEST - 16)
    return [
        Sample(
            domain="",
            prompt=random.integers(2, 70, 16).astype(np.int32),
            response=random.integers(2, 70, int(length)).astype(np.int32),
        )
        for length in lengths
    ]


def way(drawn: list[Sample], padded: bool) -> tuple[Callable[[], Any], float]:
    """A function that trains once, and the share of the tokens it computes that are real."""
    from parallel import batch
    from parallel.batch import RankPlace
    from parallel.model.policy import TrainedPolicy
    from stages.metrics import token_efficiency

    model = yaml.safe_load(MODEL.read_text()) | {"max_positions": LONGEST}
    policy = TrainedPolicy(
        ModelSettings(**model),
        LayoutSettings(),
        OptimizerSettings(learning_rate=1e-3),
        steps=1000,
        losses=RoutingLossSettings(),
    )
    policy.start_fresh(seed=0)
    # The same number of micro-batches either way, or the packed ones would also be fewer.
    parts = batch.split(drawn, RankPlace.here(), BUDGET, replay=False, padded=padded)
    read = sum(sample.length for sample in drawn)
    targets = sum(len(sample.response) for sample in drawn)

    def train() -> None:
        policy.accumulate(parts, lambda r: (-r.logprobs().sum() / targets, None), tokens=read)
        policy.step()

    train()  # the first call warms up
    return train, token_efficiency(parts)["token_efficiency"]


if __name__ == "__main__":
    main()
