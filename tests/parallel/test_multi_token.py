"""Tensors for multi-token prediction are checked when they are imported, not when exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from parallel.hugging_face.config import expected_tensors, hugging_face_config
from parallel.hugging_face.files import WeightFiles, WeightsError
from parallel.hugging_face.multi_token import MultiTokenTensors
from parallel.hugging_face.weights import ModelFiles, start_errors
from parallel.settings import ModelSettings
from pipeline.config.checkpoints import weights_violation
from tests.layouts.hugging_face_cases import MODELS

MODEL = MODELS["deepseek_v3"]
LAYER = f"model.layers.{MODEL.layers}"
UP = f"{LAYER}.mlp.up_proj.weight"
SCALES = f"{UP}_scale_inv"
FILE = "model.safetensors"


def checkpoint(
    directory: Path, change: dict[str, torch.Tensor | None] | None = None
) -> ModelSettings:
    """Write a checkpoint with an MTP layer; return the settings that start from it."""
    config = hugging_face_config(MODEL)
    given = config.to_dict() | {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}
    }
    (directory / "config.json").write_text(json.dumps(given, default=str))
    drawn: dict[str, torch.Tensor | None] = {
        name: torch.zeros(spec.shape, dtype=spec.dtype)
        for name, spec in expected_tensors(config).items()
    }
    drawn |= {
        f"{LAYER}.eh_proj.weight": torch.ones(64, 128).bfloat16(),
        UP: torch.ones(64, 40).to(torch.float8_e4m3fn),
        SCALES: torch.ones(4, 3),
    }
    drawn |= change or {}
    kept = {name: tensor for name, tensor in drawn.items() if tensor is not None}
    save_file(kept, directory / FILE)
    return MODEL.model_copy(update={"initial_weights": directory})


@pytest.mark.parametrize(
    ("key", "value"),
    [("vocab_size", "x"), ("head_dim", []), ("id2label", 1), ("dtype", []), ("head_dim", 1e400)],
)
def test_a_config_that_transformers_refuses_is_an_error(
    key: str, value: object, tmp_path: Path
) -> None:
    """Whatever it raises: StrictDataclassError, AttributeError, IndexError or OverflowError."""
    config = hugging_face_config(MODEL).to_dict() | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    errors = start_errors(MODEL, tmp_path)
    assert errors[-1].startswith("config.json: transformers refuses it: ")
    assert "\n" not in errors[-1]


def test_tensors_that_are_read_are_no_error(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    assert weights_violation(tmp_path, model) is None
    assert start_errors(model, tmp_path) == []
    found = dict(MultiTokenTensors(model).stream())
    assert list(found) == [f"{LAYER}.eh_proj.weight", UP]
    assert torch.equal(found[UP].float(), torch.ones(64, 40))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({SCALES: None}, f"{SCALES} is missing, the scales of a tensor in FP8 in {FILE}"),
        (
            {f"{LAYER}.count": torch.ones(1).long()},
            f"{FILE}: {LAYER}.count is I64, but should be one of F32, BF16, F16",
        ),
        *(
            (
                {SCALES: torch.ones(*shape)},
                f"{FILE}: {SCALES} is {list(shape)}, but should be [4, 3]",
            )
            for shape in ((1, 1), (8, 8))
        ),
        (
            {SCALES: torch.ones(4, 3).byte()},
            f"{FILE}: {SCALES} is U8, but should be one of F32, BF16, F16",
        ),
        (
            {
                f"{LAYER}.hnorm.weight": torch.ones(64).to(torch.float8_e4m3fn),
                f"{LAYER}.hnorm.weight_scale_inv": torch.ones(4),
            },
            f"{FILE}: {LAYER}.hnorm.weight is [64] in FP8, which only matrices may be in",
        ),
        (
            {UP: torch.ones(64, 40).bfloat16()},
            f"{FILE}: {SCALES} is a scale of no tensor in FP8",
        ),
    ],
)
def test_a_tensor_that_is_not_read_is_named_before_anything_is_trained(
    change: dict[str, torch.Tensor | None], error: str, tmp_path: Path
) -> None:
    model = checkpoint(tmp_path, change)
    assert error in (weights_violation(tmp_path, model) or "")
    assert start_errors(model, tmp_path) == [error]
    with pytest.raises(WeightsError, match="cannot be read"):
        MultiTokenTensors(model)
    # A teacher's are never read.
    assert weights_violation(tmp_path, MODEL) is None
    assert start_errors(MODEL, tmp_path) == []


@pytest.mark.parametrize("name", [f"{LAYER}.eh_proj.weight", SCALES])
def test_a_tensor_that_is_not_finite_is_named(name: str, tmp_path: Path) -> None:
    shape = (64, 128) if name != SCALES else (4, 3)
    poisoned = torch.ones(shape)
    poisoned[1, 2] = torch.nan
    checkpoint(tmp_path, {name: poisoned, f"{LAYER}.z": torch.ones(0)})
    files = ModelFiles(MODEL, WeightFiles(tmp_path))
    shares = [files.broken_mtp(MODEL.layers, rank, 2) for rank in range(2)]
    assert sorted(map(len, shares)) == [0, 1]
    assert set.union(*shares) == {name.removesuffix("_scale_inv")}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_an_export_needs_no_start_that_has_no_such_tensors(family: str, tmp_path: Path) -> None:
    model = MODELS["qwen3_moe"].model_copy(
        update={"family": family, "initial_weights": tmp_path / "gone"}
    )
    assert MultiTokenTensors(model).specs == {}


def test_an_export_without_the_start_it_copies_from_says_so(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    model = MODEL.model_copy(update={"initial_weights": gone})
    with pytest.raises(WeightsError) as caught:
        MultiTokenTensors(model)
    assert str(caught.value) == (
        f"{gone}: no such directory: an export copies the layers for multi-token prediction of a"
        " deepseek_v3 model from there; put the checkpoint back, or a link to it"
    )
