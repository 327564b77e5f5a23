"""What a rank imports, for the fork server that ranks are forked from. Import it nowhere else."""

from __future__ import annotations

import importlib
import warnings

from stages.main import MODULES

# What a stage would import only when it gets there.
LATER = (
    "reasoning_gym",
    "wandb",
)

warnings.filterwarnings("ignore", module=r"megatron|mbridge|torch")
importlib.import_module("parallel.cpu.megatron").activate()
for name in (*sorted(set(MODULES.values())), *LATER):
    importlib.import_module(name)
