"""What vLLM cannot draw from on a CPU, known before an engine tries."""

from __future__ import annotations

from parallel.settings import ModelSettings

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM 0.30's attention


def unsupported(model: ModelSettings) -> str | None:
    """Why the model's engines will not start on a CPU, for what is known before they try."""
    if model.family == "deepseek_v3":
        if model.precision == "fp32":
            return "model.family: vLLM's latent attention has no kernel for fp32"
    elif model.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        return f"model.head_dim = {model.head_dim}: vLLM's attention has kernels for {known} alone"
    return None
