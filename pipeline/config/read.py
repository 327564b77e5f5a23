"""YAML files as a tree that remembers where every key was written, with `extends: FILE` resolved.

A tree is made of `Mapping` and `Leaf`. A list is a leaf: an extending file replaces it whole.
Reading collects errors in `Reader.violations`, so that a person sees all of them at once. It raises
only where a file, or what it extends, is too large to be a configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from parallel.files import open_file
from pipeline.config.violations import ConfigError, SourceLocation, Violation, dotted, hint
from pipeline.config.yaml_core import (
    MOST_DEPTH,
    MOST_NODES,
    BadScalar,
    TooDeep,
    TooMany,
    compose,
    has_surrogate,
    scalar,
)

MOST_BYTES = 8 << 20  # of a file

Key = tuple[str, ...]
MOST_EXTENDING = 32  # files, each by the one before: Python's stack holds some hundred
MOST_ERRORS = 1000  # then no further file is read; nor put into words, which takes longest

# The mappings whose names a person chooses and which hold blocks; `*` stands for every domain.
FREE_NAMES: tuple[Key, ...] = (("domains",), ("domains", "*", "rewards"))


@dataclass(frozen=True)
class Leaf:
    """A scalar or a list, and where it was written; `replaces` a whole mapping, or nothing."""

    value: Any
    place: SourceLocation
    replaces: bool = False


@dataclass(frozen=True)
class Mapping:
    """A mapping's entries by key, and where the mapping was written."""

    entries: dict[str, Node]
    place: SourceLocation


Node = Leaf | Mapping


class Reader:
    """Reads files and command-line values into trees.

    `violations` holds every fault found; `broken` is true when a file could not be read at all, so
    that what is missing from the tree says nothing about the configuration.
    """

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.broken = False
        self._open: list[Path] = []
        self._nodes = 0  # of all documents, each as often as it is extended
        # What many domains extend is read once, and its errors are reported once. With each file is
        # how many nodes it has, and how deep it was: deeper, it may be nested too deeply.
        self._faultless: dict[Path, tuple[Mapping, int, int]] = {}

    def file(self, path: Path, key: Key = ()) -> Mapping:
        """Return the mapping in a file, which stands at `key` of the whole, with its `extends`.

        Raises ConfigError where the whole has more than MOST_NODES keys and values.
        """
        if path in self._faultless and len(key) <= self._faultless[path][2]:
            tree, nodes, _ = self._faultless[path]
            self._count(nodes, SourceLocation(path))
            return tree
        faults, before = len(self.violations), self._nodes
        tree = self._read(path, key)
        if len(self.violations) == faults:
            self._faultless[path] = tree, self._nodes - before, len(key)
        return tree

    def _count(self, nodes: int, place: SourceLocation) -> None:
        self._nodes += nodes
        if self._nodes > MOST_NODES:
            many = f"more than {MOST_NODES} keys and values, with those of extended files"
            raise ConfigError([Violation(place, "", many)])

    def _read(self, path: Path, key: Key) -> Mapping:
        place = SourceLocation(path)
        try:
            text = _text(path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            return self._unreadable(place, key, f"cannot be read: {reason}")
        self._open.append(path.resolve())
        try:
            return self._mapping_of(text, path, key)
        finally:
            self._open.pop()

    def value(self, text: str, key: Key) -> Node | None:
        """A value given on the command line, or None where it is no YAML.

        Relative paths in it start at the working directory.
        """
        place = SourceLocation(None)
        if has_surrogate(text):  # how Python takes in arguments that are no UTF-8
            self._note(place, key, "not UTF-8 text")
            return None
        try:
            composed, nodes = compose(text)
        except (TooDeep, TooMany) as error:
            self._note(place, key, str(error))
            return None
        except yaml.YAMLError as error:
            self._note(place, key, f"not a YAML value: {_problem(error)}")
            return None
        self._count(nodes, place)
        return Leaf(None, place) if composed is None else self._node(composed, place, key)

    def _mapping_of(self, text: str, path: Path, key: Key) -> Mapping:
        place = SourceLocation(path)
        try:
            composed, nodes = compose(text)
        except TooDeep as error:
            return self._unreadable(
                SourceLocation(path, error.line), (*key, *error.key), str(error)
            )
        except TooMany as error:
            where = SourceLocation(path, error.line)
            raise ConfigError([Violation(where, dotted(key), str(error))]) from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = SourceLocation(path, mark.line + 1) if mark else place
            return self._unreadable(where, key, f"not valid YAML: {_problem(error)}")
        self._count(nodes, place)
        if composed is None:
            return Mapping({}, SourceLocation(path, 1))
        node = self._node(composed, SourceLocation(path, composed.start_mark.line + 1), key)
        if isinstance(node, Mapping):
            return node
        return self._unreadable(node.place, key, "the file should hold a mapping of keys to values")

    def _node(self, node: yaml.Node, place: SourceLocation, key: Key) -> Node:
        if not isinstance(node, yaml.MappingNode):
            return Leaf(self._item(node, place, key), place)
        if len(key) > MOST_DEPTH:
            self._note(place, key, str(TooDeep(0, key)))
            return Leaf(None, place)
        return self._mapping(node, place, key)

    def _item(self, node: yaml.Node, place: SourceLocation, key: Key) -> Any:
        """The plain value of a scalar, or of a list and of all that stands in it."""
        if len(key) > MOST_DEPTH:
            self._note(place, key, str(TooDeep(0, key)))
        elif isinstance(node, yaml.ScalarNode):
            try:
                return scalar(node)
            except BadScalar as error:
                self._note(place, key, str(error))
        elif isinstance(node, yaml.SequenceNode):
            return [
                self._item(child, place.at(child.start_mark.line + 1), (*key, str(number)))
                for number, child in enumerate(node.value)
            ]
        else:
            entries: dict[str, Any] = {}
            taken: set[str] = set()
            for key_node, value_node in node.value:
                where = place.at(key_node.start_mark.line + 1)
                if (name := self._name(key_node, where, key, taken)) is not None:
                    entries[name] = self._item(value_node, where, (*key, name))
            return entries
        return None

    def _mapping(self, node: yaml.MappingNode, place: SourceLocation, key: Key) -> Mapping:
        entries: dict[str, Node] = {}
        taken: set[str] = set()
        base: Mapping | None = None
        for key_node, value_node in node.value:
            where = place.at(key_node.start_mark.line + 1)
            if (name := self._name(key_node, where, key, taken)) is None:
                continue
            if name == "extends":
                base = self._extended(value_node, where, key)
            else:
                entries[name] = self._node(value_node, where, (*key, name))
        own = Mapping(entries, place)
        return own if base is None else merge(base, own)

    def _name(
        self, node: yaml.Node, place: SourceLocation, key: Key, taken: set[str]
    ) -> str | None:
        """The name that a mapping at `key` gives an entry, or None where it cannot have it; it is
        added to those that are `taken`."""
        name = str(node.value)
        if has_surrogate(name):
            self._note(place, (*key, name), "the key holds a surrogate, half of a character")
        elif name in taken:
            self._note(place, (*key, name), "the key is given twice in this mapping")
        else:
            taken.add(name)
            return name
        return None

    def _extended(self, node: yaml.Node, place: SourceLocation, key: Key) -> Mapping:
        if not isinstance(node, yaml.ScalarNode) or not node.value:
            return self._unreadable(place, (*key, "extends"), "should be the path of one file")
        if len(self.violations) >= MOST_ERRORS:  # files with errors are read each time again
            self.broken = True
            return Mapping({}, place)
        path = place.beside(node.value)
        try:
            resolved, is_file = path.resolve(), path.is_file()
            missing = "not a file" if path.exists() else "no such file"
        except (OSError, RuntimeError, ValueError) as error:  # no path at all, or a loop of links
            return self._unreadable(place, (*key, "extends"), f"cannot be followed: {error}")
        if resolved in self._open:
            message = f"{SourceLocation(path)} extends itself through this line"
            return self._unreadable(place, (*key, "extends"), message)
        if len(self._open) >= MOST_EXTENDING:
            message = f"more than {MOST_EXTENDING} files extend one another; shorten the chain"
            return self._unreadable(place, (*key, "extends"), message)
        if not is_file:
            message = f"{missing}: {SourceLocation(path)}"
            return self._unreadable(place, (*key, "extends"), message)
        return self.file(path, key)

    def _note(self, place: SourceLocation, key: Key, message: str) -> None:
        self.violations.append(Violation(place, dotted(key), message))

    def _unreadable(self, place: SourceLocation, key: Key, message: str) -> Mapping:
        self._note(place, key, message)
        self.broken = True
        return Mapping({}, place)


def merge(base: Mapping, over: Mapping) -> Mapping:
    """`over` laid upon `base`: mappings are merged key by key, everything else is replaced."""
    entries = dict(base.entries)
    for name, node in over.entries.items():
        entries[name] = _over(entries.get(name), node)
    return Mapping(entries, over.place)


def lay(tree: Mapping, key: Key, node: Node) -> Mapping:
    """The tree with `node` laid over what stands at `key`; the mappings around it stay."""
    name, rest = key[0], key[1:]
    below = tree.entries.get(name)
    if rest:
        node = lay(below if isinstance(below, Mapping) else Mapping({}, node.place), rest, node)
    else:
        node = _over(below, node)
    return Mapping({**tree.entries, name: node}, tree.place)


def plain(node: Node) -> Any:
    """The tree as dictionaries, lists and scalars."""
    if isinstance(node, Leaf):
        return node.value
    return {name: plain(child) for name, child in node.entries.items()}


def find(node: Node, key: tuple[str | int, ...]) -> Node | None:
    """What stands at `key`, or None."""
    for part in key:
        if not isinstance(node, Mapping) or part not in node.entries:
            return None
        node = node.entries[str(part)]
    return node


def nearest(node: Node, key: tuple[str | int, ...]) -> SourceLocation:
    """Where `key` was written, or else the deepest mapping on the way to it."""
    for part in key:
        if not isinstance(node, Mapping) or part not in node.entries:
            break
        node = node.entries[str(part)]
    return node.place


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


def _over(below: Node | None, node: Node) -> Node:
    if not isinstance(below, Mapping):
        return node
    return merge(below, node) if isinstance(node, Mapping) else replace(node, replaces=True)


def _text(path: Path) -> str:
    """Return a file's text. Raises OSError, and ValueError with the reason, where it has none."""
    with open_file(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"has more than {MOST_BYTES >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError("not a UTF-8 text file") from None


def _problem(error: Exception) -> str:
    """What is wrong, on one line; `but found another document` says nothing without its context."""
    problem, context = (getattr(error, name, None) for name in ("problem", "context"))
    whole = f"{context}, {problem}" if problem and problem.startswith("but ") else problem
    return " ".join(str(whole or error).split())
