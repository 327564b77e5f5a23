"""Weights in 8 bits with a scale for each block, as DeepSeek-V3 is published, read in fp32."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from parallel.families import fp8_blocks
from parallel.files import read_text
from parallel.weights.boxes import Box


class BlockScales:
    """The size of the blocks that share a scale, rows and columns."""

    def __init__(self, rows: int, columns: int) -> None:
        self.size = rows, columns

    def cover(self, box: Box) -> Box:
        """Return the box of the scales of a box of a matrix."""
        blocks = [
            (start // size, -(-(start + length) // size))
            for start, length, size in zip(*box, self.size, strict=True)
        ]
        return tuple(start for start, _ in blocks), tuple(stop - start for start, stop in blocks)

    def restored(self, weights: torch.Tensor, scales: torch.Tensor, box: Box) -> torch.Tensor:
        """Return a box of a matrix in fp32.

        Args:
            weights: the box, fp8.
            scales: those that `cover` it.
        """
        values = weights.float()
        rows, columns = (
            torch.arange(start, start + length) // size - start // size
            for start, length, size in zip(*box, self.size, strict=True)
        )
        return values.mul_(scales.float()[rows][:, columns])


def block_scales(directory: Path) -> BlockScales | None:
    """Return the blocks that a checkpoint's config.json states, None where it states none.

    Raises:
        OSError, ValueError: there is no config.json, or it is no JSON object.
    """
    config = dict(json.loads(read_text(directory / "config.json")))
    size = fp8_blocks(config.get("quantization_config"))
    return None if size is None else BlockScales(*size)
