"""Settings classes as trees of keys."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

Key = tuple[str | int, ...]


def type_at(root: type[BaseModel], key: Key) -> Any:
    """Return the annotation at `key`, or None for an unknown key.

    A mapping of free names has every name. A union of settings classes has the keys of all, unless
    `key` includes the class's tag, as the locations of pydantic's errors do.
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
    """Return the keys of a settings class, or of all classes of a union, with annotations."""
    own = [annotation] if _is_settings(annotation) else []
    classes = [*own, *_arms(annotation).values()]
    return {
        field.alias or name: field.annotation
        for each in classes
        for name, field in each.model_fields.items()
    }


def renamed(annotation: Any, name: str) -> str | None:
    """Return the new name of a settings class's former key, or None."""
    return annotation.renamed.get(name) if _is_settings(annotation) else None


def without_arms(root: type[BaseModel], location: Key) -> Key:
    """Return one of pydantic's locations without the tags of unions: the key in the file."""
    return tuple(
        part
        for depth, part in enumerate(location)
        if part not in _arms(type_at(root, location[:depth]))
    )


def tag(annotation: Any) -> str:
    """Return the key that selects the class of a union, such as `name`."""
    return _tag(_classes(annotation))


def _is_settings(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _arms(annotation: Any) -> dict[Any, type[BaseModel]]:
    """Return the settings classes of a union by their tag's value; empty for no union."""
    classes = _classes(annotation)
    return {each.model_fields[_tag(classes)].default: each for each in classes}


def _classes(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) not in (Union, types.UnionType):
        return []
    return [each for each in map(_bare, get_args(annotation)) if _is_settings(each)]


def _tag(classes: list[type[BaseModel]]) -> str:
    """Return the key that is a literal of one value in all classes, another one in each."""
    for name, field in classes[0].model_fields.items():
        defaults = {
            each.model_fields[name].default for each in classes if name in each.model_fields
        }
        only = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
        if only and len(defaults) == len(classes):
            return name
    raise TypeError(f"no literal field distinguishes {classes}")


def _bare(annotation: Any) -> Any:
    """Return the annotation without `Annotated` and `| None`."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        arms = [arm for arm in get_args(annotation) if arm is not type(None)]
        return _bare(arms[0]) if len(arms) == 1 else annotation
    return annotation
