"""The sizes of real models, as configs/models has them."""

from __future__ import annotations

import yaml

from parallel.settings import ModelSettings
from tests.runs import REPOSITORY


def real_model(name: str) -> ModelSettings:
    """Return the model that a file of configs/models describes."""
    path = REPOSITORY / "configs" / "models" / f"{name}.yaml"
    return ModelSettings.model_validate(yaml.safe_load(path.read_text()))


QWEN3_30B = real_model("qwen3-30b-a3b")
GLM_AIR = real_model("glm-4.5-air")
DEEPSEEK_V3 = real_model("deepseek-v3")
