"""Checkpoints of any size whose files are headers before a hole: tensors take no disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from parallel.settings import ModelSettings
from parallel.weights.names import stored_tensors

# The model of the smallest configuration, `conftest.CONFIG`.
SMALL = ModelSettings(
    vocabulary_size=80,
    hidden_size=96,
    layers=4,
    attention_heads=4,
    key_value_heads=2,
    head_dim=32,
    experts=8,
    experts_per_token=2,
    expert_hidden_size=96,
)


def write_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write a safetensors file of BF16 tensors of these shapes, all zeros in a hole of the file."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write_checkpoint(directory: Path, model: ModelSettings = SMALL) -> None:
    """Write model.safetensors with all tensors of a model."""
    shapes = {name: shape for name, shape, _ in stored_tensors(model)}
    write_tensors(directory / "model.safetensors", shapes)
