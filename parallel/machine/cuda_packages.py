"""TransformerEngine and NVIDIA's apex as they are installed here: present, absent or unusable.

megatron-core 0.19.2 imports both wherever it finds them and catches ImportError alone. A build for
another CUDA or torch raises OSError or FileNotFoundError instead, and either package computes on
CUDA only. So this module decides first which of them megatron-core may see, and hides the others.
"""

from __future__ import annotations

import functools
import importlib
import sys
from importlib import util
from pathlib import Path
from typing import Any, Literal

# What megatron-core and Braid's model use of TransformerEngine; its top-level import hides errors.
# torch is imported before it: it finds the NCCL that version 2.20's libraries are linked with.
TRANSFORMER_ENGINE = (
    "torch",
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.fp8",
    "transformer_engine.pytorch.optimizers",
)
# Apex's compiled parts: without amp_C its Adam cannot be constructed, and megatron-core's
# gradient_accumulation_fusion of layers that are not TransformerEngine's is the other module.
APEX_EXTENSIONS = ("amp_C", "fused_weight_gradient_mlp_cuda")
INSTALL = "run `make install-gpu`, then `braid doctor`"

# namesake: the package registry's `apex`, a toolkit for web logins. incomplete: NVIDIA's, built
# without the extensions.
Apex = Literal["nvidia", "incomplete", "namesake", "absent"]


@functools.cache
def transformer_engine_error() -> str | None:
    """Import TransformerEngine; return why it cannot be used in this process, None if it can."""
    if util.find_spec("transformer_engine") is None:
        return "not installed"
    try:
        for name in TRANSFORMER_ENGINE:
            importlib.import_module(name)
    except Exception as error:  # whatever a build for another CUDA or torch raises
        first_line = (str(error).strip() or "no reason given").splitlines()[0]
        return f"{type(error).__name__}: {first_line}"
    return None


@functools.cache
def apex() -> Apex:
    """Return which `apex` is installed; looks at files, since importing the namesake fails."""
    if (spec := util.find_spec("apex")) is None:
        return "absent"
    roots = [Path(root) for root in spec.submodule_search_locations or ()]
    if not any((root / "multi_tensor_apply").is_dir() for root in roots):
        return "namesake"
    whole = all(util.find_spec(name) is not None for name in APEX_EXTENSIONS)
    return "nvidia" if whole else "incomplete"


def hide(package: str) -> None:
    """Make every later import of the package raise ImportError in this process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]  # a failed import leaves submodules behind
    modules: dict[str, Any] = sys.modules
    modules[package] = None


def notices() -> list[str]:
    """Return what a user with CUDA should know of packages that are missing or do not work."""
    messages = []
    if (error := transformer_engine_error()) is not None:
        messages.append(
            f"TransformerEngine: {error}; layers run in plain torch, slower and with more memory: "
            f"{INSTALL}"
        )
    if apex() == "namesake":
        messages.append("apex: not NVIDIA's package, and not used; run `pip uninstall apex`")
    elif apex() == "incomplete":
        messages.append(
            "apex: built without its CUDA extensions and not used; rebuild it with --cuda_ext"
        )
    return messages
