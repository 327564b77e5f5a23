"""Fuzzers of Braid's inputs: configurations and damaged run directories.

configs: damaged copies of configs/ through load, load_domain or load_cluster, the graph, the memory
report and the resolved run.yaml. Each is accepted, and its run.yaml loads as equal settings, or
raises a ConfigError in which every line names a file or a key.

runs: damaged copies of run directories through status, plan, why, diff and logs. Each command ends
with exit code 0, or with a message that begins with `braid:`, and changes no file.

reports: damaged copies of a run with samples, through report, look, compare and bundle, likewise.

Failures are: another exception, a step of 5 s CPU time or 20 s asleep, 3 GiB more memory than at
the start, a changed file, a control character in a message. A case depends only on its number and
the seed, and each failure prints the command that repeats it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import Counter
from pathlib import Path
from typing import Any

from . import configs, reported_runs, run_directories
from .worker import Case, FuzzStep, run

FUZZERS = {
    "configs": configs.cases,
    "runs": run_directories.cases,
    "reports": reported_runs.cases,
}
PROGRESS_SECONDS = 10.0
SHOWN = 3  # failures printed per cause; the others are only counted


def main() -> int:
    arguments = _arguments()
    if arguments.case:
        return _repeat(arguments)
    reports = {}
    for name in FUZZERS:
        if not (count := getattr(arguments, name)):
            continue
        with tempfile.TemporaryDirectory(prefix="braid-fuzz-") as folder:
            case = FUZZERS[name](arguments.seed, Path(folder))
            reports[name] = _Report(name, arguments, count).of(case)
    if arguments.json:
        print(json.dumps({"seed": arguments.seed, **reports}, indent=2))
    return int(any(report["failures"] for report in reports.values()))


class _Report:
    """The counted outcomes of one fuzzer, and its failures by cause."""

    def __init__(self, name: str, arguments: Namespace, count: int) -> None:
        self.name, self.seed, self.count = name, arguments.seed, count
        self.out = sys.stderr if arguments.json else sys.stdout
        self.counts: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []

    def of(self, case: Case) -> dict[str, Any]:
        """Run all cases. Return the report for JSON."""
        started = shown = time.monotonic()
        for number, step in run(case, range(self.count)):
            self.counts[f"{step.name}: {step.verdict}"] += 1
            if step.failed:
                self._fail(number, step)
            if time.monotonic() - shown > PROGRESS_SECONDS:
                shown = time.monotonic()
                self._say(f"{self.name} {number}/{self.count}, {len(self.failures)} failures")
        seconds = time.monotonic() - started
        pace = self.count / max(seconds, 1e-9)
        self._say(f"{self.name}: {self.count} cases in {seconds:.0f} s, {pace:.1f} a second")
        for outcome, count in sorted(self.counts.items()):
            self._say(f"  {count:6} {outcome}")
        for cause, count in self.causes.most_common():
            self._say(f"  {count:6} FAILURES: {cause}")
        return {
            "cases": self.count,
            "seconds": round(seconds, 1),
            "outcomes": self.counts,
            "failures": self.failures,
        }

    def _fail(self, number: int, step: FuzzStep) -> None:
        cause = f"{step.verdict}: {step.where}"
        self.causes[cause] += 1
        command = f"python -m tests.fuzz --seed {self.seed} --case {self.name}/{number}"
        self.failures.append({"case": number, "step": step.name, "cause": cause, "repeat": command})
        if self.causes[cause] <= SHOWN:
            last = step.detail.strip().splitlines()[-1:]
            self._say(f"FAILURE {self.name} case {number}, {step.name}: {cause}")
            self._say("\n".join([f"  {line[:300]}" for line in last] + [f"  repeat: {command}"]))

    def _say(self, text: str) -> None:
        print(text.encode(errors="backslashreplace").decode(), file=self.out, flush=True)


def _repeat(arguments: Namespace) -> int:
    """Run one case with full output, and keep its files."""
    name, _, number = arguments.case.partition("/")
    folder = Path(tempfile.mkdtemp(prefix="braid-fuzz-"))
    failed = False
    for _, step in run(FUZZERS[name](arguments.seed, folder, keep=True), [int(number)]):
        print(f"{step.name}: {step.verdict} {step.where}\n{step.detail}")
        failed = failed or step.failed
    print(f"files: {folder}")
    return int(failed)


def _arguments() -> Namespace:
    assert __doc__
    parser = ArgumentParser(
        "python -m tests.fuzz", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", type=int, default=0, metavar="N", help="configurations to try")
    parser.add_argument("--runs", type=int, default=0, metavar="N", help="run directories to try")
    parser.add_argument("--reports", type=int, default=0, metavar="N", help="recorded runs to try")
    parser.add_argument("--seed", type=int, default=0, help="seed of all cases")
    parser.add_argument(
        "--case", metavar="FUZZER/K", help="run this case alone, such as configs/17"
    )
    parser.add_argument("--json", action="store_true", help="print a report as JSON")
    arguments = parser.parse_args()
    name, _, number = (arguments.case or "configs/0").partition("/")
    if name not in FUZZERS or not number.isdecimal():
        parser.error("--case should be configs/K, runs/K or reports/K")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
