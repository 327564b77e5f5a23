"""The README is short and leaves nothing to fill in."""

from __future__ import annotations

import re

from tests.runs import REPOSITORY

README = (REPOSITORY / "README.md").read_text()


def test_nothing_is_left_to_fill_in() -> None:
    assert re.findall(r"@[A-Z]+@|TODO|TBD", README) == []


def test_it_has_at_most_130_lines() -> None:
    assert len(README.splitlines()) <= 130
