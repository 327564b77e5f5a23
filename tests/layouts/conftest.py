"""One set of ranks of each size serves the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    """A single process."""
    ranks = Ranks(1, expert=1)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two ranks with the experts split between them."""
    ranks = Ranks(2, expert=2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_replicas() -> Iterator[Ranks]:
    """Two ranks that each hold the whole model."""
    ranks = Ranks(2, expert=1)
    yield ranks
    ranks.close()
