"""One process of the GPU lane: runs parts and writes their results to the file in argv[1]."""

from __future__ import annotations

import argparse
import importlib
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from parallel.machine.determinism import set_up_rank
from tests.gpu.bundle import PACKAGES, unusable
from tests.gpu.findings import Finding, PartResult, write

# The module of each part, which has a function of the part's name.
MODULES = {
    "machine": "tests.gpu.machine",
    "losses": "tests.gpu.losses",
    "loss_speed": "tests.gpu.losses",
    "parity": "tests.gpu.parity",
    "determinism": "tests.gpu.parity",
    "refit": "tests.gpu.refit",
    "model_speed": "tests.gpu.model_speed",
}
# The modules that the bundle has.
BUNDLED = {"megatron", *(package.replace("-", "_") for package in PACKAGES)}


@dataclass(frozen=True)
class Lane:
    """The device of a part; `small` takes sizes for a CPU; the bundle of packages, if there is."""

    device: str
    small: bool
    bundle: Path | None = None


def main() -> None:
    """Run the parts that the command line names, in order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("parts", nargs="+")
    asked = parser.parse_args()
    # Before torch is imported: deterministic algorithms need it, and they are one of the parts.
    set_up_rank("determinism" in asked.parts)
    results: list[PartResult] = []
    for part in asked.parts:
        results.append(run(part, Lane(asked.device, asked.small, asked.bundle)))
        write(asked.result, results)


def run(part: str, lane: Lane) -> PartResult:
    """Run a part; what it lacks is a reason to skip it, and any other error a failure."""
    started = time.monotonic()
    try:
        function: Callable[[Lane], list[Finding]] = getattr(
            importlib.import_module(MODULES[part]), part
        )
        if lane.device == "cuda" and part != "machine":
            import torch

            if not torch.cuda.is_available():
                return PartResult(part, skipped="torch finds no CUDA device")
        findings = tuple(function(lane))
    except ImportError as error:
        traceback.print_exc()
        return PartResult(part, skipped=f"{error}; {fix(error, lane.bundle)}")
    except Exception as error:
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        return PartResult(part, seconds=time.monotonic() - started, failed=why)
    return PartResult(part, findings, time.monotonic() - started)


def fix(error: ImportError, bundle: Path | None) -> str:
    """Return what to do about a failed import; one without a name is of a shared library."""
    package = (error.name or "").partition(".")[0]
    if package == "torch":
        return "install torch with CUDA for this Python; the bundle has none"
    if package in BUNDLED:
        return (unusable(bundle) if bundle else "") or f"`make gpu-bundle` packs {package}"
    return f"install {package} for this Python" if package else "fix the installation"


@contextmanager
def one_rank() -> Iterator[None]:
    """Make this process the only rank of its process groups, unless it already is."""
    import torch.distributed as dist

    from parallel.distributed import process_groups
    from parallel.settings import LayoutSettings

    if dist.is_initialized():
        yield
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with mock.patch.dict("os.environ", place), process_groups(LayoutSettings(), seed=0):
        yield


if __name__ == "__main__":
    main()
