"""YAML files as a tree that remembers where every key was written, with `extends: FILE` resolved.

A tree is made of `Mapping` and `Leaf`. A list is a leaf: an extending file replaces it whole.
Reading never raises for a fault in a file: faults are collected in `Reader.violations`, so that a
person sees all of them at once.
"""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from pipeline.violations import Place, Violation, dotted

Key = tuple[str, ...]
MOST_EXTENDING = 32  # files, each by the one before: Python's stack holds some hundred
MOST_ERRORS = 1000  # then no further file is read


@dataclass(frozen=True)
class Leaf:
    """A scalar or a list, and where it was written; `replaces` a whole mapping, or nothing."""

    value: Any
    place: Place
    replaces: bool = False


@dataclass(frozen=True)
class Mapping:
    """A mapping's entries by key, and where the mapping was written."""

    entries: dict[str, Node]
    place: Place


Node = Leaf | Mapping


class _WithoutAliases(Composer):
    """An alias would give one value two places; `extends` is the way to share."""

    def compose_node(self: Any, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="aliases are not supported; share values with extends",
                problem_mark=self.peek_event().start_mark,
            )
        return Composer.compose_node(self, parent, index)


class _Loader(_WithoutAliases, yaml.SafeLoader):
    """YAML whose `4e-3` is a number: YAML 1.1 wants `4.0e-3`."""


# The fastest first: any that reads the text will do, and the last one says what is wrong with it,
# so that the message is the same whatever PyYAML was built with.
LOADERS: list[Any] = [_Loader]
if yaml.__with_libyaml__:
    from yaml._yaml import CParser

    class _FastLoader(_WithoutAliases, CParser, SafeConstructor, Resolver):
        """The same over the C library's parser."""

        def __init__(self, stream: str) -> None:
            CParser.__init__(self, stream)
            Composer.__init__(self)
            SafeConstructor.__init__(self)
            Resolver.__init__(self)

    LOADERS.insert(0, _FastLoader)

for _each in LOADERS:
    _each.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


class _TooDeep(Exception):
    """Lists in lists, or mappings in mappings, without end; where it became too many."""

    def __init__(self, line: int) -> None:
        super().__init__("nested too deeply")
        self.line = line


def _compose(text: str) -> yaml.Node | None:
    """The document as a tree, or None where it is empty. Raises YAMLError, _TooDeep."""
    *faster, last = LOADERS
    for loader in faster:
        with contextlib.suppress(yaml.YAMLError):
            return _composed_by(loader(text))
    return _composed_by(last(text))


def _composed_by(loader: Any) -> yaml.Node | None:
    try:
        found: yaml.Node | None = loader.get_single_node()
    except RecursionError:
        raise _TooDeep(loader.peek_event().start_mark.line + 1) from None
    finally:
        loader.dispose()
    return found


class Reader:
    """Reads files and command-line values into trees.

    `violations` holds every fault found; `broken` is true when a file could not be read at all, so
    that what is missing from the tree says nothing about the configuration.
    """

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.broken = False
        self._open: list[Path] = []
        # What many domains extend is read once; its faults would be told for each of them.
        self._faultless: dict[Path, Mapping] = {}

    def file(self, path: Path, key: Key = ()) -> Mapping:
        """The mapping in a file, which stands at `key` of the whole; `extends` is resolved."""
        if path not in self._faultless:
            faults = len(self.violations)
            tree = self._read(path, key)
            if len(self.violations) > faults:
                return tree
            self._faultless[path] = tree
        return self._faultless[path]

    def _read(self, path: Path, key: Key) -> Mapping:
        place = Place(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a UTF-8 text file"
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
        place = Place(None)
        try:
            composed = _compose(text)
        except _TooDeep as error:
            self._note(place, key, str(error))
            return None
        except yaml.YAMLError as error:
            self._note(place, key, f"not a YAML value: {_problem(error)}")
            return None
        return Leaf(None, place) if composed is None else self._node(composed, place, key)

    def _mapping_of(self, text: str, path: Path, key: Key) -> Mapping:
        place = Place(path)
        try:
            composed = _compose(text)
        except _TooDeep as error:
            return self._unreadable(Place(path, error.line), key, str(error))
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = Place(path, mark.line + 1) if mark else place
            return self._unreadable(where, key, f"not valid YAML: {_problem(error)}")
        if composed is None:
            return Mapping({}, Place(path, 1))
        node = self._node(composed, Place(path, composed.start_mark.line + 1), key)
        if isinstance(node, Mapping):
            return node
        return self._unreadable(node.place, key, "the file should hold a mapping of keys to values")

    def _node(self, node: yaml.Node, place: Place, key: Key) -> Node:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place, key)
        try:
            value = _plain(node)
        except (yaml.YAMLError, ValueError) as error:
            self._note(place, key, f"not a value: {_problem(error)}")
            return Leaf(None, place)
        if isinstance(value, int) and abs(value) >= 2**63:
            self._note(place, key, "too large a number")
            return Leaf(None, place)
        if not _is_json(value):
            self._note(place, key, f"{value} is not a finite number, text, true, false or null")
        return Leaf(value, place)

    def _mapping(self, node: yaml.MappingNode, place: Place, key: Key) -> Mapping:
        entries: dict[str, Node] = {}
        base: Mapping | None = None
        for key_node, value_node in node.value:
            name = str(key_node.value)
            where = place.at(key_node.start_mark.line + 1)
            if name in entries or (name == "extends" and base is not None):
                self._note(where, (*key, name), "the key is given twice in this mapping")
            elif name == "extends":
                base = self._extended(value_node, where, key)
            else:
                entries[name] = self._node(value_node, where, (*key, name))
        own = Mapping(entries, place)
        return own if base is None else merge(base, own)

    def _extended(self, node: yaml.Node, place: Place, key: Key) -> Mapping:
        if not isinstance(node, yaml.ScalarNode) or not node.value:
            return self._unreadable(place, (*key, "extends"), "should be the path of one file")
        if len(self.violations) >= MOST_ERRORS:  # files with errors are read each time again
            self.broken = True
            return Mapping({}, place)
        path = place.beside(node.value)
        try:
            resolved, exists = path.resolve(), path.is_file()
        except (OSError, RuntimeError, ValueError) as error:  # no path at all, or a loop of links
            return self._unreadable(place, (*key, "extends"), f"cannot be followed: {error}")
        if resolved in self._open:
            message = f"{Place(path)} extends itself through this line"
            return self._unreadable(place, (*key, "extends"), message)
        if len(self._open) >= MOST_EXTENDING:
            message = f"more than {MOST_EXTENDING} files extend one another; shorten the chain"
            return self._unreadable(place, (*key, "extends"), message)
        if not exists:
            return self._unreadable(place, (*key, "extends"), f"no such file: {Place(path)}")
        return self.file(path, key)

    def _note(self, place: Place, key: Key, message: str) -> None:
        self.violations.append(Violation(place, dotted(key), message))

    def _unreadable(self, place: Place, key: Key, message: str) -> Mapping:
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


def nearest(node: Node, key: tuple[str | int, ...]) -> Place:
    """Where `key` was written, or else the deepest mapping on the way to it."""
    for part in key:
        if not isinstance(node, Mapping) or part not in node.entries:
            break
        node = node.entries[str(part)]
    return node.place


def _over(below: Node | None, node: Node) -> Node:
    if not isinstance(below, Mapping):
        return node
    return merge(below, node) if isinstance(node, Mapping) else replace(node, replaces=True)


def _plain(node: yaml.Node) -> Any:
    return SafeConstructor().construct_document(node)


def _is_json(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_json(item) for name, item in value.items())
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int | bool)


def _problem(error: Exception) -> str:
    """What is wrong, on one line; `but found another document` says nothing without its context."""
    problem, context = (getattr(error, name, None) for name in ("problem", "context"))
    whole = f"{context}, {problem}" if problem and problem.startswith("but ") else problem
    return " ".join(str(whole or error).split())
