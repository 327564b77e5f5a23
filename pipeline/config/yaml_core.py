"""YAML documents as nodes with the scalars of YAML 1.2's core schema, and their writer.

PyYAML reads YAML 1.1, in which 010 is 8, 1:30 is 90 and `no` is false. Aliases and tags are errors:
an alias would give one value two source locations, and a tag could only repeat the scalar's form.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.scanner import Scanner

# In one document, and in all files of a configuration, where those of an extended file count each
# time: some seconds of reading. A domain with every key written out has about 280, so that the
# run.yaml of 1,000 domains has 280,000; MOST_BYTES of read.py end before this limit there.
MOST_NODES = 1_000_000
MOST_DEPTH = 64  # pydantic reads JSON of at most twice this depth
# Beyond this size the C parser's message stands: PyYAML's own parser has better messages, and reads
# some 100 KiB/s.
SLOWLY_READ = 1 << 18
SURROGATE = re.compile("[\ud800-\udfff]")

CORE: dict[str, tuple[str, str]] = {  # by tag: the form, and its first characters
    "null": (r"~|null|Null|NULL|", "~nN"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
}


FORMS = {tag: re.compile(form) for tag, (form, _) in CORE.items()}


class TooDeep(Exception):
    """A document nested deeper than MOST_DEPTH, at `line` and below `key` (up to a list)."""

    def __init__(self, line: int, key: tuple[str, ...]) -> None:
        super().__init__("nested too deeply")
        self.line = line
        self.key = key


class TooMany(Exception):
    """A document of more than MOST_NODES keys and values; `line` exceeds the limit."""

    def __init__(self, line: int) -> None:
        super().__init__(f"more than {MOST_NODES} keys and values")
        self.line = line


class BadScalar(ValueError):
    """A scalar that no setting can have; the message says why."""


@dataclass(slots=True)
class ScalarNode:
    """A scalar: its text, its tag in the core schema, and its line, from 1."""

    text: str
    tag: str
    line: int


@dataclass(slots=True)
class ListNode:
    """A list; `line` is its first."""

    items: list[Node]
    line: int


@dataclass(slots=True)
class MappingNode:
    """A mapping, with the keys as they are in the file; `line` is its first."""

    entries: list[tuple[ScalarNode, Node]]
    line: int


Node = ScalarNode | ListNode | MappingNode


class _Composer:
    """A composer of a parser's events into nodes, in half the time of PyYAML's.

    It refuses aliases, tags, and more than MOST_NODES or MOST_DEPTH.
    """

    def __init__(self, parser: Any) -> None:
        self.nodes = 0
        self._next = parser.get_event
        self._path: list[str | None] = []  # keys of the containers above; None for a list's items

    def document(self) -> Node | None:
        """Return the root of the only document, or None where there is none."""
        self._next()  # of the stream's start
        if isinstance(self._next(), StreamEndEvent):
            return None
        root = self._node(self._next())
        self._next()  # of the document's end
        event = self._next()
        if isinstance(event, DocumentStartEvent):
            problem = "but found another document"
            context = "expected a single document in the stream"
            mark: Any = event.start_mark
            raise yaml.MarkedYAMLError(context, None, problem, mark)
        return root

    def _node(self, event: Any) -> Node:
        kind, line = type(event), event.start_mark.line + 1
        if kind is AliasEvent:
            raise _refused(event, "aliases are not supported; share values with extends")
        if event.tag is not None:
            shown = event.tag.replace("tag:yaml.org,2002:", "!!")
            advice = "is not supported; write the plain value, and quote text"
            raise _refused(event, f"the tag {shown} {advice}")
        self.nodes += 1
        if self.nodes > MOST_NODES:
            raise TooMany(line)
        if len(self._path) > MOST_DEPTH:
            raise TooDeep(line, _keys(self._path))
        if kind is ScalarEvent:
            return ScalarNode(event.value, _tag(event.value) if event.implicit[0] else "str", line)
        if kind is SequenceStartEvent:
            return ListNode(self._items(), line)
        return MappingNode(self._entries(), line)

    def _items(self) -> list[Node]:
        nodes = []
        self._path.append(None)
        while type(event := self._next()) is not SequenceEndEvent:
            nodes.append(self._node(event))
        self._path.pop()
        return nodes

    def _entries(self) -> list[tuple[ScalarNode, Node]]:
        entries = []
        self._path.append("")
        while type(event := self._next()) is not MappingEndEvent:
            key = self._node(event)
            if not isinstance(key, ScalarNode):
                raise _refused(event, "keys must be text")
            self._path[-1] = key.text
            entries.append((key, self._node(self._next())))
        self._path.pop()
        return entries


def _refused(event: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def _keys(path: list[str | None]) -> tuple[str, ...]:
    """Return the mapping keys at the start of the composer's path, up to the first list."""
    keys = []
    for key in path:
        if key is None:
            break
        keys.append(key)
    return tuple(keys)


@lru_cache(maxsize=4096)  # most values of a large file are those of a few settings
def _tag(text: str) -> str:
    """Return a plain scalar's tag in the core schema."""
    return next((tag for tag, form in FORMS.items() if form.fullmatch(text)), "str")


class _Parser(Reader, Scanner, Parser):
    """PyYAML's own parser."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)


# The fastest comes first. The last one reports the error, so that the message does not depend on
# how PyYAML was built.
PARSERS: list[Any] = [_Parser]
if yaml.__with_libyaml__:
    from yaml._yaml import CParser

    PARSERS.insert(0, CParser)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """A dumper that quotes text which YAML 1.1 or 1.2 would read as another value.

    libyaml's dumper is ten times as fast as PyYAML's own and writes the same bytes.
    """


for _name, (_form, _first) in CORE.items():
    _Dumper.add_implicit_resolver(
        f"tag:yaml.org,2002:{_name}",
        re.compile(f"^(?:{_form})$"),
        [*_first, *([""] if _name == "null" else [])],
    )


class _LineDumper(_Dumper):
    """A dumper that keeps text with line breaks on one line, in double quotes."""


def _text_on_a_line(dumper: Any, text: str) -> Any:
    style = '"' if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_LineDumper.add_representer(str, _text_on_a_line)


def compose(text: str) -> tuple[Node | None, int]:
    """Return the document's root, or None where it is empty, and the number of nodes.

    Raises YAMLError, TooDeep or TooMany.
    """
    *faster, last = PARSERS
    for parser in faster:
        try:
            return _composed_by(parser(text))
        except yaml.YAMLError:
            if len(text) > SLOWLY_READ:
                raise
    return _composed_by(last(text))


def _composed_by(parser: Any) -> tuple[Node | None, int]:
    try:
        composer = _Composer(parser)
        return composer.document(), composer.nodes
    finally:
        parser.dispose()


def dump(values: Any) -> str:
    """Return plain values as YAML that reads back unchanged."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=100))


def dump_line(value: Any) -> str:
    """Return a plain value as YAML on one line that reads back unchanged."""
    text = str(
        yaml.dump(value, Dumper=_LineDumper, default_flow_style=True, sort_keys=False, width=10**6)
    )
    return text.removesuffix("\n").removesuffix("\n...")


def scalar(node: ScalarNode) -> Any:
    """Return a scalar's value. Raises BadScalar where no setting can have it."""
    return _value(node.text, node.tag)


@lru_cache(maxsize=4096)
def _value(text: str, tag: str) -> Any:
    if tag == "null":
        return None
    if tag == "bool":
        return text.lower() == "true"
    if tag == "int":
        return _integer(text)
    if tag == "float":
        return _number(text)
    if has_surrogate(text):
        raise BadScalar("contains a lone surrogate, which UTF-8 cannot encode")
    return text


def has_surrogate(text: str) -> bool:
    """Return whether a text has a lone surrogate, which UTF-8 cannot encode."""
    return not text.isascii() and SURROGATE.search(text) is not None


def _integer(text: str) -> int:
    if re.fullmatch(r"[-+]?0[0-9]+", text):
        raise BadScalar(
            f"{text} has a leading zero: octal in YAML 1.1, decimal in 1.2; remove the zero, or "
            "quote text"
        )
    number = 2**63 if len(text) > 66 else int(text, 0)
    if abs(number) >= 2**63:
        raise BadScalar("the integer does not fit in 64 bits")
    return number


def _number(text: str) -> float:
    number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if not math.isfinite(number):
        raise BadScalar(f"{number} is not finite; use a finite number")
    return number
