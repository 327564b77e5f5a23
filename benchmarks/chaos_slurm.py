"""The kill matrix on a real Slurm: daemons, nodes and processes are killed, and the bits the same.

    python benchmarks/chaos_slurm.py [CONFIG] [--target node] [--cases 10] [--reference RUN]

The run of `chaos.py` runs undisturbed on this machine, or --reference names such a run. Then it is
submitted to a Slurm of three virtual nodes on this host (tests/slurm/cluster.sh, which needs
root), each of the two ranks on a node of its own, again and again. Every time something is killed
by kill -9 at a random moment: the controller or a node's daemon, which come back after some
seconds, a whole node, a step's daemon, an srun, a stage's launcher, a rank, an engine; with
`--target` always that one. Where jobs are lost by that, the run is submitted again, as a person
would. What every stage left is compared with the local run's, bit for bit. Exits 1 unless all are
the same. Writes benchmarks/kills/NAME_slurm.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos import CONFIG, NAME, RESULTS, BaselineRun, compared_with, difference, words
from machine import measured

from tests.end_to_end.moments import position
from tests.end_to_end.process_tree import TreeProcess, everything
from tests.virtual_cluster import Cluster

AWAY_SECONDS = 5.0  # that a daemon stays away which comes back
NODE_AWAY_SECONDS = 20.0  # longer than Slurm takes to notice
SUBMISSIONS = 6
PATIENCE_SECONDS = 1800.0  # from the kill to the end
# Stages of an array one after another: all nodes share this host's cores.
PROFILE = """\
ranks_per_node: 1
network_interface: lo
warning_seconds: 60
array_task_throttle: 1
"""
# What tells the processes of a kind by their arguments.
PROCESSES: dict[str, Callable[[tuple[str, ...]], bool]] = {
    "launcher": lambda words: words[2:3] == ("stage",) and words[1].endswith("braid"),
    "rank": lambda words: "stages.main" in words and "srun" not in words,
    "engine": lambda words: "parallel.engine.server" in words and "srun" not in words,
    "srun": lambda words: words[0] == "srun",
    "slurmstepd": lambda words: words[0].startswith("slurmstepd:"),
}
TARGETS = ("slurmctld", "slurmd", "node", *PROCESSES)


@dataclass
class SlurmCase:
    """A run whose `target` was killed after `seconds`, in a stage and step.

    `fault` says what differs from the reference.
    """

    seed: int
    target: str
    seconds: float = 0.0
    stage: str = ""
    step: int = 0
    submissions: int = 0
    total_seconds: float = 0.0
    fault: str | None = None


class Submitted:
    """One run on the cluster, in `directory`."""

    def __init__(self, cluster: Cluster, directory: Path, config: Path, stages: list[str]) -> None:
        self.cluster = cluster
        self.path = directory / NAME
        self.submissions = 0
        self._directory, self._config, self._stages = directory, config, stages
        directory.mkdir()
        (directory / "cluster.yaml").write_text(PROFILE)

    def submit(self) -> None:
        """Hand what is not done to Slurm."""
        where = ["--cluster", str(self._directory / "cluster.yaml")]
        self.cluster.braid(self._directory, "submit", *words(self._config), *where)
        self.submissions += 1

    def done(self) -> bool:
        """Whether the ledger says so of every stage."""
        ledger = self.path / "ledger.jsonl"
        lines = ledger.read_text().splitlines() if ledger.exists() else []
        ended = {each["stage"] for each in map(json.loads, lines) if each["state"] == "done"}
        return ended >= set(self._stages)

    def finish(self) -> None:
        """Wait for the end, and submit again what was lost on the way."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.done() or self._jobs():
            if time.monotonic() > deadline:
                raise RuntimeError(f"it does not end:\n{self.cluster.call('squeue', '--array')}")
            if not self._jobs() and not self.done():
                if self.submissions == SUBMISSIONS:
                    raise RuntimeError(f"submitted {SUBMISSIONS} times")
                self.submit()
            time.sleep(0.5)

    def victims(self, target: str) -> list[TreeProcess]:
        """Its processes of a kind; every one of a job has the cluster in its environment."""
        return [
            each
            for each in everything().values()
            if PROCESSES[target](each.arguments)
            and (target == "slurmstepd" or str(self.path) in " ".join(each.arguments))
            and _variables(each).get("SLURM_CONF") == self.cluster.environment["SLURM_CONF"]
        ]

    def _jobs(self) -> list[str]:
        """Those in the queue; what Slurm holds back because a launch failed is released."""
        lines = self.cluster.call("squeue", "--noheader", "--format=%A %r").splitlines()
        for line in lines:
            if "held" in line:
                self.cluster.call("scontrol", "release", line.split()[0])
        return lines


def _variables(process: TreeProcess) -> dict[str, str]:
    try:
        return process.variables
    except OSError:
        return {}


def strike(run: Submitted, target: str, generator: random.Random) -> bool:
    """Kill it; whether there was one."""
    cluster = run.cluster
    busy = cluster.call("squeue", "--noheader", "--states=running", "--format=%N").split()
    if not busy:
        return False
    node = generator.choice(cluster.call("scontrol", "show", "hostnames", ",".join(busy)).split())
    if target == "slurmctld":
        _kill(int((cluster.directory / "slurmctld.pid").read_text()))
        time.sleep(AWAY_SECONDS)
        cluster.control("start-controller")
        return True
    if target == "slurmd":
        _kill(int((cluster.directory / f"slurmd-{node}.pid").read_text()))
        time.sleep(AWAY_SECONDS)
        cluster.control("start-node", node)
        return True
    if target == "node":
        cluster.control("kill-node", node)
        time.sleep(NODE_AWAY_SECONDS)
        cluster.control("start-node", node)
        return True
    found = run.victims(target)
    if not found:
        return False
    _kill(generator.choice(sorted(found, key=lambda each: each.number)).number)
    return True


def _kill(number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)


def killed(
    cluster: Cluster, directory: Path, config: Path, case: SlurmCase, reference: BaselineRun
) -> SlurmCase:
    """Submit a run, kill the target of `case`, and compare the run with the local one."""
    generator = random.Random(case.seed)
    started = time.monotonic()
    run = Submitted(cluster, directory, config, reference.stages)
    try:
        run.submit()
        moment = generator.uniform(0, reference.seconds)
        time.sleep(moment)
        while not run.done():
            if (here := position(run.path)) is not None and strike(run, case.target, generator):
                case.stage, case.step = here.stage, here.step
                case.seconds = round(time.monotonic() - started, 1)
                break
            time.sleep(0.1)
        run.finish()
        case.fault = difference(reference, run.path)
    except RuntimeError as error:
        case.fault = str(error)
    case.submissions, case.total_seconds = run.submissions, round(time.monotonic() - started, 1)
    return case


def tell(case: SlurmCase) -> None:
    """A line for the run."""
    where = f"at {case.seconds:.0f} s in {case.stage} after step {case.step}"
    took = f"{case.submissions} submissions, {case.total_seconds:.0f} s"
    verdict = case.fault or "bit-identical"
    print(f"seed {case.seed}  {case.target:10}  {where}; {took}: {verdict}", flush=True)


def main() -> None:
    """Kill, print, write, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, nargs="?", default=CONFIG)
    parser.add_argument("--reference", type=Path, help="a finished deterministic run of CONFIG")
    parser.add_argument("--target", choices=TARGETS, help="what is killed; default: each in turn")
    parser.add_argument("--cases", type=int, default=10, help="runs, each with one kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60, help="after which no run is begun")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:
        reference = compared_with(arguments, Path(folder) / "reference")
        (Path(folder) / "slurm").mkdir()
        cluster = Cluster(Path(folder) / "slurm")
        cluster.control("up")
        done: list[SlurmCase] = []
        ends = time.monotonic() + 60 * arguments.minutes
        try:
            for seed in range(arguments.seed, arguments.seed + arguments.cases):
                if time.monotonic() > ends:
                    break
                case = SlurmCase(seed, arguments.target or TARGETS[seed % len(TARGETS)])
                directory = Path(folder) / str(seed)
                done.append(killed(cluster, directory, arguments.config, case, reference))
                tell(case)
                cases = [asdict(each) for each in done]
                found = {**measured(), "seconds_undisturbed": reference.seconds, "cases": cases}
                RESULTS.mkdir(exist_ok=True)
                results = RESULTS / f"{arguments.config.stem}_slurm.json"
                results.write_text(json.dumps(found, indent=1) + "\n")
        finally:
            cluster.control("down")
    same = sum(case.fault is None for case in done)
    print(f"{same} of {len(done)} bit-identical, {arguments.cases} asked for")
    sys.exit(0 if same == len(done) == arguments.cases else 1)


if __name__ == "__main__":
    main()
