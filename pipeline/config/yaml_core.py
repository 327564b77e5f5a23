"""YAML documents as PyYAML nodes with the scalars of YAML 1.2's core schema, and their writer.

PyYAML reads YAML 1.1, in which 010 is 8, 1:30 is 90 and `no` is false. Aliases and tags are errors:
an alias would give one value two source locations, and a tag could only repeat the scalar's form.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

# In one document, and in all files of a configuration: some seconds of reading. A domain with every
# key written out has about 280.
MOST_NODES = 150_000
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


class _Composer(Composer):
    """A composer that refuses aliases, tags, and more than MOST_NODES or MOST_DEPTH."""

    def compose_node(self: Any, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()
        if self.check_event(yaml.AliasEvent):
            problem = "aliases are not supported; share values with extends"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        if (tag := event.tag) is not None:
            shown = tag.replace("tag:yaml.org,2002:", "!!")
            problem = f"the tag {shown} is not supported; write the plain value, and quote text"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        line = event.start_mark.line + 1
        self.nodes += 1
        if self.nodes > MOST_NODES:
            raise TooMany(line)
        if len(self.path) > MOST_DEPTH:
            raise TooDeep(line, _keys(self.path))
        self.path.append(index)
        node = Composer.compose_node(self, parent, index)
        self.path.pop()
        is_key = isinstance(parent, yaml.MappingNode) and index is None
        if is_key and not isinstance(node, yaml.ScalarNode):
            problem = "keys must be text"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return node


def _keys(path: list[Any]) -> tuple[str, ...]:
    """Return the mapping keys at the start of the composer's path, up to the first list."""
    keys = []
    for index in path[1:]:  # the first is the document
        if not isinstance(index, yaml.ScalarNode):
            break
        keys.append(str(index.value))
    return tuple(keys)


class _Core(BaseResolver):
    """A resolver of plain scalars by YAML 1.2's core schema."""


class _Loader(Reader, Scanner, Parser, _Composer, _Core):
    """A loader on PyYAML's own parser."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)
        self.nodes = 0
        self.path: list[Any] = []


# The fastest comes first. The last one reports the error, so that the message does not depend on
# how PyYAML was built.
LOADERS: list[Any] = [_Loader]
if yaml.__with_libyaml__:
    from yaml._yaml import CParser

    class _FastLoader(_Composer, CParser, _Core):
        """A loader on libyaml's parser."""

        def __init__(self, text: str) -> None:
            CParser.__init__(self, text)
            Composer.__init__(self)
            BaseResolver.__init__(self)
            self.nodes = 0
            self.path: list[Any] = []

    LOADERS.insert(0, _FastLoader)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """A dumper that quotes text which YAML 1.1 or 1.2 would read as another value.

    libyaml's dumper is ten times as fast as PyYAML's own and writes the same bytes.
    """


for _tag, (_form, _first) in CORE.items():
    for _each in (_Core, _Dumper):
        _each.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}",
            re.compile(f"^(?:{_form})$"),
            [*_first, *([""] if _tag == "null" else [])],
        )


def compose(text: str) -> tuple[yaml.Node | None, int]:
    """Return the document's root, or None where it is empty, and the number of nodes.

    Raises YAMLError, TooDeep or TooMany.
    """
    *faster, last = LOADERS
    for loader in faster:
        try:
            return _composed_by(loader(text))
        except yaml.YAMLError:
            if len(text) > SLOWLY_READ:
                raise
    return _composed_by(last(text))


def _composed_by(loader: Any) -> tuple[yaml.Node | None, int]:
    try:
        return loader.get_single_node(), loader.nodes
    finally:
        loader.dispose()


def dump(values: Any) -> str:
    """Return plain values as YAML that reads back unchanged."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=100))


def scalar(node: yaml.ScalarNode) -> Any:
    """Return a scalar's value. Raises BadScalar where no setting can have it."""
    text, tag = str(node.value), node.tag.rpartition(":")[2]
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
    return SURROGATE.search(text) is not None


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
