"""Settings as a tree of plain values: its leaves by their dotted keys. Knows no settings class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested mappings as (dotted key, value); an empty mapping is a leaf."""
    if not isinstance(value, dict) or (prefix and not value):
        yield prefix, value
        return
    for name, child in value.items():
        yield from flatten(child, f"{prefix}.{name}" if prefix else name)


def leaves(tree: dict[str, Any], pattern: str) -> Iterator[tuple[str, Any]]:
    """Every leaf that a dotted pattern names, or that stands below what it names, as `flatten`
    gives them; `*` stands for any one name."""
    found = [("", tree)]
    for part in pattern.split("."):
        found = [
            (f"{prefix}.{name}" if prefix else name, value[name])
            for prefix, value in found
            if isinstance(value, dict)
            for name in (value if part == "*" else [part])
            if name in value
        ]
    for prefix, value in found:
        yield from flatten(value, prefix)
