"""Responses scored a second by the pool and by a single process, for a cheap reward and a dear one.

    python benchmarks/rewards.py --samples 256

Cheap is reasoning-gym's scorer of sums, dear is math-verify's equality of mathematics. Both ways
score the same responses in turn. A batch of the quickstart is 256 samples in groups of 8: what it
takes longer in the pool is what a step waits for at most, since grading overlaps with sampling.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from statistics import median
from typing import Any

from machine import measured

from stages.data.problem import Problem
from stages.data.prompts import PromptStream
from stages.data.settings import ReasoningGymPromptSettings
from stages.data.tokenizer import CharacterTokenizer
from stages.rewards.kinds import RewardSettings
from stages.rewards.kinds.math import MathReward
from stages.rewards.kinds.reasoning_gym import ReasoningGymReward
from stages.rewards.pool import RewardPool
from stages.rewards.reward import Grader, Response, RewardPoolSettings

DOMAIN, GROUP = "sums", 8
Batch = list[tuple[Problem, list[Response]]]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.samples, arguments.runs), indent=1))


def measure(samples: int = 256, runs: int = 5) -> dict[str, Any]:
    """Of both rewards, the median of the seconds that both ways take for all samples."""
    kinds: dict[str, tuple[RewardSettings, Batch]] = {
        "cheap": (ReasoningGymReward(), sums(samples)),
        "dear": (MathReward(), mathematics(samples)),
    }
    found = {name: compare(settings, batch, runs) for name, (settings, batch) in kinds.items()}
    return {**measured(), "samples": samples, **found}


def compare(settings: RewardSettings, batch: Batch, runs: int) -> dict[str, float]:
    """Samples a second of both ways, and what a batch takes longer in the pool."""
    with tempfile.TemporaryDirectory() as folder:
        directory, rewards = Path(folder), {"it": settings}
        grader = Grader(DOMAIN, rewards, directory)
        begun = time.perf_counter()
        pool = RewardPool({DOMAIN: rewards}, RewardPoolSettings(), directory)

        def alone() -> None:
            for problem, responses in batch:
                for response in responses:
                    grader.grade(problem, response)

        def pooled() -> None:
            wait([future for each in batch for future in pool.submit(*each)])

        wait(pool.submit(batch[0][0], batch[0][1]))
        started = time.perf_counter() - begun
        alone()
        pooled()
        ways = {"alone": alone, "pooled": pooled}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(runs):
            for name, way in ways.items():
                seconds[name].append(timed(way))
        pool.close()
    samples = sum(len(responses) for _, responses in batch)
    one, many = median(seconds["alone"]), median(seconds["pooled"])
    return {
        "alone_a_second": samples / one,
        "pool_a_second": samples / many,
        "milliseconds_more_a_batch": 1e3 * (many - one),
        "seconds_until_first_grades": started,
    }


def timed(way: Callable[[], None]) -> float:
    """Seconds that one pass takes."""
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def sums(samples: int) -> Batch:
    """The quickstart's sums; half of the responses are right."""
    config = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1}
    settings = ReasoningGymPromptSettings(dataset="chain_sum", config=config)
    prompts = PromptStream(settings, CharacterTokenizer(), DOMAIN, 0, "bench")
    return [
        (problem, [Response(f"<1>{problem.answer}{'0' * (i % 2)}", 8) for i in range(GROUP)])
        for problem in prompts.take(samples // GROUP)
    ]


def mathematics(samples: int) -> Batch:
    """Polynomials written in two ways; math-verify keeps what it has read, so all are different."""
    batch: Batch = []
    for number in range(1, samples // GROUP + 1):
        answer = f"x^2 + {2 * number} x + {number * number}"
        texts = [rf"It is \boxed{{(x + {number})^2 + {i} - {2 * i % 3}}}." for i in range(GROUP)]
        problem = Problem(DOMAIN, number, f"{number}?", answer)
        batch.append((problem, [Response(text, len(text)) for text in texts]))
    return batch


if __name__ == "__main__":
    main()
