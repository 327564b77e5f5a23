"""One set of ranks of each size serves the whole session, under one layout after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ranks import Ranks

from parallel.settings import LayoutSettings

On = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def on() -> Iterator[On]:
    """`on(layout, function, *arguments)`: what the function returns on each of its ranks."""
    started: dict[int, Ranks] = {}

    def run(layout: LayoutSettings, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if layout.ranks not in started:
            started[layout.ranks] = Ranks(layout.ranks)
        return started[layout.ranks](layout, function, *arguments)

    yield run
    for ranks in started.values():
        ranks.close()
