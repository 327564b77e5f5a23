"""A check of the shapes that the types of the objectives' functions state, call by call.

jaxtyping compares a tensor with one type; what binds the names of axes, so that two arguments of a
call agree on `tokens`, is its context. Product code imports jaxtyping for the type checker alone:
the annotations are text until they are read here.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import cache, wraps
from importlib import import_module
from pkgutil import walk_packages
from typing import Any, Union, get_args, get_origin, get_type_hints

import jaxtyping
from torch import Tensor

import stages.kinds.distill.losses
import stages.objectives

Function = types.FunctionType
NAMES = {name: getattr(jaxtyping, name) for name in ("Bool", "Float", "Int", "Real")}
NAMES["Tensor"] = Tensor


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compares its tensors with its types, its arguments' fields too.

    Raises:
        TypeError: at a call, one has another shape or dtype.
    """
    signature, hints = inspect.signature(function), hints_of(function)

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with jaxtyping.jaxtyped("context"):
            values = signature.bind(*arguments, **keywords).arguments
            for name, value in values.items():
                check(value, hints.get(name), f"{function.__name__}: {name}")
            returned = function(*arguments, **keywords)
            check(returned, hints.get("return"), f"{function.__name__}: what it returns")
        return returned

    return call


def check(value: Any, hint: Any, where: str) -> None:
    """Raise TypeError where a tensor, or a field of a dataclass, differs from its type."""
    if get_origin(hint) is tuple:
        for number, (element, element_hint) in enumerate(zip(value, get_args(hint), strict=True)):
            check(element, element_hint, f"{where}, {number}")
    elif shapes := [shape for shape in options(hint) if is_shape(shape)]:
        if value is not None and not any(isinstance(value, shape) for shape in shapes):
            actual = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else value
            raise TypeError(f"{where} must be {hint}, and is {actual}")
    elif is_dataclass(value) and not isinstance(value, type):
        for name, field_hint in hints_of(type(value)).items():
            if any(map(is_shape, options(field_hint))):
                check(getattr(value, name), field_hint, f"{where}.{name}")


def options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_shape(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)


@cache
def hints_of(annotated: Any) -> dict[str, Any]:
    """Return the types with shapes, of a function's arguments or of a class's fields, by name."""
    namespace = {**vars(sys.modules[annotated.__module__]), **NAMES}
    shaped = {name: hint for name, hint in annotated.__annotations__.items() if "[Tensor" in hint}
    return get_type_hints(types.SimpleNamespace(__annotations__=shaped), globalns=namespace)


def functions() -> Iterator[tuple[types.ModuleType, str, Function]]:
    """Yield module, name and function of the objectives and of the losses of a merge."""
    for package in (stages.objectives, stages.kinds.distill.losses):
        for info in walk_packages(package.__path__, f"{package.__name__}."):
            module = import_module(info.name)
            for name, value in vars(module).items():
                if inspect.isfunction(value) and value.__module__ == module.__name__:
                    yield module, name, value
