"""The GPU set is one set: of one CUDA, of the CPU's versions, and installed by one recipe."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.fake_nvidia_smi import GPU_LINES, put_nvidia_smi
from tests.repository.test_requirements import REPOSITORY, loaded
from tests.te_python import TE_PYTHON

LOCK = loaded("resolve")
CONTAINERS = REPOSITORY / "containers"
# Two of the mistakes that open ranges resolve to: the core of another CUDA, and another vLLM.
OPEN_RANGES = {"transformer-engine-cu12": "2.20.2", "vllm": "0.33.0"}


def test_the_pins_are_one_set() -> None:
    assert LOCK.contradictions(LOCK.gpu_pins(), LOCK.cpu_pins()) == []


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (OPEN_RANGES, ["CUDA majors differ: nvidia-cudnn-cu13", "vllm 0.33.0 is not the CPU's"]),
        ({"transformer-engine-cu12": "2.20.2"}, ["CUDA majors differ", "package, core and"]),
        ({"transformer-engine-torch": "2.19.0"}, ["package, core and extension differ"]),
        ({"torch": "2.14.0"}, ["torch 2.14.0 is not the CPU's torch"]),
    ],
    ids=["open ranges", "both cores", "extension", "torch"],
)
def test_a_contradiction_is_named(changed: dict[str, str], found: list[str]) -> None:
    pins = LOCK.gpu_pins()
    if changed is OPEN_RANGES:
        del pins["transformer-engine-cu13"]
    errors = LOCK.contradictions(pins | changed, LOCK.cpu_pins())
    assert len(errors) == len(found)
    for error, part in zip(errors, found, strict=True):
        assert part in error


def test_the_pins_are_within_the_ranges_of_the_package() -> None:
    from importlib import metadata

    from packaging.requirements import Requirement

    pins = LOCK.gpu_pins()
    for requirement in map(Requirement, metadata.requires("braid") or ()):
        if requirement.marker and requirement.marker.evaluate({"extra": "gpu"}):
            assert requirement.specifier.contains(pins[requirement.name]), requirement


def test_torch_for_a_cpu_is_the_gpu_sets() -> None:
    """The package index's build with its libraries, and the CPU build of the same version."""
    gpu = LOCK.gpu_pins()
    cuda = LOCK.pins((LOCK.FOLDER / "torch-cuda.txt").read_text())
    assert cuda == {name: gpu[name] for name in cuda} and "nvidia-cublas" in cuda
    cpu = LOCK.pins((LOCK.FOLDER / "torch-cpu.txt").read_text())
    assert cpu == {"torch": f"{gpu['torch']}+cpu"}
    other = LOCK.pins((LOCK.FOLDER / "cpu.txt").read_text())
    assert not [name for name in other if LOCK.CUDA_LIBRARY.match(name)]


def test_transformer_engines_python_is_that_of_the_gpu_set() -> None:
    pins, gpu = LOCK.pins((LOCK.FOLDER / "te-python.txt").read_text()), LOCK.gpu_pins()
    assert pins == {name: gpu[name] for name in pins} and "transformer-engine" in pins


def test_the_set_is_resolved_for_every_python_that_the_package_admits() -> None:
    setup = (REPOSITORY / "setup.py").read_text()
    assert 'python_requires=">=3.12,<3.14"' in setup
    assert set(LOCK.PYTHONS) == {"3.12", "3.13"}


def machine(*, driver: str | None, monkeypatch: pytest.MonkeyPatch, directory: Path) -> Any:
    if driver is None:
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
    else:
        put_nvidia_smi(monkeypatch, directory, GPU_LINES.replace("580.65.06", driver))
    return subprocess.run(
        [sys.executable, "requirements/gpu_machine.py"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("driver", "status", "says"),
    [
        (None, 0, "no GPU here; it needs driver R580 or newer"),
        ("580.65.06", 0, "4 x NVIDIA H100 80GB HBM3"),
        ("550.54.15", 1, "driver 550.54.15 is too old for CUDA 13; update it to R580 or newer"),
    ],
)
def test_a_driver_that_is_too_old_is_one_error_before_the_download(
    driver: str | None,
    status: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ended = machine(driver=driver, monkeypatch=monkeypatch, directory=tmp_path)
    assert ended.returncode == status, ended.stderr
    assert says in ended.stdout + ended.stderr


def steps(recipe: str) -> str:
    """Return the shell of a container's recipe that runs in the image."""
    text = (CONTAINERS / recipe).read_text().replace("\\\n", " ")
    if recipe == "Dockerfile":
        return "\n".join(re.findall(r"^RUN (.*)$", text, re.MULTILINE))
    [post] = re.findall(r"^%post\n(.*?)^%", text, re.MULTILINE | re.DOTALL)
    return post


def copied(recipe: str) -> list[str]:
    """Return what a recipe copies from the repository."""
    text = (CONTAINERS / recipe).read_text()
    if recipe == "Dockerfile":
        return [
            source
            for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE)
            for source in line.split()[:-1]
        ]
    [files] = re.findall(r"^%files\n(.*?)^%", text, re.MULTILINE | re.DOTALL)
    return [line.split()[0] for line in files.splitlines() if line.strip()]


@pytest.mark.parametrize("recipe", ["Dockerfile", "braid.def"])
def test_a_container_is_built_by_the_makefiles_own_steps(recipe: str) -> None:
    shell = steps(recipe)
    subprocess.run(["bash", "-n"], input=shell, text=True, check=True)
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    called = re.findall(r"^\s*make ([a-z-]+)", shell, re.MULTILINE)
    assert "install-gpu" in called and set(called) <= set(targets)
    assert not re.search(r"(pip|uv) .*install", shell), "the packages are those of requirements/"
    assert copied(recipe)
    for source in copied(recipe):
        assert (REPOSITORY / source).exists(), source
    needed = {"Makefile", "setup.py", "requirements", "parallel", "stages", "pipeline"}
    assert needed <= {source.rstrip("/") for source in copied(recipe)}


def test_both_containers_have_one_base_of_the_sets_cuda() -> None:
    [docker] = re.findall(r"^FROM (\S+)", (CONTAINERS / "Dockerfile").read_text(), re.MULTILINE)
    [apptainer] = re.findall(r"^From: (\S+)", (CONTAINERS / "braid.def").read_text(), re.MULTILINE)
    named = re.fullmatch(r"(nvidia/cuda):13\.\S+-devel-ubuntu24\.04(@sha256:[0-9a-f]{64})", docker)
    assert named is not None, "a tag can be given to another image"
    assert apptainer == named[1] + named[2]  # Apptainer refuses a tag beside a digest


def test_tests_have_transformer_engines_python_beside_the_environment() -> None:
    assert str(TE_PYTHON) not in sys.path
