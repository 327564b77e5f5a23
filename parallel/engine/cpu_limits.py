"""The models that vLLM's kernels for CPUs can run. Never imports torch."""

from __future__ import annotations

from parallel.errors import UserError
from parallel.families import architecture, traits
from parallel.settings import ModelSettings

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM 0.30's attention
LINEAR_HEAD_DIMS = (64, 128)  # of its chunked delta rule


def check_cpu_engine(model: ModelSettings) -> None:
    """Raise UserError where engines that would run on a CPU cannot sample from the model.

    An engine would say so only when it starts, which may be hours after the run.
    """
    if (why := unsupported(model)) is not None:
        raise UserError(
            f"stages that sample cannot run on a CPU: {why}; change the model, run on GPUs, or"
            " choose the other stages with --only"
        )


def unsupported(model: ModelSettings) -> str | None:
    """Return the known reason why vLLM cannot run the model on a CPU, or None."""
    if (why := _delta_net_unsupported(model)) is not None:
        return why
    family = traits(model)
    if family.latent_attention:
        if model.precision == "fp32":
            return "model.family: vLLM's latent attention has no kernel for fp32"
    elif model.head_dim not in HEAD_DIMS:
        supported = ", ".join(map(str, HEAD_DIMS))
        return (
            f"model.head_dim = {model.head_dim}: vLLM's attention has kernels for {supported} alone"
        )
    if model.expert_hidden_size % (multiple := family.expert_multiple_on_cpu):
        width = f"model.expert_hidden_size = {model.expert_hidden_size}"
        needs = f"need a multiple of {multiple} on a rank"
        return f"{width}: vLLM's experts of {model.family} {needs}"
    return None


def _delta_net_unsupported(model: ModelSettings) -> str | None:
    """Return the reason why vLLM cannot run the model's gated delta nets on a CPU, or None."""
    if not traits(model).delta_nets:
        return None
    further = architecture(model)
    if model.precision == "fp32":
        return "model.family: vLLM's gated delta net has kernels for bf16 alone"
    widths = further.linear_key_head_dim, further.linear_value_head_dim
    if widths[0] != widths[1] or widths[0] not in LINEAR_HEAD_DIMS:
        shown, supported = " and ".join(map(str, widths)), ", ".join(map(str, LINEAR_HEAD_DIMS))
        return (
            f"model.architecture: linear key and value heads are {shown} wide: vLLM's gated delta"
            f" net has kernels for equal widths of {supported} alone"
        )
    return None
