"""Check that `make install-gpu` can work on this machine, before it downloads anything.

    python3 requirements/gpu_machine.py

Needs no package. A machine without a driver is fine: a login node, or a container that is being
built. Exits with one line per obstacle.
"""

from __future__ import annotations

import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from parallel.errors import UserError  # noqa: E402
from parallel.machine.gpus import driver_error, visible_gpus  # noqa: E402

CUDA = 13  # of the torch in gpu.txt
FREE_GIB = 15  # the environment takes 10, its downloads the rest


def main() -> None:
    """Exit with the obstacles, or say what the set is installed for."""
    obstacles = list(_obstacles())
    try:
        gpus = visible_gpus()
    except UserError as error:
        gpus, obstacles = [], [*obstacles, str(error)]
    if (error := driver_error(gpus, CUDA)) is not None:
        obstacles.append(f"nvidia-smi: {error}")
    if obstacles:
        sys.exit("\n".join(f"install-gpu: {obstacle}" for obstacle in obstacles))
    where = (
        f"{len(gpus)} x {gpus[0].name}" if gpus else "no GPU here; it needs driver R580 or newer"
    )
    print(f"for CUDA {CUDA}: {where}")


def _obstacles() -> Iterator[str]:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        here = f"{platform.system()} on {platform.machine()}"
        yield f"the set has wheels for Linux on x86-64, not for {here}"
    if find_spec("ensurepip") is None:
        yield "no ensurepip, which a virtual environment needs; install python3-venv"
    if shutil.which("c++") is None and shutil.which("g++") is None:
        yield "no C++ compiler, which TransformerEngine's extension needs; install g++"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        yield "no Python.h, which TransformerEngine's extension needs; install Python's headers"
    if (free := shutil.disk_usage(REPOSITORY).free >> 30) < FREE_GIB:
        yield f"{free} GiB of disk are free, {FREE_GIB} GiB are needed; free some"


if __name__ == "__main__":
    main()
