"""Boxes of tensors, and ranges of flattened tensors as boxes; never imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes along each dimension


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes, in order, that make up [start, stop) of a flattened tensor.

    Example: elements 2 to 10 of a [3, 4] tensor are the end of a row, a row, and 3 elements.

        >>> list(boxes((3, 4), 2, 11))
        [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 3))]
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    if start % row:
        line, end = start // row, min(stop, start - start % row + row)
        yield from _within(line, boxes(shape[1:], start - line * row, end - line * row))
        start = end
    whole = (stop - start) // row
    if whole > 0:
        yield (start // row, *(0 for _ in shape[1:])), (whole, *shape[1:])
        start += whole * row
    yield from _within(start // row, boxes(shape[1:], 0, stop - start))


def _within(line: int, inner: Iterator[Box]) -> Iterator[Box]:
    for offsets, sizes in inner:
        yield (line, *offsets), (1, *sizes)


def within(box: Box) -> tuple[slice, ...]:
    """Return the index of a box in its tensor."""
    return tuple(slice(start, start + size) for start, size in zip(*box, strict=True))


def along(shape: tuple[int, ...], dimension: int, start: int, size: int) -> Box:
    """Return the box of a tensor that is limited along one dimension.

    Example: rows 2 to 4 of a [6, 4] tensor.

        >>> along((6, 4), dimension=0, start=2, size=3)
        ((2, 0), (3, 4))
    """
    before, after = (0,) * dimension, (0,) * (len(shape) - dimension - 1)
    return (*before, start, *after), (*shape[:dimension], size, *shape[dimension + 1 :])


def intersect(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes of a tensor, or None where it is empty.

    Example: rows 0 and 1 of a [4, 6] tensor, and its lower right [3, 4] corner.

        >>> intersect(((0, 0), (2, 6)), ((1, 2), (3, 4)))
        ((1, 2), (1, 4))
        >>> intersect(((0, 0), (2, 6)), ((2, 0), (2, 6)))
    """
    offsets, sizes = [], []
    for begin, size, other_begin, other_size in zip(*one, *other, strict=True):
        start, stop = max(begin, other_begin), min(begin + size, other_begin + other_size)
        if start >= stop:
            return None
        offsets.append(start)
        sizes.append(stop - start)
    return tuple(offsets), tuple(sizes)
