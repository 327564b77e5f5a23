"""The machine: its device, its packages, and what it lacks, by name."""

from __future__ import annotations

import importlib
import platform
from importlib import metadata

from tests.gpu.findings import Finding
from tests.gpu.part import Lane

# The package, the module whose import shows that it works, and what is done without it.
PACKAGES = {
    "torch": ("torch", "nothing can run"),
    "triton": ("triton", "torch.compile of megatron-core's functions is off"),
    "megatron-core": ("megatron.core", "no model can be built"),
    "mbridge": ("mbridge", "no model can be built"),
    "transformers": ("transformers", "no model can be built"),
    "transformer-engine": ("transformer_engine.pytorch", "megatron-core's local layers are built"),
    "vllm": ("vllm", "no engine can be started; refits are read by plain tensors"),
    "deep-ep": ("deep_ep", "experts are dispatched by all-to-all"),
}


def machine(lane: Lane) -> list[Finding]:
    """Return the versions of what is installed, with the device; nothing here can be wrong."""
    import torch

    found = [Finding("python", platform.python_version())]
    for package, (module, without) in PACKAGES.items():
        try:
            importlib.import_module(module)
            found.append(Finding(package, _version(package)))
        except Exception as error:  # a build for another CUDA raises anything
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            found.append(Finding(package, f"lacking ({why}): {without}"))
    if lane.device == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found.append(Finding("device", properties.name))
        found.append(Finding("memory", properties.total_memory / 2**30, "GiB"))
        found.append(Finding("CUDA of torch", str(torch.version.cuda)))
    else:
        found.append(Finding("device", "no CUDA device" if lane.device == "cuda" else "cpu"))
    return found


def _version(package: str) -> str:
    """Return the version of a package, or of its build for CPUs."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return metadata.version(f"{package}-cpu")
