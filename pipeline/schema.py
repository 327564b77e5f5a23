"""The settings classes seen as a tree of dotted keys."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel


def type_at(root: type[BaseModel], key: tuple[str | int, ...]) -> Any:
    """The annotation at `key`, or None where the key is unknown. A free mapping takes any name."""
    annotation: Any = root
    for part in key:
        annotation = _bare(annotation)
        if is_settings(annotation):
            field = annotation.model_fields.get(part)
            annotation = None if field is None else field.annotation
        elif get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        elif annotation is not Any:
            return None
    return _bare(annotation)


def is_settings(annotation: Any) -> bool:
    """Whether the annotation is a settings class, whose keys are its fields."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested mappings as (dotted key, value); an empty mapping is a leaf."""
    if not isinstance(value, Mapping) or (prefix and not value):
        yield prefix, value
        return
    for name, child in value.items():
        yield from flatten(child, f"{prefix}.{name}" if prefix else name)


def _bare(annotation: Any) -> Any:
    """The annotation without `Annotated` and `| None`."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return _bare(next(arm for arm in get_args(annotation) if arm is not type(None)))
    return annotation
