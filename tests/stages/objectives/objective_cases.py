"""Helpers of the objectives' tests: float64 tensors, and a batch of uneven responses."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from tests.runs import REPOSITORY

LENGTHS = [3, 0, 5, 1]
MASK = torch.arange(5) < torch.tensor(LENGTHS)[:, None]


def documented() -> set[str]:
    """Return the algorithms with a row in the page of objectives: the project's own.

    One that a branch adds without a row needs neither a formula in the audit nor numbers here.
    """
    page = (REPOSITORY / "docs" / "explanation" / "objectives.md").read_text()
    return set(re.findall(r"^\|[^|]*\| `(\w+)` \|", page, re.MULTILINE))


def real(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_close(actual: Tensor, expected: object, tolerance: float = 1e-6) -> None:
    expected_tensor = expected if isinstance(expected, Tensor) else real(expected)
    torch.testing.assert_close(actual.detach(), expected_tensor, atol=tolerance, rtol=0)


def draws(count: int, seed: int = 0) -> list[Tensor]:
    """Return `count` tensors [4, 5] of log-probabilities, in [-1, 0]."""
    generator = torch.Generator().manual_seed(seed)
    return [-torch.rand(4, 5, generator=generator, dtype=torch.float64) for _ in range(count)]


def slope(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6) -> Tensor:
    """Return the gradient of a scalar function by central differences."""
    gradient = torch.zeros_like(at)
    for place in range(at.numel()):
        moved = torch.zeros_like(at)
        moved.view(-1)[place] = step
        difference = function(at + moved) - function(at - moved)
        gradient.view(-1)[place] = difference.detach() / (2 * step)
    return gradient
