"""Some cases of `make fuzz`, and the failures that its watchdog detects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from pipeline import cli
from pipeline.commands.support import starting
from pipeline.config.validate import load
from tests.tiers import tiered

from . import __main__ as fuzz
from . import configs, run_directories, worker
from .worker import REPOSITORY, FuzzStep, run


@pytest.mark.parametrize(
    ("config_cases", "run_cases", "report_cases"),
    tiered([(100, 20, 8), (250, 50, 20)], [(100, 20, 8)]),
)
def test_some_cases_of_make_fuzz_pass(config_cases: int, run_cases: int, report_cases: int) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--json", "--configs", str(config_cases)]
    command += ["--runs", str(run_cases), "--reports", str(report_cases)]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr.count("FAILURE ")) == (0, 0), found.stderr
    report = json.loads(found.stdout)
    assert (report["configs"]["cases"], report["runs"]["cases"]) == (config_cases, run_cases)
    # Else the fuzzer only reaches the first check.
    assert report["configs"]["outcomes"]["run: accepted"] > config_cases / 10
    assert report["runs"]["outcomes"]["why: exit code 0"] > run_cases / 2
    assert report["reports"]["outcomes"]["report: exit code 0"] > report_cases / 2


def faulty(number: int) -> Iterator[FuzzStep]:
    """Yield the steps of a case: each kind of failure, among passing ones."""
    yield FuzzStep("first", "accepted")
    if number == 1:
        time.sleep(600)
    if number == 2:
        os._exit(9)
    if number == 3:
        bytearray(2 * worker.MEMORY_BYTES)
    if number == 4:
        load(Path("nowhere.yaml"), 7)  # type: ignore[arg-type]
    if number == 5:
        while True:
            pass
    yield FuzzStep("second", "accepted")


def test_hangs_deaths_and_tracebacks_are_reported_and_other_cases_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "STEP_SECONDS", 0.5)
    monkeypatch.setattr(worker, "BLOCKED_SECONDS", 1.0)
    found = [(number, step.name, step.verdict) for number, step in run(faulty, range(7))]
    passing = {(number, name, "accepted") for number in (0, 6) for name in ("first", "second")}
    assert set(found) == passing | {(number, "first", "accepted") for number in range(7)} | {
        (1, "after first", "hang"),
        (2, "after first", "death"),
        (3, "case", "traceback"),
        (4, "case", "traceback"),
        (5, "after first", "hang"),
    }


def test_a_case_depends_only_on_its_number_and_the_seed() -> None:
    one, same, other = (configs.generate(Random(f"configs {seed} 7")) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_a_changed_file_is_detected(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("x")
    before = run_directories.snapshot(tmp_path)
    assert run_directories.snapshot(tmp_path) == before
    os.utime(file, ns=(0, 0))
    assert run_directories.snapshot(tmp_path) != before


@pytest.mark.parametrize(
    "verdict", ["accepted", "traceback", "hang", "unclear", "control", "changed", "difference"]
)
def test_every_failure_fails_the_fuzzer(verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cases(*_: object) -> Callable[[int], Iterator[FuzzStep]]:
        return lambda number: iter([FuzzStep("a", verdict)])

    monkeypatch.setattr(sys, "argv", ["fuzz", "--configs", "1", "--runs", "0"])
    monkeypatch.setitem(fuzz.FUZZERS, "configs", cases)
    assert fuzz.main() == (verdict != "accepted")


def test_a_command_that_changes_a_run_is_detected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def careless(command: list[str], runs: Path) -> FuzzStep:
        (runs / "damaged" / "left").touch()
        return FuzzStep(command[0], "exit code 0")

    # Cases expect a process to themselves: what they replace is restored after the test.
    monkeypatch.setattr(cli, "command_parser", cli.command_parser)
    monkeypatch.setattr(starting, "PROGRAMS", starting.PROGRAMS)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(run_directories, "ask", careless)
    first, *_ = run_directories.cases(0, tmp_path)(0)
    assert first.verdict == "changed"
