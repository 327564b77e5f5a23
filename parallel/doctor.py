"""What works on this machine, tried out: `python -m parallel.doctor` prints it as JSON lines.

    {"looking_at": NAME}      before each probe, so that one that kills the process is known
    {"found": NAME, ...}      what it found; or "missing": true, or "error": one line

`braid doctor` reads them. Every import stands inside its probe: any of them may be missing or
broken here, and that is what is asked.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

Found = dict[str, Any]


def main() -> None:
    """Probe one thing after another; without torch the others have nothing to say."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries greet on it when imported
    warnings.filterwarnings("ignore")
    for name, probe in PROBES.items():
        print(json.dumps({"looking_at": name}), file=answers)
        found = _tried(name, probe)
        print(json.dumps({"found": name, **found}), file=answers)
        if name == "torch" and found.keys() & {"missing", "error"}:
            return


def _tried(name: str, probe: Callable[[], Found]) -> Found:
    if util.find_spec(name) is None:
        return {"missing": True}
    try:
        return probe()
    except Exception as error:
        first_line = (str(error).strip() or "no reason given").splitlines()[0]
        return {"error": f"{type(error).__name__}: {first_line}"}


def _torch() -> Found:
    import torch
    import torch.distributed as dist

    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(index)
        capability = f"{device.major}.{device.minor}"
        devices.append(
            {"name": device.name, "bytes": device.total_memory, "capability": capability}
        )
    return {
        "cuda_build": torch.version.cuda,
        "devices": devices,
        "backends": {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()},
    }


def _transformer_engine() -> Found:
    importlib.import_module("transformer_engine.pytorch")
    return {}


def _apex() -> Found:
    """Looks at files only: the other package of this name fails on import in ways of its own."""
    spec = util.find_spec("apex")
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    parts = ("normalization", "multi_tensor_apply")
    nvidia = any(all((folder / part).exists() for part in parts) for folder in folders)
    return {"nvidia": nvidia, "compiled": util.find_spec("amp_C") is not None}


def _megatron() -> Found:
    """With megatron-core comes mbridge, and with that transformers."""
    from parallel import device
    from parallel.cpu import megatron

    megatron.activate()
    optimizers: Any = importlib.import_module("megatron.core.optimizer")
    return {
        "process_groups": device.backend(),
        "layer_specs": device.layer_specs(),
        "optimizer": optimizers.Adam.__module__.partition(".")[0],
    }


def _vllm() -> Found:
    """Imports as much of the engine as chooses its device; starting one would take too long."""
    platforms: Any = importlib.import_module("vllm.platforms")
    importlib.import_module("vllm")
    return {"device": platforms.current_platform.device_type}


# By the name that is imported.
PROBES: dict[str, Callable[[], Found]] = {
    "torch": _torch,
    "transformer_engine": _transformer_engine,
    "apex": _apex,
    "megatron": _megatron,
    "vllm": _vllm,
}

if __name__ == "__main__":
    main()
