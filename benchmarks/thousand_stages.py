"""`braid plan` and `braid status` of a thousand stages that left a million lines of metrics.

    python benchmarks/thousand_stages.py --runs 5

The quickstart with 993 experts more, which makes 1,000 stages; all of its run is done but the
evaluation and the export. A command is timed from the start of its process to its end; seconds are
medians, and those of the CPU count user and system.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from machine import measured

from pipeline.config.validate import load
from pipeline.run.lineage import write_manifest
from pipeline.run.run import Run

CONFIGS = Path(__file__).parents[1] / "configs"
MORE_EXPERTS = 993
METRIC_LINES = 1_000_000
METRICS = 20  # of a line, beside its step and its time


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.runs), indent=1))


def measure(runs: int) -> dict[str, Any]:
    """Of both commands the seconds; of the plan also where nothing has run yet."""
    with tempfile.TemporaryDirectory(prefix="braid-benchmark-") as folder:
        config, runs_dir = Path(folder) / "big.yaml", Path(folder) / "runs"
        stages = make(config, runs_dir)
        plan, status = ["plan", str(config)], ["status", "big"]
        return {
            **measured(),
            "stages": stages,
            "metric_lines": METRIC_LINES,
            "plan_before_the_run": timed([*plan, "--runs-dir", f"{folder}/none"], runs),
            "plan": timed([*plan, "--runs-dir", str(runs_dir)], runs),
            "status": timed([*status, "--runs-dir", str(runs_dir)], runs),
        }


def make(config: Path, runs_dir: Path) -> int:
    """Write the configuration and its run; returns how many stages it has."""
    domain = CONFIGS / "domains" / "chain_sum.yaml"
    experts = [f"  d{number}: {{extends: {domain}}}" for number in range(MORE_EXPERTS)]
    head = [f"extends: {CONFIGS}/quickstart.yaml", "name: big", "domains:"]
    config.write_text("\n".join([*head, *experts]) + "\n")
    run = Run(runs_dir / "big", load(config))
    run.create()
    run.write_settings()
    stages = run.stages
    training = [stage for stage in stages if stage.trains]
    values = {f"metric_{number}": 0.123456789 for number in range(METRICS)}
    line = json.dumps({"step": 1, "steps": 1, "time": 1.0, **values}) + "\n"
    for number, stage in enumerate(training):
        directory = run.stage(stage.name)
        checkpoint = directory.path / "checkpoints" / f"step_{stage.steps}"
        checkpoint.mkdir(parents=True)
        sums = {"digest": stage.name, "files": {}}
        (checkpoint / "checksums.json").write_text(json.dumps(sums))
        directory.job(1).parent.mkdir()
        more = number < METRIC_LINES % len(training)
        directory.metrics.write_text(line * (METRIC_LINES // len(training) + more))
        write_manifest(directory, run.lineage(stage))
        run.ledger.append(stage.name, "done", "finished", 1, seconds=60.0)
    return len(stages)


def timed(command: list[str], runs: int) -> dict[str, float]:
    """Medians of wall and CPU seconds."""
    wall, cpu = [], []
    for _ in range(runs):
        before, start = cpu_seconds(), time.perf_counter()
        whole = [sys.executable, "-m", "pipeline.cli", *command]
        subprocess.run(whole, cwd=CONFIGS.parent, stdout=subprocess.DEVNULL, check=True)
        wall.append(time.perf_counter() - start)
        cpu.append(cpu_seconds() - before)
    return {"seconds": round(median(wall), 3), "cpu_seconds": round(median(cpu), 3)}


def cpu_seconds() -> float:
    """What the processes used that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
