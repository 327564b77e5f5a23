"""Tests that only `make test-all` runs are marked, and never all tests of a property."""

from __future__ import annotations

import pytest

from tests.tiers import tiered


def test_what_is_kept_must_be_there() -> None:
    assert [len(each.marks) for each in tiered([1, 2, 3], {2})] == [1, 0, 1]
    assert [len(each.marks) for each in tiered([(1, 2), (3, 4)], lambda a, b: b > 2)] == [1, 0]
    with pytest.raises(ValueError, match="every case"):
        tiered([1, 2], {3})
