"""Vocabulary-parallel functions are exact for all ranks, chunk sizes and kept sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from parallel.settings import LayoutSettings
from tests.layouts import vocabulary_cases as cases
from tests.ranks import On

# Error bounds of fp32 sums of a few dozen terms, and of one rounding to bf16.
VALUE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-6}
GRADIENT = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 4e-3}


@pytest.fixture(
    params=[pytest.param(1, marks=pytest.mark.one_device), 2, 4], ids=lambda ranks: f"TP{ranks}"
)
def split(request: pytest.FixtureRequest) -> LayoutSettings:
    """A layout that splits the vocabulary over 1, 2 or 4 ranks."""
    return LayoutSettings(ranks=request.param, tensor=request.param)


def assert_small(found: dict, name: str, dtype: torch.dtype) -> None:
    assert found["value"] < VALUE[dtype]
    # KL's gradient is p times the difference of two numbers that are as large as KL.
    size = np.abs(found["values"]).max(initial=1) if name.startswith("kl") else 1
    assert max(found["gradients"].values()) < GRADIENT[dtype] * size


@pytest.mark.parametrize("masked", [False, True], ids=["all", "kept"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", cases.NAMES)
def test_values_and_gradients_are_the_reference(
    name: str, temperature: float, masked: bool, split: LayoutSettings, on: On
) -> None:
    for dtype in VALUE:
        for rows in (1, 3, cases.ROWS):
            ranks = on(split, cases.errors, name, dtype, temperature, masked, rows)
            for found in ranks:
                assert_small(found, name, dtype)
                wide = torch.float64 if dtype is torch.float64 else torch.float32
                assert found["dtypes"] == {wide, dtype}
                np.testing.assert_array_equal(found["values"], ranks[0]["values"])


@pytest.mark.parametrize("masked", [False, True], ids=["all", "kept"])
@pytest.mark.parametrize("name", cases.NAMES)
def test_gradients_are_the_derivatives(name: str, masked: bool, on: On) -> None:
    assert on(LayoutSettings(), cases.gradcheck, name, masked) == [True]


@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize(("scale", "shift"), [(1e4, 0.0), (3.0, 1e5), (1e4, -1e5)])
def test_logits_of_any_size_keep_their_precision(
    name: str, scale: float, shift: float, split: LayoutSettings, on: On
) -> None:
    for dtype in (torch.float64, torch.float32):
        for masked in (False, True):
            for found in on(split, cases.errors, name, dtype, 2.0, masked, 3, scale, shift):
                assert_small(found, name, dtype)


@pytest.mark.parametrize("lazy", [False, True], ids=["whole", "lazy"])
@pytest.mark.parametrize("tied", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize("k", [1, 5, 15, cases.SIZE])
def test_top_k_is_that_of_the_whole_vocabulary(
    k: int, tied: bool, lazy: bool, split: LayoutSettings, on: On
) -> None:
    for dtype in VALUE:
        ranks = on(split, cases.likeliest, k, dtype, tied, lazy, 3)
        for values, ids, error, same_ids in ranks:
            assert same_ids
            assert error < VALUE[dtype]
            np.testing.assert_array_equal(values, ranks[0][0])
            np.testing.assert_array_equal(ids, ranks[0][1])


def test_top_k_of_more_than_the_vocabulary_is_refused(split: LayoutSettings, on: On) -> None:
    message = f"top_k: k = {cases.SIZE + 1} exceeds the vocabulary's {cases.SIZE} ids; lower k"
    assert set(on(split, cases.too_many)) == {message}


def test_vector_6(split: LayoutSettings, on: On) -> None:
    p, q = [0.7, 0.2, 0.1], [0.5, 0.3, 0.2]
    ranks = on(split, cases.divergences, p, q)
    for found in ranks:
        assert found["reverse"] == pytest.approx(0.0851228, abs=1e-7)
        assert found["forward"] == pytest.approx(0.0920329, abs=1e-7)
        assert found["jsd"] == pytest.approx(0.0219012, abs=1e-7)
    gradient = [value for found in ranks for value in found["gradient"]]
    assert gradient == pytest.approx([0.1759446, -0.0981176, -0.0778270, 0], abs=1e-7)
    for corrected, plain in on(split, cases.top_two, p, q):
        assert corrected == pytest.approx(0.0544375, abs=1e-7)
        assert plain == pytest.approx(0.1544375, abs=1e-7)


def test_vector_10_and_a_target_outside_its_kept_set(split: LayoutSettings, on: On) -> None:
    for found in on(split, cases.keep_mask, [0.5, 0.3, 0.15, 0.05], [0, 1, 2]):
        assert found[0] == pytest.approx(-0.6418539, abs=1e-7)
        assert np.exp(found[:3]).sum() == pytest.approx(1)
        assert found[3] == pytest.approx(np.log(0.05))  # the target joins the set
        assert found[4] == pytest.approx(-0.6931472, abs=1e-7)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "kept"])
def test_equal_logits_have_no_divergence(masked: bool, split: LayoutSettings, on: On) -> None:
    for dtype in VALUE:
        assert all(all(zero) for zero in on(split, cases.equal_sets, dtype, masked))


def test_no_rows(split: LayoutSettings, on: On) -> None:
    part = cases.SIZE // split.tensor
    shapes = [(0,), (0, 3), (0,), (0,), (0,), (0, part), (0, 2), (0, 2)]
    for found in on(split, cases.no_rows):
        assert found == shapes


def test_padding_to_minus_infinity_and_not_a_number(split: LayoutSettings, on: On) -> None:
    assert all(all(held) for held in on(split, cases.infinite))


@pytest.mark.parametrize("rows", [1, cases.ROWS])
def test_collectives_do_not_grow_with_the_chunks(rows: int, split: LayoutSettings, on: On) -> None:
    gather = ["all_gather"] if split.tensor > 1 else []
    for used in on(split, cases.collectives, rows):
        assert used.pop("top_k") == 3 * gather
        assert all(seen == gather for seen in used.values())


def test_no_full_precision_tensor_is_larger_than_a_chunk(split: LayoutSettings, on: On) -> None:
    chunk = 2 * 40 * cases.SIZE // split.tensor
    for used in on(split, cases.largest_temporaries, 2):
        assert set(used.values()) == {chunk}
