"""Experts in 4 bits with a scale for each 32 inputs (MXFP4), as gpt-oss is published, read in bf16.

A checkpoint has `NAME_blocks`, uint8 [experts, outputs, inputs / 32, 16], two inputs in a byte, the
lower bits first, and `NAME_scales`, uint8 [experts, outputs, inputs / 32], exponents of 2 plus 127,
for the tensor NAME, [experts, inputs, outputs].
"""

from __future__ import annotations

import torch

from parallel.weights.boxes import Box

BLOCKS, SCALES = "_blocks", "_scales"
INPUTS = 32  # that share a scale
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def packed_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the blocks and the scales of a tensor, by the ends of their names."""
    experts, inputs, outputs = shape
    scales = experts, outputs, -(-inputs // INPUTS)
    return {BLOCKS: (*scales, INPUTS // 2), SCALES: scales}


def unpacked_shape(scales: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the tensor that has scales of this shape."""
    experts, outputs, groups = scales
    return experts, INPUTS * groups, outputs


def packed_box(box: Box) -> Box:
    """Return the box of the scales of a box of a tensor."""
    (expert, input_start, column), (experts, inputs, columns) = box
    start, stop = input_start // INPUTS, -(-(input_start + inputs) // INPUTS)
    return (expert, column, start), (experts, columns, stop - start)


def unpacked(blocks: torch.Tensor, scales: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a box of a tensor, bf16, exactly.

    `blocks` and `scales` are those of its `packed_box`.
    """
    table = torch.tensor((*POSITIVE, *(-magnitude for magnitude in POSITIVE)), dtype=torch.bfloat16)
    pairs = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    values = torch.ldexp(table[pairs.int()], scales.int()[..., None] - 127).flatten(-2)
    offset, size = box[0][1] % INPUTS, box[1][1]
    return values[..., offset : offset + size].transpose(1, 2)
