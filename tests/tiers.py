"""The choice of a test's cases for `make test`; the other cases are `make test-all`'s."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def tiered(cases: Iterable[Any], kept: Collection[Any] | Callable[..., bool]) -> list[Any]:
    """Return parameters for `cases`, marked as combinations unless they are `kept`.

    A case of several arguments is a tuple. `kept` holds cases, or says of the arguments of one
    whether it is kept.

    Raises:
        ValueError: no case is kept, so that `make test` would lose the property.
    """
    found, left = [], 0
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        if kept(*values) if callable(kept) else case in kept:
            found.append(pytest.param(*values))
            left += 1
        else:
            found.append(pytest.param(*values, marks=pytest.mark.combinations))
    if not left:
        raise ValueError(f"every case is a combination: {kept}")
    return found
