"""The GPU lane on a CPU: what is wrong fails it, and what is missing is skipped."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import bundle, part
from tests.gpu.__main__ import PARTS
from tests.gpu.findings import Finding, PartResult, read, write
from tests.gpu.part import Lane

REPOSITORY = Path(__file__).parents[2]
CPU = Lane("cpu", small=True)


def test_every_part_runs_and_nothing_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu", "all", "--device", "cpu"]
    found = subprocess.run(
        [*command, "--small", "--together", "--seconds", "600", "--out", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    results = read(tmp_path / "gpu.json")
    assert [each.part for each in results] == list(PARTS["all"])
    assert not [each for each in results if each.skipped or each.wrong], found.stdout
    assert found.returncode == 0
    assert (tmp_path / "gpu.txt").read_text() == found.stdout
    bounded = {each.part for each in results if any(f.bound is not None for f in each.findings)}
    assert bounded == {"losses", "parity", "refit", "determinism"}


@pytest.mark.parametrize(("value", "wrong"), [(1.0, False), (1.1, True), (math.nan, True)])
def test_a_number_beyond_its_bound_is_wrong(value: float, wrong: bool) -> None:
    result = PartResult("losses", (Finding("a", value, "nats", bound=1.0), Finding("b", 9.0)))
    assert result.wrong is wrong
    assert ("WRONG" in result.table) is wrong


def test_what_is_missing_is_a_reason_to_skip_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(part.MODULES, "losses", "no_such_package.losses")
    found = part.run("losses", CPU)
    assert not found.wrong
    assert "no_such_package" in found.skipped and "make gpu-bundle" in found.skipped


@pytest.mark.parametrize("name", ["losses", "parity", "refit", "determinism", "model_speed"])
def test_without_megatron_core_a_part_is_skipped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    for module in [each for each in sys.modules if each.startswith("megatron.")]:
        monkeypatch.delitem(sys.modules, module)
    found = part.run(name, CPU)
    assert not found.failed
    assert "megatron" in found.skipped


def test_without_a_gpu_a_part_is_skipped() -> None:
    found = part.run("losses", Lane("cuda", small=True))
    assert found.skipped == "torch finds no CUDA device"


def test_an_error_fails_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(lane: Lane) -> list[Finding]:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("tests.gpu.losses.losses", broken)
    found = part.run("losses", CPU)
    assert found.wrong and found.failed == "ZeroDivisionError: by zero"


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    results = [
        PartResult("losses", (Finding("a", 1.0, "s", 2.0), Finding("b", "c")), 3.0),
        PartResult("refit", skipped="no"),
    ]
    write(tmp_path / "gpu.json", results)
    assert read(tmp_path / "gpu.json") == results
    assert json.loads((tmp_path / "gpu.json").read_text())[1]["skipped"] == "no"


def test_the_bundle_has_the_pinned_and_hashed_versions_of_the_cpu_environment() -> None:
    found = list(bundle.requirements())
    assert len(found) == len(bundle.PACKAGES)
    assert all("==" in each and "--hash=sha256:" in each for each in found)


@pytest.mark.parametrize("target", ["gpu-check", "gpu-bench"])
def test_make_takes_the_gpu_environment_or_the_bundle(target: str) -> None:
    """Neither target builds an environment: a machine with a GPU may have no registry."""
    text = (REPOSITORY / "Makefile").read_text()
    [rule] = [line for line in text.splitlines() if line.startswith(f"{target}:")]
    assert rule.partition("##")[0] == f"{target}:  "
    assert f"$(GPU_PYTHON) -m tests.gpu {target.removeprefix('gpu-')}" in text
