"""Divergences and extrapolated targets are exact for all ranks and chunk sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from parallel.settings import LayoutSettings
from tests.layouts import divergence_cases as cases
from tests.layouts.test_vocabulary import split  # noqa: F401  the fixture
from tests.layouts.vocabulary_cases import ROWS, SIZE
from tests.ranks import On

VALUE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-6}
GRADIENT = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 4e-3}


@pytest.mark.parametrize("name", cases.NAMES)
def test_values_and_gradients_are_the_reference(name: str, split: LayoutSettings, on: On) -> None:  # noqa: F811
    for dtype in VALUE:
        for rows in (1, 3, ROWS):
            ranks = on(split, cases.errors, name, dtype, rows)
            size = np.abs(ranks[0]["values"]).max(initial=1)
            for found in ranks:
                assert found["value"] < VALUE[dtype]
                assert found["gradient"] < GRADIENT[dtype] * size
                wide = torch.float64 if dtype is torch.float64 else torch.float32
                assert found["dtypes"] == {wide, dtype}
                np.testing.assert_array_equal(found["values"], ranks[0]["values"])


@pytest.mark.parametrize("name", cases.NAMES)
def test_gradients_are_the_derivatives(name: str, on: On) -> None:
    assert on(LayoutSettings(), cases.gradcheck, name) == [True]


def test_logits_of_any_size_keep_their_precision(split: LayoutSettings, on: On) -> None:  # noqa: F811
    """A JSD is bounded, however far apart two models are."""
    for dtype in (torch.float64, torch.float32):
        for found in on(split, cases.errors, "jsd", dtype, 3, 1e4):
            assert found["value"] < VALUE[dtype]
            assert found["gradient"] < GRADIENT[dtype]
            assert np.abs(found["values"]).max() <= np.log(2)


def test_equal_logits_have_no_divergence(split: LayoutSettings, on: On) -> None:  # noqa: F811
    for dtype in VALUE:
        assert all(all(zero) for zero in on(split, cases.equal_sets, dtype))


def test_no_rows(split: LayoutSettings, on: On) -> None:  # noqa: F811
    part = SIZE // split.tensor
    for found in on(split, cases.no_rows):
        assert found == len(cases.NAMES) * [(0,), (0, part)]


def test_padding_to_minus_infinity_changes_nothing(on: On) -> None:
    [found] = on(LayoutSettings(), cases.padded)
    assert max(found) < 1e-12


@pytest.mark.parametrize("rows", [1, ROWS])
def test_collectives_do_not_grow_with_the_chunks(rows: int, split: LayoutSettings, on: On) -> None:  # noqa: F811
    gather = split.tensor > 1
    # Both normalisers and the sums; of a nucleus two normalisers, and its most likely ids.
    counts = {"jsd": 3, "rest": 1, "everywhere": 1, "nucleus": 2 + 3 + 1}
    for used in on(split, cases.collectives, rows):
        assert used == {name: gather * n * ["all_gather"] for name, n in counts.items()}


def test_no_full_precision_tensor_is_larger_than_a_chunk(split: LayoutSettings, on: On) -> None:  # noqa: F811
    chunk = 2 * 40 * SIZE // split.tensor
    for used in on(split, cases.largest_temporaries, 2):
        assert set(used.values()) == {chunk}
