"""The settings classes seen as a tree of dotted keys."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

Key = tuple[str | int, ...]


def type_at(root: type[BaseModel], key: Key) -> Any:
    """The annotation at `key`, or None where the key is unknown. A free mapping takes any name.

    Of a union of settings classes any key is known, unless `key` names the class that is meant, as
    the locations of pydantic's errors do.
    """
    annotation: Any = root
    for part in key:
        if part in (arms := _arms(annotation)):
            annotation = arms[part]
        elif known := fields(annotation):
            annotation = _bare(known.get(part))
        elif get_origin(annotation) is dict:
            annotation = _bare(get_args(annotation)[1])
        elif annotation is not Any:
            return None
    return annotation


def fields(annotation: Any) -> dict[Any, Any]:
    """The keys of a settings class, or of all classes of a union, with their annotations."""
    own = [annotation] if _is_settings(annotation) else []
    classes = [*own, *_arms(annotation).values()]
    return {
        field.alias or name: field.annotation
        for each in classes
        for name, field in each.model_fields.items()
    }


def renamed(annotation: Any, name: str) -> str | None:
    """What is written now in place of the key `name` that a settings class had; None of others."""
    return annotation.renamed.get(name) if _is_settings(annotation) else None


def without_arms(root: type[BaseModel], location: Key) -> Key:
    """The key that a person wrote: pydantic's locations also name the class of a union."""
    return tuple(
        part
        for depth, part in enumerate(location)
        if part not in _arms(type_at(root, location[:depth]))
    )


def tag(annotation: Any) -> str:
    """The key whose value says which settings class of a union is meant, such as `name`."""
    return _tag(_classes(annotation))


def _is_settings(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _arms(annotation: Any) -> dict[Any, type[BaseModel]]:
    """The settings classes of a union, each by its tag's value; nothing for other annotations."""
    classes = _classes(annotation)
    return {each.model_fields[_tag(classes)].default: each for each in classes}


def _classes(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) not in (Union, types.UnionType):
        return []
    return [each for each in map(_bare, get_args(annotation)) if _is_settings(each)]


def _tag(classes: list[type[BaseModel]]) -> str:
    """The key that is a literal in all classes, with another default in each."""
    for name, field in classes[0].model_fields.items():
        defaults = {
            each.model_fields[name].default for each in classes if name in each.model_fields
        }
        if get_origin(field.annotation) is Literal and len(defaults) == len(classes):
            return name
    raise TypeError(f"nothing tells {classes} apart")


def _bare(annotation: Any) -> Any:
    """The annotation without `Annotated` and `| None`."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        arms = [arm for arm in get_args(annotation) if arm is not type(None)]
        return _bare(arms[0]) if len(arms) == 1 else annotation
    return annotation


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
