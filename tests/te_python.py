"""TransformerEngine's real Python on a machine without CUDA, for the processes of tests.

`make` installs requirements/te-python.txt into a directory of the environment that is not on
sys.path, so that megatron-core, vLLM and `braid doctor` see no TransformerEngine on a CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

TE_PYTHON = Path(sys.prefix) / "transformer-engine"


def te_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment in which `import transformer_engine` finds the real package.

    Its compiled extension, `transformer_engine_torch`, is not there: the process plants a stand-in
    before it imports `transformer_engine.pytorch`.

    Raises:
        FileNotFoundError: the packages are not installed.
    """
    if not (TE_PYTHON / "transformer_engine").is_dir():
        raise FileNotFoundError(f"{TE_PYTHON}: no TransformerEngine; run `make install`")
    path = [str(TE_PYTHON), *filter(None, [environment.get("PYTHONPATH")])]
    # The variable keeps transformer_engine.common from loading its core library, cuDNN and NVRTC.
    return {**environment, "PYTHONPATH": os.pathsep.join(path), "NVTE_PROJECT_BUILDING": "1"}
