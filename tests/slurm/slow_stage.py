"""A rank that takes steps without training, and saves as a real stage does.

python slow_stage.py JOB

Every step of rank 0 is a line of steps.log: attempt, step, node. A checkpoint is written every
`checkpoint_every` steps, at the last one, and when SIGUSR1 or SIGTERM asks for it.
"""

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

SECONDS_A_STEP = 0.1


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        (Path(sys.argv[1]).parent / f"gpus_{rank}").write_text(visible)
    print(f"rank {rank} on {os.environ.get('SLURMD_NODENAME')}", flush=True)
    directory = Path(job["directory"])
    if rank:
        wait_for(directory / f"ended_{job['attempt']}")
    elif job["kind"] == "export":
        Path(job["output"]).mkdir(parents=True)
    elif job["kind"] == "evaluate":
        score = {"accuracy": 0.5, "low": 0.45, "high": 0.55, "n": 400}
        scores = dict.fromkeys(job["settings"]["domains"], score)
        results = {"models": dict.fromkeys(job["models"], scores)}
        (directory / "results.json").write_text(json.dumps(results))
    else:
        train(job, directory)
    (directory / f"ended_{job['attempt']}").touch()


def train(job: dict, directory: Path) -> None:
    asked: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda got, _: asked.append(got))
    if job["samples"]:
        for address in job["engine_addresses"]:
            wait_for(Path(address))
    loop = settings_of(job)["loop"]
    saved = [int(path.name.removeprefix("step_")) for path in directory.glob("checkpoints/step_*")]
    for step in range(max(saved, default=0) + 1, loop["steps"] + 1):
        time.sleep(SECONDS_A_STEP)
        while step > held_behind(job, directory) and not asked:
            time.sleep(SECONDS_A_STEP)
        with (directory / "steps.log").open("a") as log:
            log.write(f"{job['attempt']} {step} {os.environ.get('SLURMD_NODENAME')}\n")
        with (directory / "metrics.jsonl").open("a") as log:
            line = {"step": step, "steps": loop["steps"], "time": time.time(), "loss": 1 / step}
            log.write(json.dumps(line) + "\n")
        if asked or step == loop["steps"] or step % loop["checkpoint_every"] == 0:
            save(directory, step)
        if asked and step < loop["steps"]:
            (directory / f"ended_{job['attempt']}").touch()
            sys.exit(143)


def held_behind(job: dict, directory: Path) -> float:
    """Return the step after which the first attempt waits, for a test to act meanwhile."""
    hold = directory / "hold"
    return int(hold.read_text()) if job["attempt"] == 1 and hold.exists() else math.inf


def settings_of(job: dict) -> dict:
    settings = job["settings"]
    if job["kind"] == "grpo":
        return settings["domains"][job["domain"]]
    return settings["stages"][job["block"]]


def save(directory: Path, step: int) -> None:
    unfinished = directory / "checkpoints" / f"tmp_step_{step}"
    unfinished.mkdir(parents=True)
    checksums = {"digest": f"{directory.name} {step}", "files": {}}
    (unfinished / "checksums.json").write_text(json.dumps(checksums))
    unfinished.rename(unfinished.with_name(f"step_{step}"))


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


if __name__ == "__main__":
    main()
