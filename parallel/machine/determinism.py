"""The environment variables of `deterministic: true` on GPUs; never imports torch.

CUDA's libraries read them when they are loaded or first used, so they are set before torch or vLLM
is imported. They replace what the user has set: no such variable may change a result. On a CPU
none of them is read.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from parallel.machine.gpus import usable_gpus

# Megatron-LM accepts these values of NCCL_ALGO (megatron/training/arguments.py): NVLS, which
# reduces inside the switch, may order a sum differently each time.
DETERMINISTIC_NCCL = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")
RANK_ENVIRONMENT = {
    # cuBLAS chooses workspaces per stream, and with them the order of a sum. Without this
    # torch.use_deterministic_algorithms raises at the first matrix product.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # TransformerEngine's attention then takes cuDNN's deterministic backward; megatron-core's
    # deterministic_mode refuses to start without it.
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
# vLLM's batch-invariant kernels: a response's bits do not depend on what is sampled beside it.
# Each GPU worker then sets cuBLAS's and NCCL's variables (vllm/model_executor/determinism).
ENGINE_ENVIRONMENT = {"VLLM_BATCH_INVARIANT": "1"}


def set_up_rank(deterministic: bool) -> None:
    """Set a rank's variables; call before torch is imported."""
    if shutil.which("ninja") is None:
        # torch compiles megatron-core's extension with the one on PATH, and the environment's is
        # beside the interpreter.
        beside = str(Path(sys.executable).parent)
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), beside])
    if deterministic:
        os.environ.update(RANK_ENVIRONMENT)
        if os.environ.get("NCCL_ALGO") not in DETERMINISTIC_NCCL:
            os.environ["NCCL_ALGO"] = "^NVLS"


def engine_environment(deterministic: bool) -> dict[str, str]:
    """Return the variables of an engine, to be set before vLLM is imported.

    Empty on a CPU, whose kernels vLLM's mode does not know.
    """
    return dict(ENGINE_ENVIRONMENT) if deterministic and usable_gpus() else {}
