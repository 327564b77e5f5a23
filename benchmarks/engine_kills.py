"""An engine killed by kill -9 again and again while an expert trains: nothing may be lost.

    python benchmarks/engine_kills.py [--kills 10] [--seed 0] [--steps 60]

Runs a cold start of a few steps and then one expert, on this machine. At random times its engine is
killed, by turns while it draws and in the middle of a refit, which its own description betrays.
Holds the run to what it must show: it finishes, and every step trained on each sample it asked for
once. Prints the counts and writes them to benchmarks/engine_kills.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from machine import measured

from parallel.engine.client import EngineClient, EngineError
from parallel.settings import EngineSettings
from stages.sampling.sample_files import read_samples, samples_file

RESULTS = Path(__file__).with_suffix(".json")
SPACING = (1.0, 6.0)  # seconds from one engine's readiness to the next kill
PATIENCE = 60.0  # seconds that a refit is waited for
PROMPTS, GROUP = 8, 4
CONFIG = """
extends: {smoke}
name: kills
engine: {{max_restarts: {kills}, check_refit: true}}
domains:
  chain_sum:
    loop: {{steps: {steps}}}
    sampling: {{prompts_per_step: {prompts}, group_size: {group}}}
"""


def measure(kills: int, seed: int, steps: int) -> dict[str, Any]:
    """One run, and what became of it."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "kills"
        process = start(Path(directory), kills, steps)
        try:
            done = [
                kill_one(run, process, during, draw.uniform(*SPACING))
                for during in [("generation", "refit")[number % 2] for number in range(kills)]
            ]
            status = process.wait(timeout=1800)
        finally:
            process.send_signal(signal.SIGTERM)
        return {
            **measured(),
            "kills": dict(Counter(done)),
            "exit_status": status,
            **judge(run, steps),
        }


def start(directory: Path, kills: int, steps: int) -> subprocess.Popen[bytes]:
    """The smoke run, with many more steps of one expert."""
    smoke = Path(__file__).parent.parent / "configs" / "smoke.yaml"
    config = directory / "kills.yaml"
    config.write_text(
        CONFIG.format(smoke=smoke, kills=kills, steps=steps, prompts=PROMPTS, group=GROUP)
    )
    command = [sys.executable, "-m", "pipeline.cli", "run", str(config)]
    command += ["--runs-dir", str(directory)]
    return subprocess.Popen(command, stdout=sys.stderr)


def kill_one(run: Path, process: subprocess.Popen[bytes], during: str, after: float) -> str:
    """Wait for an engine that has weights, kill it, and return its state at that moment."""
    client = EngineClient(run / "engine" / "0" / "address.json", EngineSettings())
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if client.connect().weight_version is not None:
                break
        except EngineError:
            pass
        client.address = None
        time.sleep(0.1)
    assert client.address is not None, "no engine came, or the run is over"
    time.sleep(after)
    if during == "refit":
        wait_for_refit(client)
    os.killpg(client.address.pid, signal.SIGKILL)
    return during


def wait_for_refit(client: EngineClient) -> None:
    """Return while the engine is without weights."""
    deadline = time.monotonic() + PATIENCE
    while client.describe().weight_version is not None:
        assert time.monotonic() < deadline, "no refit came"


def judge(run: Path, steps: int) -> dict[str, Any]:
    """Whether every step has each of its samples once."""
    stage = run / "stages" / "experts.chain_sum"
    logged = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    counts: Counter[str] = Counter()
    for step in range(1, steps + 1):
        samples = read_samples(samples_file(stage / "rollouts", step))
        drawn = Counter(each["prompt"] for each in samples)
        counts["missing"] += max(0, PROMPTS * GROUP - len(samples))
        counts["too many"] += max(0, len(samples) - PROMPTS * GROUP)
        counts["uneven groups"] += sum(count % GROUP != 0 for count in drawn.values())
    ledger = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    return {
        "steps": [line["step"] for line in logged] == list(range(1, steps + 1)),
        "samples": dict(counts),
        "restarts_in_the_ledger": sum("restarting it" in event["cause"] for event in ledger),
        "requeued": sum(line["requeued"] for line in logged),
        "duplicates": sum(line["duplicates"] for line in logged),
        "largest_mismatch": max(line["mismatch_max"] for line in logged),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    result = json.dumps(measure(**vars(parser.parse_args())), indent=1)
    RESULTS.write_text(result + "\n")
    print(result)


if __name__ == "__main__":
    main()
