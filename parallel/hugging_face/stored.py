"""Checks that a checkpoint's tensors can be read, from its files' headers; never imports torch.

A header states each tensor's dtype and shape, so that a run can be refused before it starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

FLOATS = "F32", "BF16", "F16"  # dtypes as safetensors spells them
CODE = "F8_E4M3"  # of a matrix in FP8
SUFFIX = "_scale_inv"  # of the tensor of a matrix's scales, which multiply it

Blocks = tuple[int, int]  # rows and columns of a matrix in FP8 that share a scale


class Stored(NamedTuple):
    """The file, dtype (as safetensors spells it) and shape of a tensor, and its first byte."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


def unreadable(name: str, stored: Mapping[str, Stored], blocks: Blocks | None) -> str | None:
    """Return why the elements of a stored tensor cannot be read, or None.

    `blocks` are None where the checkpoint's config.json states none.
    """
    file, dtype, shape, _ = stored[name]
    if dtype == CODE and blocks is not None:
        if len(shape) != 2:
            return f"{file.name}: {name} is {list(shape)} in FP8, which only matrices may be in"
        grid = tuple(-(-length // size) for length, size in zip(shape, blocks, strict=True))
        if (name := name + SUFFIX) not in stored:
            return f"{name} is missing, the scales of a tensor in FP8 in {file.name}"
        file, dtype, shape, _ = stored[name]
        if shape != grid:
            return f"{file.name}: {name} is {list(shape)}, but should be {list(grid)}"
    if dtype in FLOATS:
        return None
    return f"{file.name}: {name} is {dtype}, but should be one of {', '.join(FLOATS)}"


def scales_of(name: str, stored: Mapping[str, Stored]) -> str | None:
    """Return the tensor in FP8 that a tensor has the scales of, or None."""
    of = name.removesuffix(SUFFIX)
    return of if of != name and of in stored and stored[of].dtype == CODE else None


def mtp_pattern(layers: int) -> str:
    """Return the pattern of the names of multi-token prediction tensors.

    DeepSeek's and GLM's layers are numbered after the model's own; Qwen3.5's are beside the model.
    """
    return rf"^(model\.layers\.{layers}|mtp)\."


def mtp_tensors(stored: Mapping[str, Stored], layers: int) -> Iterator[str]:
    """Yield the names of the multi-token prediction tensors, without scales."""
    for name in stored:
        if re.match(mtp_pattern(layers), name) and scales_of(name, stored) is None:
            yield name


def mtp_errors(stored: Mapping[str, Stored], layers: int, blocks: Blocks | None) -> Iterator[str]:
    """Yield an error for each multi-token prediction tensor that cannot be read."""
    for name in mtp_tensors(stored, layers):
        if name.endswith(SUFFIX):
            yield f"{stored[name].file.name}: {name} is a scale of no tensor in FP8"
        elif (problem := unreadable(name, stored, blocks)) is not None:
            yield problem
