"""A task of a Slurm step gets its GPUs, caches and cores, whatever srun passed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.errors import UserError
from parallel.machine import on_gpus
from parallel.machine.on_gpus import CACHES, cache_environment, cores_near
from tests.parallel.test_gpus import put_nvidia_smi
from tests.parallel.test_slots import gpus

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


def task(
    slots: str, caches: str = "", code: int = 0, **environment: str
) -> tuple[dict[str, str], str]:
    """Run a program as `on_gpus` would; return its environment and everything printed."""
    command = [sys.executable, "-m", "parallel.machine.on_gpus", slots, caches, "-c", SHOW]
    found = subprocess.run(
        command,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": os.environ["PYTHONPATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == code, found.stderr
    return json.loads(found.stdout) if code == 0 else {}, found.stdout


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(on_gpus.__file__).parents[1]))


def test_an_engine_sees_its_slots_first_and_a_rank_all_gpus() -> None:
    step = {"CUDA_VISIBLE_DEVICES": "2,3,6,7", "SLURM_LOCALID": "1"}
    engine, _ = task("2,3", **step)
    assert engine["CUDA_VISIBLE_DEVICES"] == "6,7,2,3"  # the others for a refit by mapped memory
    assert engine["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    rank, _ = task("rank", **step)
    assert rank["CUDA_VISIBLE_DEVICES"] == "2,3,6,7"
    unmanaged, _ = task("4,5")
    assert unmanaged["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_a_slot_that_the_node_lacks_is_one_line_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, said = task("2", code=1, CUDA_VISIBLE_DEVICES="0,1")
    assert said.startswith("braid-error: CUDA_VISIBLE_DEVICES=0,1: 2 GPUs are visible, and the")
    put_nvidia_smi(monkeypatch, tmp_path)  # of four
    path = os.environ["PATH"]
    _, said = task("4", code=1, PATH=path)
    assert " has 4 visible GPUs, and this task needs 5; " in said
    _, said = task("rank", code=1, PATH=path, SLURM_LOCALID="6")
    assert " has 4 visible GPUs, and this task needs 7; " in said


def test_a_task_on_gpus_needs_a_torch_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(monkeypatch, tmp_path)
    bound = {"PATH": os.environ["PATH"], "SLURM_LOCALID": "6", "CUDA_VISIBLE_DEVICES": "3"}
    source = os.environ["PYTHONPATH"]
    for version, code in (("2.13.0+cpu", 1), ("2.13.0+cu130", 0), ("2.13.0", 0)):
        installed = tmp_path / version / f"torch-{version}.dist-info"
        installed.mkdir(parents=True)
        (installed / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
        vllm = installed.with_name("vllm-0.32.0.dist-info")
        vllm.mkdir()
        (vllm / "METADATA").write_text("Name: vllm\nVersion: 0.32.0\n")
        monkeypatch.setenv("PYTHONPATH", f"{installed.parent}:{source}")
        _, said = task("rank", code=code, **bound)
        error = "has packages for CPUs, and this task is to run on GPUs; submit from the env"
        assert (error in said) == (code == 1)


def test_compiled_kernels_stay_on_the_node(tmp_path: Path) -> None:
    caches = tmp_path / "braid-0"
    found, _ = task("0", str(caches), VLLM_CACHE_ROOT="/mine")
    assert found["TRITON_CACHE_DIR"] == f"{caches}/triton"
    assert found["VLLM_CACHE_ROOT"] == "/mine"  # the cluster's `setup` chose
    assert caches.stat().st_mode & 0o777 == 0o700
    assert set(cache_environment(caches)) == set(CACHES)
    assert "TRITON_CACHE_DIR" not in task("0")[0]


def test_a_cache_that_others_may_write_is_refused(tmp_path: Path) -> None:
    caches = tmp_path / "braid-0"
    caches.mkdir()
    caches.chmod(0o777)
    with pytest.raises(UserError, match=r"local_directory: .*braid-0 is writable by others"):
        cache_environment(caches)
    caches.rmdir()
    caches.symlink_to(tmp_path)
    with pytest.raises(UserError, match=r"local_directory: .* is not a directory of this user"):
        cache_environment(caches)


def test_the_cores_near_a_gpu_are_those_of_its_numa_node(tmp_path: Path) -> None:
    driver, devices = tmp_path / "driver", tmp_path / "devices"
    [*mine] = sorted(os.sched_getaffinity(0))
    for number, listed in enumerate((f"{mine[0]}", f"{mine[-1]}-9999")):
        address = f"0000:1{number}:00.0"
        (driver / address).mkdir(parents=True)
        information = f"Model: \t\t H100\nGPU UUID: \t GPU-{number}\n"
        (driver / address / "information").write_text(information)
        (devices / address).mkdir(parents=True)
        (devices / address / "local_cpulist").write_text(listed + "\n")
    first, second = gpus(2)
    assert cores_near([first], driver, devices) == {mine[0]}
    assert cores_near([second], driver, devices) == {mine[-1]}
    assert cores_near([first, second], driver, devices) == {mine[0], mine[-1]}
    assert cores_near([], driver, devices) == set()
    assert cores_near([first], tmp_path / "no driver", devices) == set()


@pytest.mark.parametrize(
    ("slots", "visible", "near"), [("1,2", 4, {1, 2}), ("rank", 4, {3}), ("rank", 1, {0})]
)
def test_a_task_runs_on_the_cores_near_its_own_gpus_alone(
    slots: str, visible: int, near: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs that it only maps the memory of do not count; a number stands for a GPU's core."""
    bound: list[tuple[int, set[int]]] = []
    started: list[list[str]] = []
    seen = {"SLURM_LOCALID": "3", "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(visible)))}
    monkeypatch.setattr(os, "environ", {**os.environ, **seen})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *given: bound.append(given))
    monkeypatch.setattr(os, "execv", lambda _, arguments: started.append(arguments))
    monkeypatch.setattr(sys, "argv", ["on_gpus", slots, "", "-m", "server"])
    monkeypatch.setattr(on_gpus, "visible_gpus", lambda: gpus(visible))
    monkeypatch.setattr(on_gpus, "built_for_cpu", lambda: False)
    monkeypatch.setattr(on_gpus, "cores_near", lambda found: {each.index for each in found})
    on_gpus.main()
    assert bound == [(0, near)]
    assert started == [[sys.executable, "-m", "server"]]
