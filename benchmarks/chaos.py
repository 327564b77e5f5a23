"""The kill matrix: processes killed by kill -9 at random moments, and the same bits in the end.

    python benchmarks/chaos.py [CONFIG] [--cases 50] [--kills 5] [--seed 0] [--reference RUN]
                               [--results FILE]

One deterministic run of a configuration (tests/end_to_end/chaos.yaml, which is short, or for
example configs/recipes/r1-small.yaml) is watched and left undisturbed: the reference; --reference
names one that has ended. Then further runs of the same configuration are killed `--kills` times
each, at moments drawn from its timeline: in turn the launcher, each rank, the engine, a reward
worker and the process that starts the workers. A run that a kill ended is resumed, and killed
again. What every stage of every run left is compared with the reference's, bit for bit: the tensors
of the final checkpoint, collected samples, results, the export.

Several kills a run, since one that is killed while it recovers from the last kill has to be right
as well, and since a wrong bit never gets right again; `--kills 1` is a run for every kill. Run R
of seed S is the first run of seed S + R, as far as the references' timelines agree. Exits 1 unless
all `--cases` cases gave the same bits. Writes benchmarks/kills/NAME.json, NAME being the
configuration's, or the file that --results names.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import measured

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.end_to_end.killed_run import Kill, KilledRun, Unclean
from tests.end_to_end.moments import Timeline, draw, recorded, watch
from tests.end_to_end.process_tree import KILLED
from tests.end_to_end.same_bits import digests, outputs
from tests.runs import REPOSITORY, braid

CONFIG = REPOSITORY / "tests" / "end_to_end" / "chaos.yaml"
RESULTS = Path(__file__).parent / "kills"
NAME = "chaos"
FEWEST_STRETCHES = 5  # in which a process that can be aimed at was seen


@dataclass(frozen=True)
class BaselineRun:
    """The run that was left alone."""

    timeline: Timeline
    seconds: float
    stages: list[str]  # in the order in which they started
    bits: dict[str, str | None]

    @property
    def processes(self) -> list[str]:
        """The kinds of process that it had, without those that an engine starts for a moment."""
        seen = Counter(name for stretch in self.timeline for name in stretch.processes)
        return [name for name in KILLED if seen[name] >= FEWEST_STRETCHES]


@dataclass
class Case:
    """A run that was killed; `fault` says what differs from the reference."""

    seed: int
    kills: list[Kill] = field(default_factory=list)
    seconds: float = 0.0
    fault: str | None = None


def words(config: Path) -> list[str]:
    """Return the arguments of `braid run` and `braid submit`."""
    return [str(config.absolute()), "deterministic=true", "--name", NAME]


def left_by(run: Path) -> dict[str, str | None]:
    """Return the digest of what each stage left."""
    return {**outputs(run), **digests(run)}


def reference_run(directory: Path, config: Path) -> BaselineRun:
    """Run the reference and return it.

    Raises:
        SystemExit: the run fails though nothing is killed.
    """
    directory.mkdir()
    started, log = time.monotonic(), directory / "braid.log"
    launched = braid(directory, "run", *words(config), log=log)
    try:
        timeline = watch(directory / NAME, launched)
    finally:
        launched.terminate()
    if launched.wait() != 0:
        sys.exit(log.read_text())
    return baseline(directory / NAME, time.monotonic() - started, timeline)


def compared_with(arguments: argparse.Namespace, directory: Path) -> BaselineRun:
    """Return the run that was left alone, which runs in `directory` unless one is named."""
    if (named := arguments.reference) is None:
        print("the reference run", flush=True)
        return reference_run(directory, arguments.config)
    timeline = recorded(named)
    return baseline(named, sum(each.seconds for each in timeline), timeline)


def baseline(run: Path, seconds: float, timeline: Timeline) -> BaselineRun:
    """Return a finished run as the one to compare with."""
    events = map(json.loads, (run / "ledger.jsonl").read_text().splitlines())
    begun = [event["stage"] for event in events if event["state"] == "running"]
    return BaselineRun(timeline, seconds, list(dict.fromkeys(begun)), left_by(run))


def killed(directory: Path, config: Path, reference: BaselineRun, seed: int, kills: int) -> Case:
    """Kill a run `kills` times, resume it, and compare it with the reference."""
    names = reference.processes
    turns = [names[(seed * kills + turn) % len(names)] for turn in range(kills)]
    moments = draw(reference.timeline, turns, random.Random(seed))
    case, started = Case(seed), time.monotonic()
    run = KilledRun(directory, NAME, ["run", *words(config)], ["resume", NAME])
    try:
        for moment in moments:
            run.kill(moment, reference.stages)
        run.finish()
        case.fault = difference(reference, run.path)
    except Unclean as error:
        case.fault = str(error)
    finally:
        run.close()
    case.kills, case.seconds = run.kills, time.monotonic() - started
    return case


def difference(reference: BaselineRun, run: Path) -> str | None:
    """Return which outputs differ from the reference's; None where none does."""
    found = left_by(run)
    names = sorted(reference.bits.keys() | found.keys())
    other = [
        name for name in names if found.get(name) is None or reference.bits.get(name) != found[name]
    ]
    return f"other bits in {', '.join(other)}" if other else None


def cases(arguments: argparse.Namespace, reference: BaselineRun, directory: Path) -> Iterator[Case]:
    """Yield runs until enough was killed, or until there is no time for another one."""
    ends = time.monotonic() + 60 * arguments.minutes
    done, longest, number = 0, reference.seconds, 0
    while done < arguments.cases and time.monotonic() + longest < ends:
        kills = min(arguments.kills, arguments.cases - done)
        seed = arguments.seed + number
        case = killed(directory / str(number), arguments.config, reference, seed, kills)
        done, longest, number = done + len(case.kills), max(longest, case.seconds), number + 1
        yield case


def tell(case: Case) -> None:
    """A line for each kill, and one for the run."""
    for kill in case.kills:
        stage, step, attempt = kill.at
        print(
            f"  seed {case.seed}  {kill.seconds:5.0f} s  {kill.moment.process:14}  {kill.outcome:7}"
            f"  {stage}, attempt {attempt}, after step {step}"
        )
    verdict = "bit-identical" if case.fault is None else case.fault
    print(f"seed {case.seed}: {len(case.kills)} kills, {case.seconds:.0f} s: {verdict}", flush=True)


def summary(reference: BaselineRun, done: list[Case]) -> dict[str, Any]:
    """By process: how often it was killed, what became of the run, and how often all was right."""
    found = {}
    for name in reference.processes:
        kills = [
            (kill, case) for case in done for kill in case.kills if kill.moment.process == name
        ]
        found[name] = {
            "kills": len(kills),
            "continued": sum(kill.outcome == "continued" for kill, _ in kills),
            "resumed": sum(kill.outcome == "resumed" for kill, _ in kills),
            "bit_identical": sum(case.fault is None for _, case in kills),
        }
    return found


def document(reference: BaselineRun, done: list[Case]) -> dict[str, Any]:
    """All that was found, as JSON."""
    listed = [
        {
            "seed": case.seed,
            "process": kill.moment.process,
            "stage": kill.at.stage,
            "step": kill.at.step,
            "attempt": kill.at.attempt,
            "outcome": kill.outcome,
            "seconds": round(kill.seconds, 1),
            "bit_identical": case.fault is None,
        }
        for case in done
        for kill in case.kills
    ]
    return {
        **measured(),
        "seconds_undisturbed": round(reference.seconds, 1),
        "seconds_of_each_run": [round(case.seconds, 1) for case in done],
        "by_process": summary(reference, done),
        "faults": [f"seed {case.seed}: {case.fault}" for case in done if case.fault],
        "kills": listed,
    }


def main() -> None:
    """Kill, print, write, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, nargs="?", default=CONFIG)
    parser.add_argument("--reference", type=Path, help="a finished deterministic run of CONFIG")
    parser.add_argument("--cases", type=int, default=50, help="kills in all")
    parser.add_argument("--kills", type=int, default=5, help="of one run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60, help="after which no run is begun")
    parser.add_argument("--results", type=Path, help="default: benchmarks/kills/CONFIG.json")
    arguments = parser.parse_args()
    results = arguments.results or RESULTS / f"{arguments.config.stem}.json"
    results.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and leave nothing running
    with tempfile.TemporaryDirectory() as folder:
        reference = compared_with(arguments, Path(folder) / "reference")
        print(f"{reference.seconds:.0f} s; processes: {', '.join(reference.processes)}", flush=True)
        done = []
        for case in cases(arguments, reference, Path(folder)):
            tell(case)
            done.append(case)
            found = document(reference, done)
            results.write_text(json.dumps(found, indent=1) + "\n")
    if not done:
        sys.exit("there was no time for a run")
    print(json.dumps(found["by_process"], indent=1))
    same = sum(kill["bit_identical"] for kill in found["kills"])
    print(f"{same} of {len(found['kills'])} bit-identical, {arguments.cases} asked for")
    sys.exit(0 if same == len(found["kills"]) == arguments.cases else 1)


if __name__ == "__main__":
    main()
