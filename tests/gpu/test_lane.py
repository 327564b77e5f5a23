"""The GPU lane on a CPU: what is wrong fails it, and what is missing is skipped."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import bundle, part
from tests.gpu.__main__ import NOTHING_RAN, PARTS, exit_status, search_path, summary
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
    assert found.skipped == (
        "No module named 'no_such_package'; install no_such_package for this Python"
    )


@pytest.mark.parametrize(
    ("module", "fix"),
    [
        ("torch", "install torch with CUDA for this Python; the bundle has none"),
        ("transformers.models", "install transformers for this Python"),
        ("msgspec._core", "`make gpu-bundle` packs msgspec"),
    ],
)
def test_the_fix_is_for_the_package_that_is_missing(module: str, fix: str) -> None:
    missing = ModuleNotFoundError(f"No module named {module!r}", name=module)
    assert part.fix(missing, None) == fix


def test_a_library_that_torch_cannot_load_is_no_missing_package() -> None:
    assert part.fix(ImportError("libcudart.so.13: cannot open"), None) == "fix the installation"


HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def _bundle(directory: Path, version: str | None) -> Path:
    """Return an empty bundle that was packed for a version of Python."""
    directory.mkdir()
    if version:
        (directory / bundle.VERSION_FILE).write_text(f"{version}\n")
    return directory


def test_a_bundle_for_another_python_is_named_and_not_used(tmp_path: Path) -> None:
    other, old = _bundle(tmp_path / "other", "3.2"), _bundle(tmp_path / "old", None)
    why = f"the bundle {other} is for Python 3.2, this is {HERE}"
    assert bundle.unusable(other).startswith(f"{why}; ")
    assert "pack it again" in bundle.unusable(old)
    assert "make gpu-bundle" in bundle.unusable(tmp_path / "none")
    missing = ModuleNotFoundError("No module named 'msgspec._core'", name="msgspec._core")
    assert part.fix(missing, other).startswith(why)
    path = f"{other}:/kept"  # as docs/gpu.md once said to set PYTHONPATH
    assert search_path(other, path) == "/kept"


def test_a_bundle_for_this_python_comes_first_on_the_path(tmp_path: Path) -> None:
    fits = _bundle(tmp_path / "fits", HERE)
    assert bundle.unusable(fits) == ""
    assert search_path(fits, "/kept") == f"{fits}:/kept"
    assert search_path(None, "") == ""


def test_where_every_part_is_skipped_the_lane_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [
        PartResult("machine", (Finding("python", HERE),)),
        PartResult("losses", skipped="no"),
        PartResult("refit", skipped="no"),
    ]
    assert exit_status(results) == NOTHING_RAN == 3
    assert summary(results) == "0 of 2 parts ran"
    ran = [*results, PartResult("parity")]
    assert (exit_status(ran), summary(ran)) == (0, "1 of 3 parts ran")
    wrong = [*ran, PartResult("determinism", failed="by zero")]
    assert (exit_status(wrong), summary(wrong)) == (1, "2 of 4 parts ran")


def test_the_last_line_says_how_many_parts_ran(tmp_path: Path) -> None:
    """With no time for any part: the same process, exit status and files as on a GPU."""
    command = [sys.executable, "-m", "tests.gpu", "check", "--seconds", "0", "--out", str(tmp_path)]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert found.stdout.splitlines()[-1] == "0 of 4 parts ran"
    assert found.returncode == NOTHING_RAN


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
    assert f"$(GPU_PYTHON) -m tests.gpu {target.removeprefix('gpu-')} $(GPU_PACKAGES)" in text


def test_make_prepends_no_bundle_unseen(tmp_path: Path) -> None:
    """The lane compares its Python with the bundle's; PYTHONPATH would be set before it can."""
    command = ["make", "--dry-run", "gpu-check", f"GPU_VENV={tmp_path}", "GPU_BUNDLE=packed"]
    shown = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "python3 -m tests.gpu check --bundle packed" in shown.stdout
    assert "PYTHONPATH" not in shown.stdout
