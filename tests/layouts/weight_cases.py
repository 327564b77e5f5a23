"""The cases of `parallel.weights`, with mbridge as the reference."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from parallel.settings import LayoutSettings
from tests.layouts.hugging_face_cases import MODELS, _random


def write_with_bridge(model: str, file: str) -> None:
    """Write the model of `_random` under the Hugging Face names of mbridge, on one rank.

    mbridge 0.15.1 lacks one family, whose reference is transformers (test_hugging_face.py).
    """
    policy = _random(LayoutSettings(), model)
    if MODELS[model].family == "qwen3_5_moe_text":
        torch.save({name: tensor.cpu().clone() for name, tensor in policy.weights()}, file)
        return
    [chunk] = policy.chunks
    found = {}
    for name, tensor in chunk.state_dict().items():
        if name.endswith("_extra_state"):
            continue
        theirs = bridge_name(name, chunk.config.multi_latent_attention)
        names, tensors = policy.bridge._weight_to_hf_format(theirs, tensor.detach())
        found.update(zip(names, (each.cpu().clone() for each in tensors), strict=True))
    torch.save(found, file)


def bridge_name(name: str, latent: bool) -> str:
    """Return mbridge's name of a tensor; mbridge expects TransformerEngine's modules."""
    name = re.sub(
        r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", r"experts.\2.weight\1", name
    )
    if latent:
        return re.sub(r"\.(q|kv)_layernorm\.weight", r".linear_\1_up_proj.layer_norm_weight", name)
    return name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")


def errors_of_pieces(layout: LayoutSettings, model: str, file: str) -> list[str]:
    """Return the differences between this rank's pieces and its model."""
    import torch.distributed as dist

    from parallel.weights.holdings import held
    from parallel.weights.names import plain_name

    policy = _random(layout, model)
    latent = policy.bridge.config.multi_latent_attention
    open_elements = {
        (number, plain_name(name, latent)): (tensor, torch.ones(tensor.shape, dtype=torch.int8))
        for number, chunk in enumerate(policy.chunks)
        for name, tensor in chunk.state_dict().items()
        if not name.endswith("_extra_state")
    }
    whole = torch.load(Path(file))
    faults = []
    for piece in held(MODELS[model], layout, dist.get_rank()):
        if (where := (piece.chunk, piece.parameter)) not in open_elements:
            faults.append(f"{where} is no tensor of this rank")
            continue
        tensor, count = open_elements[where]
        inside = [
            slice(a, a + n) for a, n in zip(piece.parameter_offset, piece.box[1], strict=True)
        ]
        theirs = [slice(a, a + n) for a, n in zip(*piece.box, strict=True)]
        if not torch.equal(tensor[inside].cpu(), whole[piece.tensor][theirs]):
            faults.append(f"{piece} has other values")
        count[inside] -= 1
    faults += [
        f"{where}: elements in none or two" for where, (_, n) in open_elements.items() if n.any()
    ]
    return faults


def errors_of_stream(layout: LayoutSettings, model: str, file: str) -> list[str]:
    """Return the differences between the streamed tensors and mbridge's."""
    policy = _random(layout, model)
    expected = torch.load(Path(file))
    faults = []
    for name, tensor in policy.weights():
        theirs = expected.pop(name)
        if tensor.dtype != theirs.dtype or not torch.equal(tensor.cpu(), theirs):
            faults.append(f"{name} is {tensor.dtype} of other values than {theirs.dtype}")
    return [*faults, *(f"{name} never came" for name in expected)]
