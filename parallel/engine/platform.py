"""The platform of engines, a GPU or a CPU: its variables, and the models that its kernels run.

The environment decides how vLLM runs, not what it computes: no compilation, no telemetry, no
downloads. It must be set when the process starts, since OpenMP reads its variables when torch is
imported. Never imports torch.
"""

from __future__ import annotations

from pathlib import Path

from parallel.errors import UserError
from parallel.families import architecture, traits
from parallel.machine.gpus import built_for_cpu
from parallel.settings import ModelSettings

GPU_FILE = Path("/dev/nvidiactl")  # the driver's: torch is not imported here

COMMON = {
    # Without multiprocessing vLLM's scheduler steps in the engine's process. AsyncLLM's, in another
    # process, took 1.5 times as long on two cores, since every token's log-probability is sent
    # separately (docs/explanation/rollouts.md). On GPUs too: a refit reads the scheduler's requests
    # and drains its steps in flight, which takes no messages here. With tensor parallelism the
    # workers are separate processes either way.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Routes and sampling masks: vLLM's first runner has neither.
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    # OpenMP's threads spin while they wait for one another, which made tiny layers ten times slower
    # when another process was busy.
    "GOMP_SPINCOUNT": "1000",
}
# On a GPU vLLM compiles the model and captures its steps as CUDA graphs.
ON_CPU = {"TORCHDYNAMO_DISABLE": "1"}

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM 0.32's attention
# Of its latent attention: the compressed keys and values, and the key's rotated part.
LATENT_WIDTHS = (512, 64)
LINEAR_HEAD_DIMS = (64, 128)  # of its chunked delta rule


def process_environment(on_gpus: bool) -> dict[str, str]:
    """Return the environment of engine processes on GPUs, or on a CPU."""
    return COMMON | ({} if on_gpus else ON_CPU)


def has_gpus() -> bool:
    """Return whether an engine that starts in this environment runs on GPUs; cheap."""
    return GPU_FILE.exists() and not built_for_cpu()


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
        widths = architecture(model).kv_lora_rank, model.head_dim
        if widths != LATENT_WIDTHS:
            rank, rotated = LATENT_WIDTHS
            return (
                f"model.architecture.kv_lora_rank = {widths[0]} and model.head_dim = {widths[1]}:"
                f" vLLM's latent attention has a kernel for {rank} and {rotated} alone"
            )
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
