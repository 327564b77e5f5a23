"""YAML files as a tree with the source location of every key and `extends` resolved.

A tree consists of `Mapping` and `Leaf`. A list is a leaf: an extending file replaces it whole.
`Reader.violations` collects all errors, so that they are reported together; reading raises only
where a file and the files it extends are too large.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from parallel.errors import UserError, hint
from parallel.files import open_file
from pipeline.config import yaml_core
from pipeline.config.yaml_core import (
    MOST_DEPTH,
    MOST_NODES,
    BadScalar,
    ListNode,
    MappingNode,
    ScalarNode,
    TooDeep,
    TooMany,
    compose,
    has_surrogate,
    scalar,
)
from pipeline.text import shown, visible

CONFIGS = Path(__file__).parents[2] / "configs"
MOST_BYTES = 8 << 20  # of a file
Key = tuple[str, ...]
MOST_EXTENDING = 32  # files in a chain of extends; each is several frames of Python's stack
MOST_ERRORS = 1000  # then no further file is read, and no further message is formatted

# Mappings from free names to blocks, where null deletes an inherited name. Everywhere else null is
# a value, such as `stop: null`. `*` stands for every name.
FREE_NAMES: tuple[Key, ...] = (
    ("domains",),
    ("domains", "*", "rewards"),
    ("stages",),
    ("stages", "*", "teachers"),
    ("stages", "*", "teachers", "*"),
    ("stages", "*", "data"),
)
# Limits that keep a message on one screen, whatever a file holds.
MOST_SHOWN = 50
LONGEST_KEY = 200
LONGEST_MESSAGE = 1000
LONGEST_VALUE = 200


@dataclass(frozen=True)
class SourceLocation:
    """A file and a line; the file is None for the command line."""

    file: Path | None
    line: int | None = None

    def at(self, line: int) -> SourceLocation:
        """Return another line of this file."""
        return self if self.file is None else SourceLocation(self.file, line)

    def beside(self, path: str) -> Path:
        """Resolve a path that is written here: relative to this file's directory."""
        directory = Path() if self.file is None else self.file.parent
        return Path(os.path.normpath(directory / path))

    def __str__(self) -> str:
        if self.file is None:
            return "command line"
        return shown(self.file) + ("" if self.line is None else f":{self.line}")


@dataclass(frozen=True)
class Violation:
    """One error, printed on one line as `file:line: key: message`, whatever the key holds."""

    place: SourceLocation
    key: str
    message: str

    def __str__(self) -> str:
        key, message = shortened(self.key, LONGEST_KEY), shortened(self.message, LONGEST_MESSAGE)
        return visible(": ".join(text for text in (str(self.place), key, message) if text))


class ConfigError(UserError):
    """An invalid configuration. Its message shows the first MOST_SHOWN violations.

    `more` counts violations that were found and are not in `violations`.
    """

    def __init__(self, violations: Sequence[Violation], more: int = 0) -> None:
        self.violations = tuple(violations)
        count = len(self.violations) + more
        title = f"{count} configuration error{'s' if count > 1 else ''}:"
        lines = [title, *map(str, self.violations[:MOST_SHOWN])]
        if len(lines) <= count:
            lines.append(f"... and {count + 1 - len(lines)} more")
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Leaf:
    """A scalar or a list at its source location; `replaces` says that it overrides something."""

    value: Any
    place: SourceLocation
    replaces: bool = False


@dataclass(frozen=True)
class Mapping:
    """The entries of a mapping, by key, at its source location."""

    entries: dict[str, Node]
    place: SourceLocation


Node = Leaf | Mapping


class Reader:
    """A reader of files and command-line values into trees.

    `violations` holds every error. `broken` is true once a file could not be read: a key that is
    missing from the tree may then be in that file.
    """

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.broken = False
        self._open: list[Path] = []
        self._nodes = 0  # of all documents, counted each time that one is extended
        # A file that many domains extend is parsed once, if it has no errors. Its tree is kept with
        # its nodes and its depth: further down it may exceed MOST_DEPTH and is read again.
        self._valid: dict[Path, tuple[Mapping, int, int]] = {}

    def file(self, path: Path, key: Key = ()) -> Mapping:
        """Return the mapping in a file, with its `extends`, to stand at `key` of the configuration.

        Raises ConfigError where all files together have more than MOST_NODES keys and values.
        """
        if path in self._valid and len(key) <= self._valid[path][2]:
            tree, nodes, _ = self._valid[path]
            self._count(nodes, SourceLocation(path))
            return tree
        errors, before = len(self.violations), self._nodes
        tree = self._read(path, key)
        if len(self.violations) == errors:
            self._valid[path] = tree, self._nodes - before, len(key)
        return tree

    def _count(self, nodes: int, place: SourceLocation) -> None:
        self._nodes += nodes
        if self._nodes > MOST_NODES:
            many = f"more than {MOST_NODES} keys and values, including extended files"
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
        """Return a value from the command line, or None where it is not valid YAML."""
        place = SourceLocation(None)
        if has_surrogate(text):  # Python decodes invalid UTF-8 in arguments to surrogates
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
        node = self._node(composed, SourceLocation(path, composed.line), key)
        if isinstance(node, Mapping):
            return node
        return self._unreadable(node.place, key, "the file must be a mapping of keys to values")

    def _node(self, node: yaml_core.Node, place: SourceLocation, key: Key) -> Node:
        if not isinstance(node, MappingNode):
            return Leaf(self._item(node, place, key), place)
        if len(key) > MOST_DEPTH:
            self._note(place, key, str(TooDeep(0, key)))
            return Leaf(None, place)
        return self._mapping(node, place, key)

    def _item(self, node: yaml_core.Node, place: SourceLocation, key: Key) -> Any:
        """Return the plain value of a scalar, or of a list with everything in it."""
        if len(key) > MOST_DEPTH:
            self._note(place, key, str(TooDeep(0, key)))
        elif isinstance(node, ScalarNode):
            try:
                return scalar(node)
            except BadScalar as error:
                self._note(place, key, str(error))
        elif isinstance(node, ListNode):
            return [
                self._item(child, place.at(child.line), (*key, str(number)))
                for number, child in enumerate(node.items)
            ]
        else:
            entries = self._entries(node, place, key)
            return {name: self._item(child, where, (*key, name)) for name, child, where in entries}
        return None

    def _mapping(self, node: MappingNode, place: SourceLocation, key: Key) -> Mapping:
        entries: dict[str, Node] = {}
        base: Mapping | None = None
        for name, child, where in self._entries(node, place, key):
            if name == "extends":
                base = self._bases(child, where, key)
            else:
                entries[name] = self._node(child, where, (*key, name))
        mapping = Mapping(entries, place)
        return mapping if base is None else merge(base, mapping)

    def _entries(
        self, node: MappingNode, place: SourceLocation, key: Key
    ) -> Iterator[tuple[str, yaml_core.Node, SourceLocation]]:
        """Yield the name, value and location of a mapping's valid entries; note the others."""
        taken: set[str] = set()
        for key_node, value_node in node.entries:
            where, name = place.at(key_node.line), key_node.text
            if has_surrogate(name):
                surrogate = "the key contains a lone surrogate, which UTF-8 cannot encode"
                self._note(where, (*key, name), surrogate)
            elif name in taken:
                self._note(where, (*key, name), "duplicate key in this mapping")
            else:
                taken.add(name)
                yield name, value_node, where

    def _bases(self, node: yaml_core.Node, place: SourceLocation, key: Key) -> Mapping:
        """Return the mapping in a file, or in a list of files, each merged into those before it."""
        if not isinstance(node, ListNode):
            return self._extended(node, place, key)
        files = [(child, place.at(child.line)) for child in node.items]
        if not files:
            return self._unreadable(place, (*key, "extends"), "must name at least one file")
        bases = (self._extended(child, where, key) for child, where in files)
        return reduce(merge, bases)

    def _extended(self, node: yaml_core.Node, place: SourceLocation, key: Key) -> Mapping:
        key_here = (*key, "extends")
        if not isinstance(node, ScalarNode) or not node.text or "\0" in node.text:
            return self._unreadable(
                place, key_here, "must be the path of a file, or a list of paths"
            )
        if len(self.violations) >= MOST_ERRORS:  # a file with errors is parsed every time
            self.broken = True
            return Mapping({}, place)
        path = place.beside(node.text)
        if path in self._valid and len(self._open) < MOST_EXTENDING:
            return self.file(path, key)  # of 1,000 domains' one file, 999 times
        try:
            resolved, is_file = path.resolve(), path.is_file()
            missing = "not a file" if path.exists() else "no such file"
            shipped = _shipped(node.text)
        except (OSError, RuntimeError) as error:  # too long a name, or a symlink loop
            return self._unreadable(place, key_here, f"cannot be followed: {error}")
        if resolved in self._open:
            message = f"{SourceLocation(path)} extends itself through this line"
        elif len(self._open) >= MOST_EXTENDING:
            message = f"a chain of more than {MOST_EXTENDING} files; extend fewer"
        elif not is_file:
            message = f"{missing}: {SourceLocation(path)}"
            if shipped is not None:
                message += f"; a path is relative to the file that it is in; Braid's own: {shipped}"
        else:
            return self.file(path, key)
        return self._unreadable(place, key_here, message)

    def _note(self, place: SourceLocation, key: Key, message: str) -> None:
        self.violations.append(Violation(place, dotted(key), message))

    def _unreadable(self, place: SourceLocation, key: Key, message: str) -> Mapping:
        self._note(place, key, message)
        self.broken = True
        return Mapping({}, place)


def merge(base: Mapping, over: Mapping) -> Mapping:
    """Merge `over` into `base`: mappings key by key, everything else is replaced."""
    entries = dict(base.entries)
    for name, node in over.entries.items():
        entries[name] = _over(entries.get(name), node)
    return Mapping(entries, over.place)


def override_at(tree: Mapping, key: Key, node: Node) -> Mapping:
    """Return the tree with the value at `key` overridden by `node`."""
    name, inner_key = key[0], key[1:]
    below = tree.entries.get(name)
    if inner_key:
        below = below if isinstance(below, Mapping) else Mapping({}, node.place)
        node = override_at(below, inner_key, node)
    else:
        node = _over(below, node)
    return Mapping({**tree.entries, name: node}, tree.place)


def plain(node: Node) -> Any:
    """Return the tree as dictionaries, lists and scalars."""
    if isinstance(node, Leaf):
        return node.value
    return {name: plain(child) for name, child in node.entries.items()}


def find(node: Node, key: tuple[str | int, ...]) -> Node | None:
    """Return the node at `key`, or None."""
    for name in key:
        if not isinstance(node, Mapping) or name not in node.entries:
            return None
        node = node.entries[str(name)]
    return node


def nearest(node: Node, key: tuple[str | int, ...]) -> SourceLocation:
    """Return the location of `key`, or else of the deepest mapping above it."""
    for name in key:
        if not isinstance(node, Mapping) or name not in node.entries:
            break
        node = node.entries[str(name)]
    return node.place


def key_in(tree: Mapping, name: str) -> Key:
    """Return a dotted key as the names in a tree, one of which may wrongly hold a dot itself."""
    node: Node | None = tree
    names: list[str] = []
    remainder = f"{name}."
    while remainder:
        entries = node.entries if isinstance(node, Mapping) else {}
        fits = [candidate for candidate in entries if remainder.startswith(f"{candidate}.")]
        next_name = max(fits, key=len, default=remainder.partition(".")[0])
        names.append(next_name)
        node, remainder = entries.get(next_name), remainder[len(next_name) + 1 :]
    return tuple(names)


def matching(tree: Mapping, pattern: Key) -> Iterator[Key]:
    """Yield the keys of a tree that match a pattern; `*` stands for every name."""
    first, *rest = pattern
    for name in tree.entries if first == "*" else (first,):
        if not rest:
            yield (name,)
        elif isinstance(node := tree.entries.get(name), Mapping):
            yield from ((name, *more) for more in matching(node, tuple(rest)))


def apply_deletions(tree: Mapping) -> tuple[Mapping, list[Violation]]:
    """Return the tree without names that are null, and an error for each that deletes nothing."""
    errors: list[Violation] = []
    for key in [key for pattern in FREE_NAMES for key in matching(tree, pattern)]:
        if not isinstance(mapping := find(tree, key), Mapping):
            continue
        entries = mapping.entries.items()
        nulls = {n: leaf for n, leaf in entries if isinstance(leaf, Leaf) and leaf.value is None}
        defined = [name for name, _ in entries if name not in nulls or nulls[name].replaces]
        for name, leaf in nulls.items():
            if not leaf.replaces:
                message = (
                    f"null deletes an inherited name, and there is none; {hint(name, defined)}"
                )
                errors.append(Violation(leaf.place, dotted((*key, name)), message))
        remaining = {name: node for name, node in entries if name not in nulls}
        tree = replaced(tree, key, Mapping(remaining, mapping.place))
    return tree, errors


def replaced(tree: Node | None, key: Key, node: Mapping) -> Mapping:
    """Return the tree with another mapping at a key."""
    if not key:
        return node
    assert isinstance(tree, Mapping)
    below = replaced(tree.entries[key[0]], key[1:], node)
    return Mapping({**tree.entries, key[0]: below}, tree.place)


def _over(below: Node | None, node: Node) -> Node:
    if isinstance(node, Mapping):
        return merge(below, node) if isinstance(below, Mapping) else node
    stated = isinstance(below, Mapping) or (isinstance(below, Leaf) and below.value is not None)
    return replace(node, replaces=stated)


def _shipped(name: str) -> Path | None:
    """Return the file of `configs/` that a path names as if it were written there or above."""
    paths = (directory / name for directory in (CONFIGS, CONFIGS.parent))
    shipped = (path for path in paths if path.is_relative_to(CONFIGS) and path.is_file())
    return next(shipped, None)


def _text(path: Path) -> str:
    """Return a file's text. Raises OSError, or ValueError with the reason."""
    with open_file(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError("not a UTF-8 text file") from None


def check_readable(path: Path, text: str) -> None:
    """Raise ConfigError where a file with this text would be too large to read again."""
    if len(text.encode()) > MOST_BYTES:
        why = f"would be larger than {MOST_BYTES >> 20} MiB, with all defaults; use fewer domains"
        raise ConfigError([Violation(SourceLocation(path), "", f"{why} or stages")])


def _problem(error: Exception) -> str:
    """Return a YAML error on one line, with its context where the problem begins with `but`."""
    problem, context = (getattr(error, name, None) for name in ("problem", "context"))
    whole = f"{context}, {problem}" if problem and problem.startswith("but ") else problem
    return " ".join(str(whole or error).split())


def shortened(text: str, longest: int) -> str:
    """Return a text, cut off after `longest` characters."""
    return text if len(text) <= longest else f"{text[:longest]}..."


def dotted(key: Iterable[str | int]) -> str:
    """Return `("layout", "ranks")` as `layout.ranks`."""
    return ".".join(map(str, key))
