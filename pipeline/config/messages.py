"""The messages of pydantic's errors, each at its key's location in a tree."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any, get_args

from pydantic_core import ErrorDetails

from parallel.errors import hint, nearest_name
from parallel.families import ADDING_A_FAMILY, FAMILIES
from parallel.settings import Settings
from pipeline.config import schema
from pipeline.config.cluster import ClusterSettings
from pipeline.config.read import LONGEST_VALUE, Mapping, Violation, dotted, find, nearest, shortened
from stages.kinds import Kind
from stages.kinds.kind import KINDS
from stages.settings import RunSettings

MISSING = ("missing", "union_tag_not_found")  # pydantic's errors of a key that is not there
MAPPING = "a mapping of keys to values"
# Ends pydantic's location of a wrong key; only a cluster's kinds have a closed set.
OF_KEY = "[key]"
FAMILY = ("model", "family")


def violations_below(
    root: type[Settings], tree: Mapping, error: ErrorDetails
) -> Iterator[Violation]:
    """Yield the unknown keys of a block with an unknown tag, or none: pydantic skips the block."""
    if error["type"] not in ("union_tag_invalid", "union_tag_not_found"):
        return
    root = schema_of(root)
    key = schema.without_arms(root, error["loc"])
    block, annotation = find(tree, key), schema.type_at(root, key)
    fields = schema.fields(annotation)
    for name, node in block.entries.items() if isinstance(block, Mapping) else ():
        if name not in fields:
            message = unknown(annotation, name, fields)
            yield Violation(node.place, dotted((*key, name)), message)


def violation_of(root: type[Settings], tree: Mapping, error: ErrorDetails) -> Violation:
    root = schema_of(root)
    key = schema.without_arms(root, error["loc"])
    if error["type"] == "extra_forbidden" and (unfit := _unfit(root, tree, error["loc"])):
        return unfit
    if key[-1:] == (OF_KEY,):
        key = key[:-1]
        message = f"unknown kind; {hint(str(key[-1]), get_args(Kind))}"
        return Violation(nearest(tree, key), dotted(key), message)
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        key = (*key, schema.tag(schema.type_at(root, key)))
    return Violation(nearest(tree, key), dotted(key), _message(root, error))


def _unfit(root: type[Settings], tree: Mapping, location: schema.Key) -> Violation | None:
    """Return the violation of a tag, such as `source`, that an earlier file's key does not fit.

    None where the tag is not stated later than the key.
    """
    union, key = schema.type_at(root, location[:-2]), schema.without_arms(root, location)
    if len(location) < 2 or location[-2] not in schema.arms(union):
        return None
    tag = (*key[:-1], schema.tag(union))
    block, stated, selected = find(tree, key[:-1]), find(tree, key), find(tree, tag)
    if block is None or stated is None or selected is None or key[-1] not in schema.fields(union):
        return None
    # A merged block is at the last file that states any key of it.
    later = selected.place.file in (None, block.place.file)
    if not later or selected.place.file == stated.place.file:
        return None
    other = ", or extend another file, such as domains/_base.yaml" if key[0] == "domains" else ""
    message = (
        f"{location[-2]} has no key {key[-1]}, which {stated.place} states; set {dotted(key)} to "
        f"null{other}"
    )
    return Violation(selected.place, dotted(tag), message)


def schema_of(root: type[Settings]) -> type[Settings]:
    """Return the schema that violations' keys belong to: a domain's are those in a run."""
    return ClusterSettings if root is ClusterSettings else RunSettings


def _message(root: type[Settings], error: ErrorDetails) -> str:
    if not error["loc"]:
        return str(error["msg"])
    *parent, name = error["loc"]
    if error["type"] in MISSING:
        return "required key is missing"
    if error["type"] == "extra_forbidden":
        annotation = schema.type_at(root, tuple(parent))
        return unknown(annotation, str(name), schema.fields(annotation))
    if error["type"] == "union_tag_invalid":
        tags, tag = error["ctx"]["expected_tags"], str(error["ctx"]["tag"])
        near = nearest_name(tag, (expected.strip("'") for expected in tags.split(", ")))
        arms = " or ".join(tags.rsplit(", ", 1))
        return f"should be {arms}, not {json.dumps(tag)}{f'; {near}' if near else ''}"
    if error["type"] == "too_short":
        least, length = error["ctx"]["min_length"], error["ctx"]["actual_length"]
        return f"should have at least {least} {'item' if least == 1 else 'items'}, not {length}"
    stated = "a mapping" if isinstance(error["input"], dict) else json.dumps(error["input"])
    stated = shortened(stated, LONGEST_VALUE)
    if error["type"] == "bool_type":
        return f"should be true or false, not {stated}"
    reason = error["msg"].removeprefix("Input ").replace("an object", MAPPING)
    reason = reason.replace("a valid array", "a list")
    reason = reason.replace("a valid dictionary or object to extract fields from", MAPPING)
    if (*error["loc"],) == FAMILY:
        near = nearest_name(str(error["input"]), FAMILIES)
        stated = "; ".join(filter(None, (stated, near, ADDING_A_FAMILY)))
    return f"{reason[0].lower()}{reason[1:]}, not {stated}"


def renamed_to(root: type[Settings], location: tuple[str | int, ...]) -> str | None:
    """Return the new name of the former key at one of pydantic's locations, or None."""
    return schema.renamed(schema.type_at(root, location[:-1]), str(location[-1]))


def unknown(annotation: Any, name: str, fields: Collection[str]) -> str:
    """Return the message of a key that a block does not have, with what was probably meant."""
    if now := schema.renamed(annotation, name):
        return f"renamed to {now}"
    if other_kinds := _kind_without(annotation, name):
        return other_kinds
    return f"unknown key; {schema.alias_hint(name, fields) or hint(name, fields)}"


def _kind_without(annotation: Any, name: str) -> str | None:
    """Return that only stages of other kinds have a key, such as `gate`; None where none has."""
    kinds = [kind.name for kind in KINDS.values() if kind.settings and kind.settings is annotation]
    having = [kind.name for kind in KINDS.values() if name in schema.fields(kind.settings)]
    if not kinds or not having:
        return None
    return f"stages of kind {kinds[0]} have no such key; only of {', '.join(sorted(having))}"
