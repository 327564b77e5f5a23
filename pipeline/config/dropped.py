"""Names that a file drops again: `null` in a mapping of free names, laid over what it `extends`.

Everywhere else null is a value, such as `merge: null`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.read import Key, Leaf, Mapping, find
from pipeline.config.violations import Violation, dotted, hint

# The mappings whose names a person chooses and which hold blocks; `*` stands for every domain.
FREE_NAMES: tuple[Key, ...] = (("domains",), ("domains", "*", "rewards"))


def without_dropped(tree: Mapping) -> tuple[Mapping, list[Violation]]:
    """The tree without the names that are null, and a fault for every one that drops nothing."""
    faults: list[Violation] = []
    for pattern in FREE_NAMES:
        for key in _named(tree, pattern):
            tree = _without(tree, key, _dropped(tree, key, faults))
    return tree, faults


def _named(tree: Mapping, pattern: Key) -> Iterator[Key]:
    """Every mapping of the tree that a pattern names."""
    domains = find(tree, ("domains",))
    names = list(domains.entries) if isinstance(domains, Mapping) else []
    for name in names if "*" in pattern else [""]:
        key = tuple(name if part == "*" else part for part in pattern)
        if isinstance(find(tree, key), Mapping):
            yield key


def _dropped(tree: Mapping, key: Key, faults: list[Violation]) -> set[str]:
    """The names in the mapping at `key` that are null."""
    mapping = find(tree, key)
    assert isinstance(mapping, Mapping)
    nulls = {n: e for n, e in mapping.entries.items() if isinstance(e, Leaf) and e.value is None}
    known = [n for n, e in mapping.entries.items() if n not in nulls or _replaces(e)]
    for name, leaf in nulls.items():
        if not leaf.replaces:
            message = "null drops what an extended file defines, and none defines it"
            message += f"; {hint(name, known)}"
            faults.append(Violation(leaf.place, dotted((*key, name)), message))
    return set(nulls)


def _replaces(node: object) -> bool:
    return isinstance(node, Leaf) and node.replaces


def _without(tree: Mapping, key: Key, names: set[str]) -> Mapping:
    if not key:
        kept = {name: node for name, node in tree.entries.items() if name not in names}
        return Mapping(kept, tree.place)
    below = tree.entries[key[0]]
    assert isinstance(below, Mapping)
    return Mapping({**tree.entries, key[0]: _without(below, key[1:], names)}, tree.place)
