"""Probes of what works on this machine: `python -m parallel.doctor`, for `braid doctor`.

Prints JSON lines: {"package": NAME} before each probe, so that one that kills the process is known,
and {"package": NAME, "found": ...} after it: its finding, or {"missing": true}, or {"error": LINE}.
Every import is inside its probe, since any of them may fail.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from importlib import import_module, util
from typing import Any

Findings = dict[str, Any]


def main() -> None:
    """Probe one package after another; without torch the others cannot work."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print greetings on import
    warnings.filterwarnings("ignore")
    for name, probe in PROBES.items():
        print(json.dumps({"package": name}), file=answers)
        finding: Findings = {"missing": True}
        if util.find_spec(name) is not None:
            try:
                finding = probe()
            except Exception as error:
                first_line = (str(error).strip() or "no reason given").splitlines()[0]
                finding = {"error": f"{type(error).__name__}: {first_line}"}
        print(json.dumps({"package": name, "found": finding}), file=answers)
        if name == "torch" and finding.keys() & {"missing", "error"}:
            return


def _torch() -> Findings:
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = map(torch.cuda.get_device_properties, range(count))
    return {
        "cuda_build": torch.version.cuda,
        "devices": [
            {"name": d.name, "bytes": d.total_memory, "capability": f"{d.major}.{d.minor}"}
            for d in devices
        ],
        "backends": {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()},
    }


def _transformer_engine() -> Findings:
    from parallel.machine import cuda_packages

    error = cuda_packages.transformer_engine_error()
    return {} if error is None else {"error": error}


def _apex() -> Findings:
    from parallel.machine import cuda_packages

    return {"kind": cuda_packages.apex()}


def _megatron() -> Findings:
    """Import megatron-core, and with it mbridge and transformers."""
    from parallel.cpu import megatron
    from parallel.machine import device

    megatron.activate()
    optimizers: Any = import_module("megatron.core.optimizer")
    return {
        "process_groups": device.backend(),
        "layer_specs": device.layer_specs(),
        "optimizer": optimizers.Adam.__module__.partition(".")[0],
    }


def _vllm() -> Findings:
    """Import as much of the engine as chooses its device; starting one takes too long."""
    platforms: Any = import_module("vllm.platforms")
    import_module("vllm")
    return {"device": platforms.current_platform.device_type}


# By imported name.
PROBES: dict[str, Callable[[], Findings]] = {
    "torch": _torch,
    "transformer_engine": _transformer_engine,
    "apex": _apex,
    "megatron": _megatron,
    "vllm": _vllm,
}

if __name__ == "__main__":
    main()
