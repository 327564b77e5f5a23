"""The imports of a rank, made once in the fork server. Import this module nowhere else."""

from __future__ import annotations

import importlib
import warnings

from stages.kinds import MODULES

# Packages that a stage imports late.
LATER = (
    "reasoning_gym",
    "wandb",
)

warnings.filterwarnings("ignore", module=r"megatron|mbridge|torch")
importlib.import_module("parallel.cpu.megatron").activate()
for name in (*sorted(set(MODULES.values())), *LATER):
    importlib.import_module(name)
