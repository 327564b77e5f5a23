"""`braid plan` and `braid status` of a thousand stages that left a million lines of metrics.

    python benchmarks/thousand_stages.py --runs 5

The quickstart with 993 domains more, whose experts make 1,000 stages: as one block with
`for_each: domain`, and as a block for each, written out by hand. All of the run is done but the
evaluation and the export; the edit makes every second expert, and so the merge, stale. A command
is timed from the start of its process to its end; seconds are medians, and those of the CPU count
user and system.
"""

from __future__ import annotations

import argparse
import json
import os
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
OWN = ["chain_sum", "spell_backward", "number_sorting"]  # domains of the quickstart
METRICS = 20  # of a line, beside its step and its time


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.runs), indent=1))


def measure(runs: int) -> dict[str, Any]:
    """Return the seconds of the commands, for both ways to write the stages."""
    found: dict[str, Any] = {**measured(), "metric_lines": METRIC_LINES}
    for name, by_hand in (("for_each", False), ("by_hand", True)):
        with tempfile.TemporaryDirectory(prefix="braid-benchmark-") as folder:
            config, edited, runs_dir = (Path(folder) / each for each in ("big", "edited", "runs"))
            stages = make(config, runs_dir, by_hand)
            edited.write_text(edit(config))
            options = ["--runs-dir", str(runs_dir)]
            commands = {
                "plan_before_the_run": ["plan", str(config), "--runs-dir", f"{folder}/none"],
                "plan": ["plan", str(config), *options],
                "plan_dot": ["plan", str(config), "--dot", *options],
                "plan_of_an_edit": ["plan", str(edited), *options],
                "status": ["status", "big", *options],
            }
            times = {each: timed(command, runs) for each, command in commands.items()}
            found[name] = {"stages": stages, **times}
    return found


def make(config: Path, runs_dir: Path, by_hand: bool) -> int:
    """Write the configuration and its run; returns how many stages it has."""
    domain = CONFIGS / "domains" / "chain_sum.yaml"
    names = [f"d{number}" for number in range(MORE_EXPERTS)]
    lines = [f"extends: {CONFIGS}/quickstart.yaml", "name: big", "domains:"]
    lines += [f"  {name}: {{extends: {domain}}}" for name in names]
    if by_hand:
        teachers = {name: f"experts.{name}" for name in OWN} | {name: name for name in names}
        lines += ["stages:", f"  experts: {{domains: {json.dumps(OWN)}}}"]
        block = "kind: grpo, from: cold_start, domains"
        lines += [f"  {name}: {{{block}: [{name}]}}" for name in names]
        lines += [f"  merge: {{teachers: {json.dumps(teachers)}}}"]
    config.write_text("\n".join(lines) + "\n")
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


def edit(config: Path) -> str:
    """Return a configuration in which every second domain trains a step more."""
    changed = [f"  d{number}: {{loop: {{steps: 51}}}}" for number in range(0, MORE_EXPERTS, 2)]
    return "\n".join([f"extends: {config}", "domains:", *changed]) + "\n"


def timed(command: list[str], runs: int) -> dict[str, float]:
    """Medians of wall and CPU seconds, after a first run that leaves the modules' bytecode."""
    wall, cpu = [], []
    with_bytecode = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(runs + 1):
        before, start = cpu_seconds(), time.perf_counter()
        whole = [sys.executable, "-m", "pipeline.cli", *command]
        subprocess.run(
            whole, cwd=CONFIGS.parent, env=with_bytecode, stdout=subprocess.DEVNULL, check=True
        )
        wall.append(time.perf_counter() - start)
        cpu.append(cpu_seconds() - before)
    return {"seconds": round(median(wall[1:]), 3), "cpu_seconds": round(median(cpu[1:]), 3)}


def cpu_seconds() -> float:
    """What the processes used that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
