"""The quickstart on a real Slurm where much goes wrong, beside the same run left undisturbed.

    python benchmarks/quickstart_slurm.py [KEY=VALUE ...]

configs/quickstart.yaml, deterministic, runs on this machine. Then it is submitted to a Slurm of
four virtual nodes on this host (tests/slurm/cluster.sh, which needs root), each rank on a node of
its own and the engine as a step: a node is killed in the middle of the first expert, the second is
preempted, the controller is away during the third, the merge has a walltime of two minutes, of
which the warning takes one, and the last job is cancelled and its script submitted by hand. Weights
and optimizer of every stage and the table are compared with the local run's. Exits 1 unless all
are the same. Writes benchmarks/quickstart_slurm.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from machine import measured

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.end_to_end.same_bits import digests
from tests.runs import REPOSITORY, braid, metrics
from tests.virtual_cluster import Cluster

CONFIG = REPOSITORY / "configs" / "quickstart.yaml"
EXPERTS = ("experts.chain_sum", "experts.spell_backward", "experts.number_sorting")
RESULTS = Path(__file__).parent / "quickstart_slurm.json"
PROFILE = """\
ranks_per_node: 1
network_interface: lo
walltime: "0:30:00"
kinds: {distill: {walltime: "0:02:00"}}
warning_seconds: 60
array_task_throttle: 1
"""
NODES = "4"
AWAY_SECONDS = 8.0  # that the controller stays away
NODE_AWAY_SECONDS = 30.0  # longer than Slurm takes to notice
PATIENCE_SECONDS = 3600.0


@dataclass
class Fault:
    """What went wrong, in which stage and behind which of its steps."""

    what: str
    stage: str
    step: int


class SubmittedRun:
    """The run on the cluster."""

    def __init__(self, cluster: Cluster, directory: Path, overrides: list[str]) -> None:
        directory.mkdir()
        (directory / "cluster.yaml").write_text(PROFILE)
        self.cluster = cluster
        self.path = directory / "quickstart"
        self._directory = directory
        where = ["--cluster", str(directory / "cluster.yaml")]
        print(self.braid("submit", str(CONFIG), "deterministic=true", *overrides, *where))

    def braid(self, *arguments: str) -> str:
        """What a command prints."""
        return self.cluster.braid(self._directory, *arguments)

    def ledger(self) -> list[dict[str, Any]]:
        """Its lines."""
        return [json.loads(line) for line in (self.path / "ledger.jsonl").read_text().splitlines()]

    def until(self, stage: str, step: int) -> int:
        """Wait for a step of a stage; returns the last one that is done."""
        self.cluster.wait_until(lambda: len(metrics(self.path, stage)) >= step, PATIENCE_SECONDS)
        return len(metrics(self.path, stage))

    def until_done(self, stage: str) -> None:
        """Wait for the end of a stage."""

        def done() -> bool:
            return any(each["stage"] == stage and each["state"] == "done" for each in self.ledger())

        self.cluster.wait_until(done, PATIENCE_SECONDS)


def with_faults(run: SubmittedRun, middle: int) -> list[Fault]:
    """All of them, and the end of the run. `middle` is the step at which experts are struck."""
    cluster, faults = run.cluster, []
    first, second, third = EXPERTS

    faults.append(Fault("a node killed", first, run.until(first, middle)))
    nodes = cluster.call("squeue", "--noheader", "--states=R", "--format=%N").splitlines()[0]
    last = cluster.call("scontrol", "show", "hostnames", nodes).split()[-1]
    cluster.control("kill-node", last)
    time.sleep(NODE_AWAY_SECONDS)
    cluster.control("start-node", last)

    faults.append(Fault("preempted", second, run.until(second, middle)))
    urgent = ["--partition=urgent", f"--nodes={NODES}", "--exclusive", "--output=/dev/null"]
    cluster.call("sbatch", *urgent, "--wrap=sleep 5")

    faults.append(Fault("the controller away", third, run.until(third, middle)))
    cluster.control("stop-controller")
    time.sleep(AWAY_SECONDS)
    cluster.control("start-controller")

    faults.append(
        Fault("the export cancelled, and submitted by hand", "merge", run.until("merge", 1))
    )
    run.braid("cancel", "quickstart", "export")
    run.until_done("evaluate")
    cluster.call("sbatch", "--nodes=2", "slurm/export.sbatch", str(run.path), "export")
    run.until_done("export")
    return faults


def main() -> None:
    """Run both, compare, write, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", help="settings that override those of both runs")
    overrides = parser.parse_args().overrides
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:
        local, started = Path(folder) / "local", time.monotonic()
        local.mkdir()
        log = Path(folder) / "local.log"
        if braid(local, "run", str(CONFIG), "deterministic=true", *overrides, log=log).wait():
            sys.exit(log.read_text())
        local_seconds = time.monotonic() - started
        print(f"on this machine: {local_seconds:.0f} s", flush=True)
        (Path(folder) / "slurm").mkdir()
        cluster = Cluster(Path(folder) / "slurm")
        cluster.environment["NODES"] = NODES
        cluster.control("up")
        try:
            started = time.monotonic()
            run = SubmittedRun(cluster, Path(folder) / "runs", overrides)
            settings = yaml.safe_load((run.path / "run.yaml").read_text())
            steps = settings["domains"]["chain_sum"]["loop"]["steps"]
            faults = with_faults(run, middle=max(1, steps // 2 - 2))
            seconds = time.monotonic() - started
            found = report(local / "quickstart", run, faults)
        finally:
            cluster.control("down")
    found = {
        **measured(),
        "local_seconds": local_seconds,
        "slurm_seconds": seconds,
        **found,
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    sys.exit(0 if found["same_table"] and all(found["same_tensors"].values()) else 1)


def report(local: Path, run: SubmittedRun, faults: list[Fault]) -> dict[str, Any]:
    """What is the same, and where every attempt of the stages began."""
    here, there = digests(local), digests(run.path)
    tables = [
        json.loads((path / "results.json").read_text())["models"] for path in (local, run.path)
    ]
    began = [each for each in run.ledger() if each["state"] == "running"]
    return {
        "faults": [asdict(each) for each in faults],
        "attempts": [f"{each['stage']} {each['attempt']}: {each['cause']}" for each in began],
        "same_tensors": {name: there.get(name) == digest for name, digest in here.items()},
        "same_table": tables[0] == tables[1],
    }


if __name__ == "__main__":
    main()
