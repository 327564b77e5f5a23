"""The GPUs that a process may use, as nvidia-smi prints them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parallel.errors import UserError
from parallel.machine import gpus
from parallel.machine.gpus import driver_error, type_error, visible_gpus, wait_for_memory
from tests.parallel.fake_nvidia_smi import GPU_LINES, put_nvidia_smi


def test_every_gpu_has_its_memory_and_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    put_nvidia_smi(monkeypatch, tmp_path)
    found = visible_gpus()
    assert [gpu.index for gpu in found] == [0, 1, 2, 3]
    assert found[1].free_bytes == 79999 << 20 and found[1].total_bytes == 81559 << 20
    assert found[0].driver == "580.65.06" and found[0].capability == "9.0"


@pytest.mark.parametrize(
    ("visible", "found"),
    [("2,0", [2, 0]), ("GPU-00000003", [3]), ("1,9,0", [1]), ("", []), ("1,1,0", [1])],
)
def test_the_visible_ones_are_chosen_as_cuda_chooses(
    visible: str, found: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_nvidia_smi(monkeypatch, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in visible_gpus()] == found


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == []


def test_a_driver_that_fails_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_nvidia_smi(monkeypatch, tmp_path, "Failed to initialize NVML: Driver mismatch", 18)
    with pytest.raises(UserError, match="Driver mismatch"):
        visible_gpus()
    put_nvidia_smi(monkeypatch, tmp_path, "something else")
    with pytest.raises(UserError, match="unexpected line"):
        visible_gpus()


@pytest.mark.parametrize("total", ["[N/A]", "[Insufficient Permissions]"])
def test_memory_that_the_driver_does_not_know_is_shown_as_it_printed_it(
    total: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on GPUs that share the host's memory, and on some slices."""
    put_nvidia_smi(monkeypatch, tmp_path, GPU_LINES.replace("81559", total))
    said = f"nvidia-smi: it printed {total} as memory.total of GPU 0, NVIDIA H100 80GB HBM3; "
    with pytest.raises(UserError, match=re.escape(said)):
        visible_gpus()


def test_a_driver_is_compared_with_the_cuda_major(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    put_nvidia_smi(monkeypatch, tmp_path, GPU_LINES.replace("580.65.06", "570.86.10"))
    gpus = visible_gpus()
    assert driver_error(gpus, 12) is None
    assert driver_error(gpus, 13) == (
        "driver 570.86.10 is too old for CUDA 13; update it to R580 or newer"
    )


def test_mixed_types_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    put_nvidia_smi(monkeypatch, tmp_path)
    assert type_error(visible_gpus()) is None
    other = "4, GPU-00000004, NVIDIA A100-SXM4-40GB, 40960, 40000, 580.65.06, 8.0"
    put_nvidia_smi(monkeypatch, tmp_path, f"{GPU_LINES}\n{other}")
    assert type_error(visible_gpus()) == (
        "GPUs of several types (NVIDIA H100 80GB HBM3 79 GiB: 0, 1, 2, 3 and NVIDIA "
        "A100-SXM4-40GB 40 GiB: 4); choose those of one type with CUDA_VISIBLE_DEVICES, or in a "
        "cluster's profile with gpu_type or constraint"
    )


def test_waiting_ends_when_every_gpu_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "POLL_SECONDS", 0.001)
    seen = iter([[1, 9], [9, 1], [9, 9]])
    assert wait_for_memory(lambda: next(seen), needed=5, seconds=60)
    assert not wait_for_memory(lambda: [4, 9], needed=5, seconds=0.01)
    assert wait_for_memory(list, needed=5, seconds=0)  # no GPU to wait for
