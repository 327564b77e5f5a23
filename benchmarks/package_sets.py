"""Two sets of packages beside each other: an engine's start, and a GRPO step.

    python benchmarks/package_sets.py OLD NEW [--sizes a b] [--pairs 5]

OLD and NEW are checkouts of Braid, each with its packages in `.venv`. Both are measured in one call
and take turns, so that whatever else the machine does falls on both. An engine's start is a fork
of a server that has imported everything, as the launcher's, until it has sampled a token. A step is
one of `grpo_steps.py` of the checkout itself, on one rank and one engine with cores of their own:
the run that has no turn is stopped (SIGSTOP) between two steps. Seconds of processor time are those
of all of a side's processes; a busy machine changes them less than the seconds of the clock. Each
number is a median over the turns. Prints JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

HERE = Path(__file__).parent
WARM_UP_STEPS = 2
LOOK_SECONDS = 0.01
TICK = os.sysconf("SC_CLK_TCK")
CPU_FIELDS = slice(11, 15)  # of /proc/PID/stat after the name: own and reaped children's time
PARENT_FIELD = 1
# A refit is not among them: it begins the next step, before the run is stopped.
PHASES = ("seconds_rollout", "seconds_train")

Turns = dict[str, list[dict[str, float]]]


def main() -> None:
    """Measure and print; as a checkout's server of starts, serve."""
    if sys.argv[1:] == ["serve"]:
        serve_starts()
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--sizes", nargs="*", choices=("a", "b"), default=["a", "b"])
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    checkouts = {"old": arguments.old.resolve(), "new": arguments.new.resolve()}
    with tempfile.TemporaryDirectory(prefix="braid-sets-") as directory:
        scratch = Path(directory)
        report: dict[str, Any] = {
            **describe(checkouts["new"]),
            "old": describe(checkouts["old"]),
            "pairs": arguments.pairs,
            "engine_start": summary(starts(checkouts, arguments.pairs, scratch)),
        }
        for size in arguments.sizes:
            report[f"step_{size}"] = summary(steps(checkouts, size, arguments.pairs, scratch))
    print(json.dumps(report, indent=1))


def summary(turns: Turns) -> dict[str, Any]:
    """Return each side's medians, and the ratios of new to old."""
    medians = {
        side: {name: round(median(turn[name] for turn in of_side), 3) for name in of_side[0]}
        for side, of_side in turns.items()
    }
    ratios = {
        name: round(medians["new"][name] / old, 2) for name, old in medians["old"].items() if old
    }
    return {**medians, "new_over_old": ratios}


def describe(checkout: Path) -> dict[str, str]:
    """Return a checkout's `measured()`: its revision and packages."""
    code = "import json, machine; print(json.dumps(machine.measured()))"
    output = python(checkout, "-c", code, stdout=subprocess.PIPE).communicate()[0]
    return json.loads(output)


def python(
    checkout: Path, *arguments: str, directory: Path | None = None, **options: Any
) -> subprocess.Popen[str]:
    """Start a checkout's Python in it, with its own modules; temporary files are in `directory`.

    vLLM's cache is there too. It keeps by a model's name what it found in the model's source: the
    two sides would overwrite each other's files, and each start would spend 15 s on looking again.
    """
    paths = os.pathsep.join([str(checkout), str(checkout / "benchmarks")])
    environment = {**os.environ, "PYTHONPATH": paths, "WANDB_MODE": "disabled"}
    if directory is not None:
        environment |= {"TMPDIR": str(directory), "VLLM_CACHE_ROOT": str(directory / "cache")}
    command = [str(checkout / ".venv" / "bin" / "python"), "-W", "ignore", *arguments]
    return subprocess.Popen(command, cwd=checkout, env=environment, text=True, **options)


def starts(checkouts: dict[str, Path], pairs: int, scratch: Path) -> Turns:
    """Return the starts of engines, one of each side in turn."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    turns: Turns = {side: [] for side in checkouts}
    for side in checkouts:
        (scratch / side).mkdir()
    serve = str(Path(__file__).resolve()), "serve"
    with (scratch / "starts.log").open("w") as log:
        servers: dict[str, Any] = {
            side: python(checkout, *serve, directory=scratch / side, stderr=log, **pipes)
            for side, checkout in checkouts.items()
        }
        for turn in range(pairs + 1):
            for side, server in servers.items():
                server.stdin.write(f"{scratch / side / 'address.json'}\n")
                server.stdin.flush()
                while not (line := server.stdout.readline()).startswith("{"):
                    if not line:
                        sys.exit((scratch / "starts.log").read_text())
                if turn:  # the first fills vLLM's cache
                    turns[side].append(json.loads(line))
        for server in servers.values():
            server.communicate()
    return turns


def serve_starts() -> None:
    """Import an engine's packages, then start one for each line of standard input."""
    from parallel.engine.platform import process_environment

    os.environ.update(process_environment(False), OMP_NUM_THREADS="1")
    import grpo_workload  # noqa: F401  the model's settings, and not a part of a start

    import parallel.engine.preload  # noqa: F401

    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        began = time.monotonic()
        if (process := os.fork()) == 0:
            start_engine(Path(line.strip()))
        _, status, usage = os.wait4(process, 0)
        if status:
            sys.exit("an engine has not started")
        seconds = {"cpu_seconds": usage.ru_utime + usage.ru_stime}
        print(json.dumps({**seconds, "seconds": time.monotonic() - began}), flush=True)


def start_engine(address: Path) -> NoReturn:
    """Start an engine of size (a)'s model, up to its first token, and exit.

    The exit comes while the engine is held: vLLM 0.32 unfreezes all objects in an engine's shutdown
    and collects garbage four times, which is 1 s of processor time and not a part of a start.
    """
    from grpo_workload import WORKLOADS

    from parallel.engine.core import Core
    from parallel.settings import EngineJob, EngineSettings

    settings = EngineSettings(max_sequences=64, max_model_tokens=128)
    job = EngineJob(model=WORKLOADS["a"].model, engine=settings, seed=0, index=0, address=address)
    engine = Core(job)
    engine.prepare()
    os._exit(0)


def steps(checkouts: dict[str, Path], size: str, pairs: int, scratch: Path) -> Turns:
    """Return the steps of two runs, which take turns after their warm-up."""
    arguments = ["--size", size, "--placement", "own", "--engines", "1", "--steps", str(pairs + 1)]
    runs: dict[str, PausedRun] = {}
    try:
        for side, checkout in checkouts.items():
            directory = scratch / f"{size}-{side}"
            directory.mkdir()
            runs[side] = PausedRun(checkout, directory, arguments)
            runs[side].go(WARM_UP_STEPS)
        turns: Turns = {side: [] for side in runs}
        for _ in range(pairs):
            for side, run in runs.items():
                turns[side].append(run.step())
        return turns
    finally:
        for run in runs.values():
            run.end()


class PausedRun:
    """A run of `grpo_steps.py` of a checkout, stopped but for its turns."""

    def __init__(self, checkout: Path, directory: Path, arguments: list[str]) -> None:
        self._directory = directory
        self._log = directory / "log"
        script = str(checkout / "benchmarks" / "grpo_steps.py")
        with self._log.open("w") as log:
            self._process = python(
                checkout, script, *arguments, directory=directory, stdout=log, stderr=log
            )

    def go(self, lines: int) -> None:
        """Run until the log has this number of lines, then stop."""
        self._signal(signal.SIGCONT)
        while len(self._lines()) < lines:
            if self._process.poll() is not None:
                sys.exit(self._log.read_text())
            time.sleep(LOOK_SECONDS)
        self._signal(signal.SIGSTOP)

    def step(self) -> dict[str, float]:
        """Run one step; return its seconds, those of processors, and those of its phases."""
        done, cpu, began = len(self._lines()), self._cpu_seconds(), time.monotonic()
        self.go(done + 1)
        seconds = {"cpu_seconds": self._cpu_seconds() - cpu, "seconds": time.monotonic() - began}
        line = self._lines()[done]
        return {**seconds, **{phase: line[phase] for phase in PHASES}}

    def end(self) -> None:
        """End all of its processes."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _lines(self) -> list[dict[str, Any]]:
        pattern = "*/steps/stages/experts.chain_sum/metrics.jsonl"
        texts = [path.read_text() for path in self._directory.glob(pattern)]
        lines = "".join(texts).splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _signal(self, number: signal.Signals) -> None:
        for process in self._tree():
            try:
                os.kill(process, number)
            except ProcessLookupError:  # it has just ended
                continue

    def _cpu_seconds(self) -> float:
        fields = stat_fields()
        ticks = sum(int(tick) for each in self._tree() for tick in fields[each][CPU_FIELDS])
        return ticks / TICK

    def _tree(self) -> list[int]:
        """Return its process and all that descend from it, parents first."""
        parents = {process: int(fields[PARENT_FIELD]) for process, fields in stat_fields().items()}
        tree = [self._process.pid]
        for parent in tree:  # which grows meanwhile
            tree += [process for process, its_parent in parents.items() if its_parent == parent]
        return tree


def stat_fields() -> dict[int, list[str]]:
    """Return the fields of each process's /proc/PID/stat after its name."""
    fields = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    return fields


if __name__ == "__main__":
    main()
