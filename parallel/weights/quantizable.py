"""The tensors that can be quantized, by the modules that vLLM loads them into; no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from parallel.settings import ModelSettings
from parallel.weights.names import EMBEDDING, HEAD, ModelWeights

# Megatron-core's names of what chooses and weighs experts, which vLLM never quantizes.
GATES = "mlp.router.weight", "mlp.shared_experts.gate_weight"
# The last part of a Hugging Face name: of the module that vLLM fuses it into with others.
FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("w1", "w3"), "w13"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),
}
# Of a delta net, one row per head: too few for the kernels of vLLM on a rank.
NARROW = re.compile(r"\.in_proj_[ab]\.weight$")
EXPERT = re.compile(r"^(.*\.experts)\.\d+\.")


@dataclass(frozen=True)
class VllmMatrix:
    """The weights that vLLM stacks into one matrix, which have one global scale.

    `name` is the matrix's, `module` that of the module, which is quantized as a whole: of experts,
    all of a layer. `tensors` are the Hugging Face names and shapes.
    """

    name: str
    module: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


def quantizable(model: ModelSettings) -> Iterator[VllmMatrix]:
    """Yield the weights of all linear layers but gates and the head, in the model's order."""
    description = ModelWeights(model)
    for key in description.buckets:
        if key in (EMBEDDING, HEAD):
            continue
        matrices = {
            fused_tensor.tensor
            for weight in description.weights[description.kind(key)]
            for fused_tensor in weight.tensors
            if len(fused_tensor.shape) == 2
            and weight.parameter not in GATES
            and not NARROW.search(fused_tensor.tensor)
        }
        prefix = f"model.layers.{key}."
        fused: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        for name, shape in description.tensors(key):
            name_in_layer = name.removeprefix(prefix)
            if re.sub(r"\.experts\.\d+\.", ".experts.{expert}.", name_in_layer) in matrices:
                fused.setdefault(_fused_name(name), []).append((name, shape))
        for name, tensors in fused.items():
            expert = EXPERT.match(name)
            yield VllmMatrix(name, expert[1] if expert else name, tuple(tensors))


def module_name(tensor: str) -> str:
    """Return the name of the linear layer that a weight belongs to."""
    return tensor.removesuffix(".weight")


def _fused_name(tensor: str) -> str:
    parent, _, last = module_name(tensor).rpartition(".")
    return f"{parent}.{FUSED.get(last, last)}"
