"""GRPO steps a minute of Braid on this machine's cores, and where their time goes.

    python benchmarks/grpo_steps.py --size b [--steps-ahead 1] [--steps 6]

The workloads are those of `trl_steps.py`: the same model, prompts, group size and lengths, GSPO
without KL, one update a step. An expert is trained by `braid run` as anybody would, on two ranks
that share the data, with an engine beside them; what is measured is what it logs. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from grpo_workload import WORKLOADS, Workload, reward, starting_model
from machine import measured

WARM_UP_STEPS = 2
HERE = Path(__file__).parent


def digits(_problem: Any, response: str) -> float:
    """The workload's reward, as a domain calls it."""
    return reward(response)


def measure(
    size: str, steps_ahead: int, steps: int, placement: str, engines: int
) -> dict[str, Any]:
    """One run; the cold start before it is a single step that changes nothing."""
    workload = WORKLOADS[size]
    with tempfile.TemporaryDirectory() as directory:
        start = Path(directory) / "start"
        starting_model(workload).save_pretrained(start)
        config = Path(directory) / "steps.json"
        described = configuration(
            workload, start, steps_ahead, steps + WARM_UP_STEPS, placement, engines
        )
        config.write_text(json.dumps(described))
        log = Path(directory) / "steps" / "stages" / "experts.chain_sum" / "metrics.jsonl"
        run(config, Path(directory), lambda: len(logged(log)) == steps + WARM_UP_STEPS)
        lines = logged(log)
    return {
        **measured(),
        "size": size,
        "max_steps_ahead": steps_ahead,
        "placement": placement,
        "engines": engines,
        "rollouts": workload.rollouts,
        **summary(lines),
    }


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the steps after the warm-up; a step ends when its line is written."""
    times = [line["time"] for line in lines]
    seconds = [after - before for before, after in pairwise(times)]
    counted, lines = seconds[WARM_UP_STEPS - 1 :], lines[WARM_UP_STEPS:]
    phases = [name for name in lines[0] if name.startswith("seconds_")]
    ages = [name for name in lines[0] if name.startswith("staleness_")]
    return {
        "steps": len(counted),
        "seconds_a_step": round(median(counted), 3),
        "steps_a_minute": round(60 / median(counted), 2),
        "response_tokens": round(mean(line["response_tokens"] for line in lines), 1),
        "phases": {name: round(median(line[name] for line in lines), 3) for name in phases},
        "staleness": {name: round(mean(line[name] for line in lines), 3) for name in ages},
        "largest_mismatch": max(line["mismatch_max"] for line in lines),
    }


def configuration(
    workload: Workload, start: Path, steps_ahead: int, steps: int, placement: str, engines: int
) -> dict[str, Any]:
    """The run: a cold start and one expert, whose learning rate is next to nothing."""
    still = {"algorithm": "sgd", "learning_rate": 1e-9, "warmup_steps": 0}
    once = {"steps": 1, "checkpoint_every": 1}
    prompts = workload.prompts_per_step
    sampling = {
        "prompts_per_step": prompts,
        "group_size": workload.group_size,
        "max_response_tokens": workload.max_response_tokens,
    }
    expert = {
        "extends": str(HERE.parent / "configs" / "domains" / "chain_sum.yaml"),
        "rewards": {"digits": {"kind": "python", "function": "grpo_steps:digits"}},
        "sampling": sampling,
        "rollout": {"max_steps_ahead": steps_ahead},
        "objective": {"kl": {"coefficient": 0.0}},
        "routing": {"replay": "r3"},
        "updates_per_rollout": 1,
        "optimizer": still,
        "loop": {"steps": steps, "checkpoint_every": steps, "micro_batch_tokens": 4096},
    }
    model = workload.model.model_dump(mode="json") | {"initial_weights": str(start)}
    return {
        "name": "steps",
        "model": model,
        "layout": {"ranks": 1 if placement == "own" else 2},
        "engine": {
            "placement": placement,
            "count": engines,
            "max_model_tokens": 64 + workload.max_response_tokens,
            "max_sequences": workload.rollouts // engines,
        },
        "domains": {"chain_sum": expert},
        "stages": {
            "cold_start": {"kind": "sft", "optimizer": still, "loop": once},
            "experts": {"kind": "grpo", "from": "cold_start", "for_each": "domain"},
        },
        "evaluation": {"problems": 2},
    }


def logged(log: Path) -> list[dict[str, Any]]:
    """The expert's metrics so far; a line that is being written is left out."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run(config: Path, directory: Path, done: Callable[[], bool]) -> None:
    """`braid run` until the expert has made its steps, with its progress on standard error."""
    command = [sys.executable, "-m", "pipeline.cli", "run", str(config)]
    command += ["--runs-dir", str(directory)]
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(command, stdout=sys.stderr, env=environment)
    while not done():
        if process.poll() is not None:
            raise RuntimeError("the run ended before its expert had made its steps")
        time.sleep(1)
    process.terminate()
    process.wait()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=WORKLOADS, default="a")
    parser.add_argument(
        "--steps-ahead", type=int, default=0, help="steps that sampling may be ahead"
    )
    parser.add_argument("--placement", choices=["shared", "own"], default="shared")
    parser.add_argument("--engines", type=int, default=2, help="with --placement own, give 1")
    parser.add_argument("--steps", type=int, default=10)
    print(json.dumps(measure(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
