"""Fingerprints add up over parts and detect every other change of a tensor."""

from __future__ import annotations

from functools import reduce

import pytest
import torch

from parallel.weights.boxes import Box
from parallel.weights.executor import CHUNK, add_fingerprints, fingerprint

DTYPES = {"fp32": (torch.float32, torch.int32), "bf16": (torch.bfloat16, torch.int16)}
SHAPE = (12, 10)
WHOLE: Box = ((0, 0), SHAPE)


@pytest.fixture(params=DTYPES)
def values(request: pytest.FixtureRequest) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SHAPE, generator=generator).to(DTYPES[request.param][0])


def bits(values: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor as integers."""
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def of_parts(boxes: list[Box], values: torch.Tensor, tensor: str = "w") -> int:
    parts = []
    for offsets, sizes in boxes:
        place = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        parts.append(fingerprint(tensor, (offsets, sizes), values[place]))
    return reduce(add_fingerprints, parts)


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (5, 10)), ((5, 0), (7, 10))],
        [((0, 0), (12, 3)), ((0, 3), (12, 7))],
        [((6, 0), (6, 10)), ((0, 4), (6, 6)), ((0, 0), (6, 4))],  # in any order
        [((row, column), (1, 1)) for row in range(12) for column in range(10)],
    ],
)
def test_parts_add_up_to_the_whole(boxes: list[Box], values: torch.Tensor) -> None:
    assert of_parts(boxes, values) == fingerprint("w", WHOLE, values)


def test_long_tensors_and_vectors_add_up_too() -> None:
    wide = torch.randn(5, CHUNK // 2)  # whose rows are looked at two by two
    whole = fingerprint("w", ((0, 0), tuple(wide.shape)), wide)
    width = wide.shape[1]
    assert whole == of_parts([((0, 0), (3, width)), ((3, 0), (2, width))], wide)
    vector = torch.randn(100)
    whole = fingerprint("w", ((0,), (100,)), vector)
    assert whole == of_parts([((0,), (30,)), ((30,), (70,))], vector)


def test_it_is_read_alike_in_any_memory_order(values: torch.Tensor) -> None:
    transposed = values.t().contiguous().t()
    expected = fingerprint("w", WHOLE, values)
    assert fingerprint("w", WHOLE, transposed) == expected


def test_every_flipped_bit_changes_it(values: torch.Tensor) -> None:
    found = {fingerprint("w", WHOLE, values)}
    for bit in range(8 * values.element_size()):
        flipped = values.clone()
        mask = torch.ones((), dtype=bits(values).dtype) << bit
        bits(flipped)[7, 3] ^= mask
        found.add(fingerprint("w", WHOLE, flipped))
    assert len(found) == 1 + 8 * values.element_size()


def test_the_sign_of_zero_and_kinds_of_nan_count() -> None:
    zeros, nans = torch.zeros(SHAPE), torch.full(SHAPE, torch.nan)
    negative, other = zeros.clone(), nans.clone()
    negative[3, 3] = -0.0
    bits(other)[3, 3] += 1
    for first, second in ((zeros, negative), (nans, other)):
        one, two = (fingerprint("w", WHOLE, each) for each in (first, second))
        assert one != two


def test_moved_and_exchanged_values_change_it(values: torch.Tensor) -> None:
    rows, columns = torch.arange(12), torch.arange(10)
    rows[[2, 10]], columns[[1, 9]] = rows[[10, 2]], columns[[9, 1]]
    moved = torch.zeros_like(values)
    moved[1:] = values[:-1]
    exchanged = values.clone()
    exchanged[0, 0], exchanged[8, 2] = values[8, 2], values[0, 0]
    changed = [values, values[rows], values[:, columns], moved, exchanged, values.flip(0, 1)]
    assert len({fingerprint("w", WHOLE, each) for each in changed}) == len(changed)


def test_the_same_value_in_another_place_or_tensor_is_another_fingerprint() -> None:
    one = torch.ones(1, 1)
    places = [((row, column), (1, 1)) for row in range(64) for column in range(64)]
    found = {fingerprint(tensor, box, one) for tensor in "vw" for box in places}
    assert len(found) == 2 * len(places)
