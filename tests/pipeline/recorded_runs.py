"""The directories of runs with metrics and recorded samples, written without running a stage."""

from __future__ import annotations

import json
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from stages.sampling.sample_files import samples_file, write_samples
from stages.settings import RunSettings
from tests.pipeline.measured_runs import Measured, Skill, answers, keys, write_run

Line = dict[str, Any]

STAGE = "experts.sums"
HEALTHY = {
    **{"entropy": 0.5, "unfinished": 0.0, "zero_variance": 0.3},
    **{"gradient_norm": 1.0, "trained_tokens": 100, "reward_failures": 0, "engine_restarts": 0},
    **{"load_balance": 1.1, "router_agreement": 1.0, "high_ratio": 0.0, "drift_high_ratio": 0.0},
    **{"dropped_stale": 0.0, "format_gain": 0.0},
    **{"reward_spread": 0.4, "seconds_rollout": 3.0, "seconds_train": 1.0},
}


@pytest.fixture
def small(runs: Path, settings: RunSettings) -> Path:
    """A run whose stages are done, and whose expert has logged thirty steps."""
    domains = ("sums", "words")
    measured = Measured(answers({"cold_start": {d: Skill(0.3) for d in domains}}), keys(domains))
    write_run(runs / "small", settings, measured)
    log(runs / "small", [HEALTHY] * 30)
    return runs / "small"


def log(run: Path, metrics: list[Line]) -> None:
    """Write the expert's metrics, a second a step, until now; a reward that is not given rises."""
    start = time.time() - len(metrics)
    lines = [
        {
            **{"step": step, "steps": len(metrics), "time": start + step},
            **{"reward": 0.3 + 0.4 * step / len(metrics), **line},
        }
        for step, line in enumerate(metrics, start=1)
    ]
    path = run / "stages" / STAGE / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def sample(step: int, prompt: str, reward: float | None, **columns: Any) -> Line:
    """Return a sample of `prompt`, two tokens long."""
    found = {
        **{"step": step, "update": 0, "group": 0, "domain": "sums", "prompt": prompt},
        **{"problem": sha256(prompt.encode()).hexdigest(), "response": f"{prompt}?", "tokens": 2},
        **{"prompt_tokens": [5, 6], "response_tokens": [2, 3], "finish_reason": "stop"},
        **{"reward": reward, "reward_parts": {"exact": reward, "brief": 0.5}, "advantage": -0.5},
        **{"solved": reward == 1, "weight_version": step, "staleness": 0, "logprobs": [-1.0, -2.0]},
    }
    return {**found, **columns}


@pytest.fixture
def recorded(small: Path) -> Path:
    """The run with samples of three steps: `a` becomes right, `b` wrong, `c` stays wrong."""
    rollouts = small / "stages" / STAGE / "rollouts"
    steps = {
        1: [sample(1, "a", 0), sample(1, "b", 1), sample(1, "c", 0, tokens=9)],
        2: [sample(2, "a", 0), sample(2, "d", None, solved=None, reward_failure="died")],
        3: [sample(3, "a", 1), sample(3, "b", 0), sample(3, "c", -1)],
    }
    for step, rows in steps.items():
        write_samples(samples_file(rollouts, step), rows)
    return small


def answered(run: Path, model: str, right: list[int]) -> None:
    """Record a model's answers to the first problems of `sums` that its run has measured."""
    problems = keys(("sums",), len(right))["sums"]
    path = run / "stages" / "evaluate" / "samples" / model / "sums_000000.parquet"
    write_samples(
        path,
        [
            sample(0, f"{model} {n}", value, problem=key)
            for n, (key, value) in enumerate(zip(problems, right, strict=True))
        ],
    )


@pytest.fixture
def measured(runs: Path, settings: RunSettings) -> Path:
    """A run that measured two models on ten problems of each of two domains."""
    words = [1, 0] * 5
    right = {
        "cold_start": {"sums": [1, 1, 0, 0, 0, 0, 0, 0, 0, 0], "words": words},
        "merge": {"sums": [1, 0, 1, 1, 1, 1, 1, 1, 1, 0], "words": words},
    }
    write_run(runs / "small", settings, Measured(right, keys(("sums", "words"), 10)))
    for model, domains in right.items():
        answered(runs / "small", model, domains["sums"])
    return runs / "small"
