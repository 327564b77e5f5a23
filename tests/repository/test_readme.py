"""The README names only what is there, and leaves nothing to fill in."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_nothing_is_left_to_fill_in() -> None:
    assert re.findall(r"@[A-Z]+@|TODO|TBD", README) == []


def test_every_file_that_is_named_exists() -> None:
    named = re.findall(r"`((?:configs|docs|benchmarks|stages|parallel|tests)/[\w./-]+)`", README)
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []
