"""A range of a flattened tensor is cut into few boxes that equal it in order."""

from __future__ import annotations

import itertools

import pytest
import torch

from parallel.weights.boxes import boxes


@pytest.mark.parametrize("shape", [(7,), (3, 4), (4, 1), (1, 5), (2, 3, 4), (2, 1, 3, 2)])
def test_boxes_cover_the_range(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, stop in itertools.combinations(range(tensor.numel() + 1), 2):
        found = list(boxes(shape, start, stop))
        cut = [
            tensor[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))]
            for box in found
        ]
        assert torch.cat([part.flatten() for part in cut]).tolist() == list(range(start, stop))
        assert len(found) <= 2 * len(shape) - 1


def test_an_empty_range_has_none() -> None:
    assert list(boxes((3, 4), 5, 5)) == []
    assert list(boxes((3, 4), 8, 5)) == []
