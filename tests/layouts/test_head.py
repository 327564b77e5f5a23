"""`model.head_precision`: the logits of a bf16 model are as exact as its hidden states."""

from __future__ import annotations

import pytest

from tests.layouts import head_cases as cases
from tests.layouts.cases import MATRIX
from tests.ranks import On


@pytest.mark.parametrize("layout", ["1 rank", "TP2"])
def test_the_sums_of_an_fp32_head_are_not_rounded(layout: str, on: On) -> None:
    for rounded, precise in zip(
        on(MATRIX[layout], cases.differences, MATRIX[layout], "model"),
        on(MATRIX[layout], cases.differences, MATRIX[layout], "fp32"),
        strict=True,
    ):
        for way in ("training", "evaluation"):
            assert precise[way] < 1e-4 < 1e-2 < rounded[way], (rounded, precise)
        assert precise["gradient"] < 2**-6  # its operands are bf16
        # The gradient that leaves the head is summed over the ranks.
        assert precise["embedding"] == pytest.approx(rounded["embedding"], rel=0.05)
