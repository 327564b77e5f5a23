"""Checkpoints in 8 bits with scales for blocks, read box by box in full precision."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from parallel.hugging_face.config import TensorSpec
from parallel.hugging_face.files import WeightFiles
from parallel.hugging_face.weights import ModelFiles, fill_parts
from tests.layouts.hugging_face_cases import MODELS

BLOCK = [4, 8]
SHAPES = {"a.weight": (8, 16), "b.weight": (10, 20)}  # the second ends in smaller blocks


def checkpoint(directory: Path, block: list[int] | None = None) -> dict[str, torch.Tensor]:
    """Write a checkpoint of two matrices and a norm; return what is in it."""
    torch.manual_seed(0)
    found: dict[str, torch.Tensor] = {"norm.weight": torch.ones(4, dtype=torch.bfloat16)}
    for name, shape in SHAPES.items():
        grid = [-(-length // size) for length, size in zip(shape, BLOCK, strict=True)]
        found[name] = torch.randn(shape).to(torch.float8_e4m3fn)
        found[f"{name}_scale_inv"] = torch.rand(grid) + 0.5
    save_file(found, directory / "model.safetensors")
    stated = {"quant_method": "fp8", "weight_block_size": block or BLOCK}
    (directory / "config.json").write_text(json.dumps({"quantization_config": stated}))
    return found


def test_every_box_is_what_transformers_reads(tmp_path: Path) -> None:
    found = checkpoint(tmp_path)
    files = WeightFiles(tmp_path)
    whole = files.read("a.weight")
    theirs = Fp8Dequantize(None)._dequantize_one(found["a.weight"], found["a.weight_scale_inv"])
    assert whole.dtype == torch.float32 and torch.equal(whole, theirs)
    for box in (((0, 0), (8, 16)), ((3, 5), (2, 9)), ((7, 15), (1, 1)), ((4, 8), (4, 8))):
        (row, column), (rows, columns) = box
        part = files.read("a.weight", box)
        assert torch.equal(part, whole[row : row + rows, column : column + columns])
    assert files.read("norm.weight").dtype == torch.bfloat16


def test_blocks_at_the_end_may_be_smaller(tmp_path: Path) -> None:
    found = checkpoint(tmp_path)
    scales = found["b.weight_scale_inv"].repeat_interleave(4, 0).repeat_interleave(8, 1)
    expected = found["b.weight"].float() * scales[:10, :20]
    assert torch.equal(WeightFiles(tmp_path).read("b.weight"), expected)


@pytest.mark.parametrize("block", [BLOCK, [4, 4]])
def test_scales_of_another_size_are_named(block: list[int], tmp_path: Path) -> None:
    checkpoint(tmp_path, block)
    specs = {name: TensorSpec(torch.bfloat16, shape) for name, shape in SHAPES.items()}
    specs["norm.weight"] = TensorSpec(torch.bfloat16, (4,))
    errors = WeightFiles(tmp_path).check(specs)
    wrong = "model.safetensors: a.weight_scale_inv is [2, 2], but should be [2, 4]"
    assert errors == [] if block == BLOCK else wrong in errors


NAME = "a.weight"
SCALES = f"{NAME}_scale_inv"
READ = "but should be one of F32, BF16, F16"


@pytest.mark.parametrize(
    ("change", "errors"),
    [
        *(
            ({SCALES: torch.ones(2, 2).to(dtype)}, [f"{SCALES} is {stored}, {READ}"])
            for dtype, stored in (
                (torch.uint8, "U8"),
                (torch.int64, "I64"),
                (torch.float64, "F64"),
                (torch.float8_e8m0fnu, "F8_E8M0"),
            )
        ),
        *(({SCALES: torch.ones(2, 2).to(dtype)}, []) for dtype in (torch.bfloat16, torch.float16)),
        ({SCALES: None}, [f"{SCALES} is missing, the scales of a tensor in FP8 in model.safeten"]),
        (
            {NAME: torch.zeros(8, 16).bfloat16()},
            [f"model.safetensors: {SCALES} is no tensor of this model"],
        ),
        (
            {
                "norm.weight": torch.ones(4).to(torch.float8_e4m3fn),
                "norm.weight_scale_inv": torch.ones(1),
            },
            ["norm.weight is [4] in FP8, which only matrices may be in"],
        ),
        ({NAME: torch.zeros(8, 16).to(torch.float8_e5m2)}, [f"{NAME} is F8_E5M2, {READ}", SCALES]),
    ],
)
def test_what_is_not_read_is_named(
    change: dict[str, torch.Tensor | None], errors: list[str], tmp_path: Path
) -> None:
    found = {**checkpoint(tmp_path), **change}
    kept = {name: tensor for name, tensor in found.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors")
    specs = {name: TensorSpec(torch.bfloat16, shape) for name, shape in SHAPES.items()}
    specs["norm.weight"] = TensorSpec(torch.bfloat16, (4,))
    said = WeightFiles(tmp_path).check(specs)
    assert len(said) == len(errors), said
    assert all(error in each for error, each in zip(errors, said, strict=True)), said


def test_blocks_larger_than_an_integer_of_torch_are_none(tmp_path: Path) -> None:
    checkpoint(tmp_path, [10**30, 10**30])
    specs = {name: TensorSpec(torch.bfloat16, shape) for name, shape in SHAPES.items()}
    assert f"model.safetensors: {NAME} is F8_E4M3, {READ}" in WeightFiles(tmp_path).check(specs)


@pytest.mark.parametrize("poison", ["a scale", "a code"])
def test_a_weight_that_is_not_finite_is_named(poison: str, tmp_path: Path) -> None:
    found = checkpoint(tmp_path)
    if poison == "a scale":
        found["b.weight_scale_inv"][1, 0] = torch.inf
    else:
        found["b.weight"].view(torch.uint8)[5, 3] = 0x7F
    save_file(found, tmp_path / "model.safetensors")
    wholes = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    parts = [(name, ((0, 0), SHAPES[name]), whole) for name, whole in wholes.items()]
    files = ModelFiles(MODELS["qwen3_moe"], WeightFiles(tmp_path))
    assert fill_parts(parts, files) == {"b.weight"}
    assert files.place("b.weight") == "model.safetensors: b.weight"
