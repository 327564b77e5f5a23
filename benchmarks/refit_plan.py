"""What a refit of real models costs, by arithmetic alone: time to plan, bytes, balance, seconds.

    python benchmarks/refit_plan.py

Trainer: 512 ranks, PP8 x EP64. Engines: TP64, or TP32 where the model has only 32 heads; one of
them, and as many as 1024 ranks are, all fed by the trainers or some by other engines. The wire has
bf16. Planning is timed on one rank alone, from nothing, in seconds of its core, which other work on
the machine does not lengthen; the slowest of some ranks counts. Bytes are counted on every 4th rank
with one engine, and on every 32nd, of the first engine, with more.

Seconds are predicted for links of 50 GB/s in each direction of each rank, without latency. Engine
ranks load one bucket after another, and no rank is ahead of another: a step ends when the busiest
link has sent or received what belongs to it. Forwarding lags one step behind, at every hop. No
refit can be faster than its busiest link. Prints JSON.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from math import prod
from operator import methodcaller
from typing import Any

from machine import measured

from parallel.engine_rules import engine_violations
from parallel.settings import LayoutSettings, ModelSettings
from parallel.weights.boxes import Box
from parallel.weights.needs import needed
from parallel.weights.planner import Bucket, EngineSizes, OutgoingMessage, Plan

LAYOUT = LayoutSettings(ranks=512, pipeline=8, expert=64)
ENGINE_RANKS = 1024
ELEMENT = 2  # bytes of bf16
LINK = 50e9  # bytes a second
QWEN3_30B = ModelSettings(
    vocabulary_size=151_936,
    hidden_size=2048,
    layers=48,
    attention_heads=32,
    key_value_heads=4,
    head_dim=128,
    experts=128,
    experts_per_token=8,
    expert_hidden_size=768,
)
QWEN3_235B = QWEN3_30B.model_copy(
    update={"hidden_size": 4096, "layers": 94, "attention_heads": 64, "expert_hidden_size": 1536}
)
DEEPSEEK_V3 = ModelSettings(
    family="deepseek_v3",
    vocabulary_size=129_280,
    hidden_size=7168,
    layers=61,  # without the one of multi-token prediction
    attention_heads=128,
    key_value_heads=128,
    head_dim=64,
    experts=256,
    experts_per_token=8,
    expert_hidden_size=2048,
)
CASES = {
    "Qwen3-30B-A3B": (QWEN3_30B, 32),
    "Qwen3-235B-A22B": (QWEN3_235B, 64),
    "DeepSeek-V3": (DEEPSEEK_V3, 64),
}


def main() -> None:
    """Every model with every fleet."""
    found: dict[str, Any] = {**measured(), "link_bytes_a_second": LINK}
    for name, (model, size) in CASES.items():
        many = (size,) * (ENGINE_RANKS // size)
        found[name] = {
            "tensor_parallel": size,
            "refused": [message for _, message in engine_violations(model, 64)],
            "one engine": measure(model, EngineSizes((size,)), every=4),
            "many engines, all fed": measure(model, EngineSizes(many, forwarding=False), every=32),
            "many engines": measure(model, EngineSizes(many), every=32),
        }
    print(json.dumps(found, indent=1))


def measure(model: ModelSettings, fleet: EngineSizes, every: int) -> dict[str, Any]:
    """Measure the plans of one fleet, at every `every`-th rank."""
    size = fleet.engines[0]

    def alone(ask: Callable[[Plan], Any]) -> float:
        start = time.process_time()
        ask(Plan(model, LAYOUT, fleet))
        return time.process_time() - start

    engine_ranks = (0, size // 2, sum(fleet.engines) - 1)
    receive = max(alone(methodcaller("receive", rank)) for rank in engine_ranks)
    trainer_ranks = (0, LAYOUT.ranks // 2, LAYOUT.ranks - 1)
    send = max(alone(methodcaller("send", rank)) for rank in trainer_ranks)

    plan = Plan(model, LAYOUT, fleet)
    bound = [elements(needed(model, size, rank)) for rank in range(size)]
    received = {rank: plan.receive(rank) for rank in range(0, size, every)}
    sent = {rank: plan.send(rank) for rank in range(0, LAYOUT.ranks, every)}
    return {
        "cpu_seconds_to_plan_engine_rank": receive,
        "cpu_seconds_to_plan_trainer_rank": send,
        "engine_ranks": sum(fleet.engines),
        "engine_ranks_fed_by_trainers": len(plan.fed) * size,
        "messages_to_an_engine_rank": max(
            sum(len(bucket.messages) for bucket in buckets) for buckets in received.values()
        ),
        "messages_from_a_trainer_rank": max(map(len, sent.values())),
        "gigabytes_an_engine_rank": max(bound) * ELEMENT / 1e9,
        "received_over_bound": max(
            sum(elements(message.boxes) for bucket in buckets for message in bucket.messages)
            / bound[rank]
            for rank, buckets in received.items()
        ),
        "largest_bucket_megabytes": max(
            elements(bucket.needs) for buckets in received.values() for bucket in buckets
        )
        * ELEMENT
        / 1e6,
        **balance(sent, len(plan.fed) * sum(bound)),
        **predict(plan, received, sent),
    }


def balance(sent: dict[int, list[OutgoingMessage]], total: int) -> dict[str, float]:
    """Most over mean, of all ranks and of those of one pipeline stage."""
    counts = {rank: sum(map(volume, sends)) for rank, sends in sent.items()}
    stages: dict[int, list[int]] = {}
    for rank, count in counts.items():
        stages.setdefault(rank * LAYOUT.pipeline // LAYOUT.ranks, []).append(count)
    return {
        "gigabytes_a_trainer_rank": total * ELEMENT / LAYOUT.ranks / 1e9,
        "most_sent_over_mean": max(counts.values()) * LAYOUT.ranks / total,
        "most_sent_over_mean_of_stage": max(
            max(each) * len(each) / sum(each) for each in stages.values()
        ),
    }


def predict(
    plan: Plan, received: dict[int, list[Bucket]], sent: dict[int, list[OutgoingMessage]]
) -> dict[str, float]:
    """Seconds of a refit, and those of its busiest link."""
    size = plan.fleet.engines[0]
    links: list[Counter[int]] = []  # elements a step
    for sends in sent.values():
        links.append(Counter())
        for each in sends:
            links[-1][plan.step(each.engine_rank // size, each.bucket)] += volume(each)
    for buckets in received.values():  # of the first engine; the others receive as much in a step
        links.append(Counter({plan.step(0, each.key): elements(each.needs) for each in buckets}))
    steps: Counter[int] = Counter()
    for link in links:
        steps |= link
    hops = -(-len(plan.fleet.engines) // len(plan.fed)) - 1
    return {
        "seconds": (sum(steps.values()) + hops * max(steps.values())) * ELEMENT / LINK,
        "seconds_of_busiest_link": max(link.total() for link in links) * ELEMENT / LINK,
    }


def volume(each: OutgoingMessage) -> int:
    """Elements of a message."""
    return sum(prod(part.box[1]) for part in each.slices)


def elements(boxes: list[tuple[str, Box]]) -> int:
    """Elements of some boxes."""
    return sum(prod(sizes) for _, (_, sizes) in boxes)


if __name__ == "__main__":
    main()
