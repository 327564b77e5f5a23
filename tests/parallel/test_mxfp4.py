"""Experts in MXFP4 are read box by box as transformers restores them, bit for bit."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from parallel.hugging_face.config import TensorSpec
from parallel.hugging_face.files import WeightFiles
from parallel.hugging_face.weights import ModelFiles, fill_parts
from parallel.weights.boxes import within
from tests.layouts.hugging_face_cases import MODELS

NAME, SHAPE = "mlp.experts.down_proj", (3, 64, 6)


def checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    """Write a stacked tensor of random blocks, and a bias; return what is in it."""
    draw = torch.Generator().manual_seed(0)
    experts, inputs, outputs = SHAPE
    grid = (experts, outputs, inputs // 32)
    found = {
        f"{NAME}_blocks": torch.randint(256, (*grid, 16), generator=draw, dtype=torch.uint8),
        f"{NAME}_scales": torch.randint(100, 140, grid, generator=draw, dtype=torch.uint8),
        f"{NAME}_bias": torch.ones(experts, outputs, dtype=torch.bfloat16),
    }
    save_file(found, directory / "model.safetensors")
    return found


def test_every_box_is_what_transformers_restores(tmp_path: Path) -> None:
    found = checkpoint(tmp_path)
    files = WeightFiles(tmp_path)
    theirs = convert_moe_packed_tensors(found[f"{NAME}_blocks"], found[f"{NAME}_scales"])
    assert theirs.shape == SHAPE
    whole = files.read(NAME)
    assert whole.dtype == torch.bfloat16 and torch.equal(whole, theirs)
    for box in (((1, 0, 0), (1, 64, 6)), ((2, 32, 1), (1, 32, 2)), ((0, 30, 5), (2, 5, 1))):
        assert torch.equal(files.read(NAME, box), theirs[within(box)])
    assert torch.equal(files.read(f"{NAME}_bias"), found[f"{NAME}_bias"])


def test_blocks_of_another_shape_are_named(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    bias = {f"{NAME}_bias": TensorSpec(torch.bfloat16, (3, 6))}
    files = WeightFiles(tmp_path)
    assert files.check({NAME: TensorSpec(torch.bfloat16, SHAPE), **bias}) == []
    errors = files.check({NAME: TensorSpec(torch.bfloat16, (3, 96, 6)), **bias})
    assert errors == [
        f"model.safetensors: {NAME}_blocks is [3, 6, 2, 16], but should be [3, 6, 3, 16]",
        f"model.safetensors: {NAME}_scales is [3, 6, 2], but should be [3, 6, 3]",
    ]


def test_a_scale_of_nan_is_named(tmp_path: Path) -> None:
    found = checkpoint(tmp_path)
    found[f"{NAME}_scales"][1, 2, 0] = 255
    save_file(found, tmp_path / "model.safetensors")
    part = NAME, ((0, 0, 0), SHAPE), torch.zeros(SHAPE, dtype=torch.bfloat16)
    files = ModelFiles(MODELS["qwen3_moe"], WeightFiles(tmp_path))
    assert fill_parts([part], files) == {NAME}
    assert files.place(NAME) == f"model.safetensors: {NAME}"
