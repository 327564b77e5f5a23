"""Seconds from launch to first step, of ranks and engines, with fork servers and without.

    python benchmarks/starts.py [--config configs/smoke.yaml]

Runs the config twice in this one call, deterministic, with `launch.fork_servers` on and off, and
watches the run's files: a stage is launched when its job file is there, `loaded` when its model is
(metrics.jsonl is created), `begins` when its first step does (the time of the first line, less the
line's own seconds of refit, rollout and training), and has done its first step when metrics.jsonl
has a line. An engine is launched when its job file is there, and ready when it has written its
address. Prints one JSON object, in which `same_bits` says whether both runs have the same final
weights, bit for bit. Weights & Biases is on (offline), as it is by default.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import measured

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.end_to_end.same_bits import digests

REPOSITORY = Path(__file__).parents[1]
LOOK_SECONDS = 0.01


def main() -> None:
    """Run both and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=str(REPOSITORY / "configs" / "smoke.yaml"))
    arguments = parser.parse_args()
    found: dict[str, Any] = {**measured(), "config": Path(arguments.config).name}
    with tempfile.TemporaryDirectory(prefix="braid-starts-") as directory:
        for setting in ("true", "false"):
            found[f"fork_servers={setting}"] = watched(arguments.config, Path(directory), setting)
        forked, executed = (digests(Path(directory) / name(each)) for each in ("true", "false"))
        found["same_bits"] = forked == executed and len(forked) > 0
    print(json.dumps(found, indent=1))


def watched(config: str, directory: Path, setting: str) -> dict[str, Any]:
    """One run, and when what was there."""
    command = [sys.executable, "-m", "pipeline.cli", "run", config, "--runs-dir", str(directory)]
    command += ["--name", name(setting), "deterministic=true", f"launch.fork_servers={setting}"]
    started = time.time()
    seen: dict[Path, float] = {}
    servers = 0
    with (directory / f"{name(setting)}.log").open("w") as log:
        braid = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)
        while braid.poll() is None:
            for path in marks(directory / name(setting)):
                seen.setdefault(path, time.time())
            servers = max(servers, server_memory(braid.pid))
            time.sleep(LOOK_SECONDS)
    if braid.returncode:
        sys.exit((directory / f"{name(setting)}.log").read_text())
    stages = {}
    for launched, at in seen.items():
        if launched.parents[2].name == "stages" and launched.name == "job.json":
            metrics = launched.parents[1] / "metrics.jsonl"
            stages[metrics.parent.name] = {
                "loaded": since(at, seen.get(metrics)),
                "begins": since(at, begun(metrics)),
                "first_step": since(at, seen.get(metrics.with_suffix(".first"))),
            }
    engines = {
        path.parent.name: since(at, seen.get(path.with_name("address.json")))
        for path, at in seen.items()
        if path.name == "engine.json"
    }
    return {
        "whole_run_seconds": round(time.time() - started, 1),
        "seconds_after_launch": stages,
        "engine_ready_seconds": engines,
        "servers_peak_proportional_mebibytes": servers,
    }


def name(setting: str) -> str:
    """What the run is called."""
    return f"fork-servers-{setting}"


def marks(run: Path) -> list[Path]:
    """The files that tell how far the run is; METRICS.first stands for a first line."""
    stages = [*run.glob("stages/*/attempt_*/job.json"), *run.glob("stages/*/metrics.jsonl")]
    first = [
        path.with_suffix(".first")
        for path in stages
        if path.name == "metrics.jsonl" and path.stat().st_size
    ]
    engines = [path for name in ("engine", "address") for path in run.glob(f"engine/*/{name}.json")]
    return [*stages, *first, *engines]


def begun(metrics: Path) -> float | None:
    """The Unix time at which the first step began, of a stage that has steps and times them."""
    if not metrics.exists():
        return None
    first = json.loads(metrics.read_text().splitlines()[0])
    parts = ("seconds_refit", "seconds_rollout", "seconds_train")
    return first["time"] - sum(first[part] for part in parts) if parts[0] in first else None


def since(start: float, end: float | None) -> float | None:
    """Seconds between, where there was an end."""
    return None if end is None else round(end - start, 2)


def server_memory(launcher: int) -> int:
    """MiB of the launcher's fork servers, what they share with their forks counted in parts."""
    total = 0
    for entry in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            if b"parallel.machine.forkserver" in Path(f"/proc/{entry}/cmdline").read_bytes():
                lines = Path(f"/proc/{entry}/smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except OSError:
            continue
    return total >> 10


if __name__ == "__main__":
    main()
