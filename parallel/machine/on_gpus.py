"""A Python program on its GPUs and the CPU cores near them.

    python -m parallel.machine.on_gpus SLOTS CACHES ARGUMENT...

becomes `python ARGUMENT...`. SLOTS are an engine's, such as `4,5`, which become the first that it
sees, or `rank`, which leaves the order: ranks choose by LOCAL_RANK. CACHES is the directory of
compiled kernels; "" leaves them where each program keeps them.

In a Slurm step the GPUs are chosen here, behind srun: slurmstepd overwrites CUDA_VISIBLE_DEVICES
for every task of a step with GPUs, and names them as the node does, or from 0 where its cgroups
hide the others. Slots are positions in what it says.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from parallel.errors import UserError, report_error
from parallel.machine.gpus import Gpu, built_for_cpu, visible_gpus
from parallel.machine.slots import ORDER, VISIBLE, check_gpu_count, gpu_environment, own_first

RANK = "rank"  # slots of a rank: all GPUs are visible, and LOCAL_RANK chooses
DRIVER = Path("/proc/driver/nvidia/gpus")  # a directory per GPU, named after its PCI address
DEVICES = Path("/sys/bus/pci/devices")
# Where programs keep kernels that they compiled: by default in the home, which all nodes share.
# Hundreds of processes would write one directory of a network file system at once.
CACHES = {
    "CUDA_CACHE_PATH": "cuda",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    # megatron-core compiles an extension for `layout.recompute_modules`, under a lock that a killed
    # rank leaves behind (torch/utils/file_baton.py); on the node's disk it holds up no other node.
    "TORCH_EXTENSIONS_DIR": "extensions",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
}


def main() -> None:
    """Become the program of argv; a GPU that is missing is one error message."""
    which, caches, *arguments = sys.argv[1:]
    try:
        gpus = visible_gpus()
        slots = slots_of(which, len(gpus))
        check_gpu_count(gpus, max(slots) + 1, socket.gethostname(), "this task needs")
        if gpus and built_for_cpu():
            raise UserError(
                f"{sys.executable} has packages for CPUs, and this task is to run on GPUs; submit "
                "from the environment of `make install-gpu`, or set gpus_per_node: 0"
            )
        gpu_variables = ORDER if which == RANK else _environment_of_engine(slots, len(gpus))
        cache_variables = cache_environment(Path(caches)) if caches else {}
    except UserError as error:
        report_error(str(error))
        sys.exit(1)
    # `setup` may have chosen other caches.
    os.environ.update({**cache_variables, **os.environ, **gpu_variables})
    if cores := cores_near([gpus[slot] for slot in slots] if gpus else []):
        os.sched_setaffinity(0, cores)
    os.execv(sys.executable, [sys.executable, *arguments])


def _environment_of_engine(slots: Sequence[int], gpu_count: int) -> dict[str, str]:
    """Return the variables of an engine on these slots; `gpu_count` is 0 without any GPU."""
    visible = os.environ.get(VISIBLE)
    count = gpu_count if visible is None else len([name for name in visible.split(",") if name])
    return gpu_environment(own_first(slots, range(count)), visible)


def slots_of(which: str, visible: int) -> list[int]:
    """Return the slots of a task; a rank that is bound to one of `visible` GPUs has slot 0."""
    if which != RANK:
        return [int(slot) for slot in which.split(",")]
    local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID", "0")
    return [0 if visible == 1 else int(local)]


def cache_environment(directory: Path) -> dict[str, str]:
    """Return the variables that keep compiled kernels below a directory, which is created.

    Raises:
        UserError: it cannot be created, or is not this user's alone: whoever writes to it decides
            what this process executes.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise UserError(
            f"local_directory: {directory}: {error.strerror}; name a directory on the nodes' own "
            "disks in the cluster's profile, or null"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UserError(f"local_directory: {directory} is not a directory of this user; remove it")
    if status.st_mode & 0o022:
        raise UserError(f"local_directory: {directory} is writable by others; chmod 700 it")
    return {name: str(directory / below) for name, below in CACHES.items()}


def cores_near(gpus: Sequence[Gpu], driver: Path = DRIVER, devices: Path = DEVICES) -> set[int]:
    """Return the CPU cores of the GPUs' NUMA nodes that this process may use; empty for any.

    A rank's copies to its GPU take a hop more from another socket. srun's own binding would put the
    first task of every overlapping step on the same cores.
    """
    near: set[int] = set()
    for gpu in gpus:
        for information in sorted(driver.glob("*/information")):
            if gpu.uuid in information.read_text():
                listed = devices / information.parent.name.lower() / "local_cpulist"
                near |= _cores_of(listed.read_text()) if listed.exists() else set()
    return near & os.sched_getaffinity(0)


def _cores_of(listed: str) -> set[int]:
    """Return the cores of a kernel's list, such as `0-3,8`."""
    ranges = (core_range.partition("-") for core_range in listed.strip().split(",") if core_range)
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


if __name__ == "__main__":
    main()
