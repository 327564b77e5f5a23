"""Responses that must be JSON of a certain shape."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable

from stages.data.problem import Problem
from stages.rewards.format import unfenced
from stages.rewards.reward import Response, Reward, RewardError
from stages.rewards.settings import JSONSchemaReward

DEEPEST = 50  # lists and objects in one another, of an answer that a schema is to follow


def make(settings: JSONSchemaReward, _directory: Path) -> Reward:
    """1 where the response, or what its one code fence holds, is valid."""
    if settings.default_schema is not None:
        check_schema(settings.default_schema)

    def reward(problem: Problem, response: Response) -> float:
        schema = problem.fields.get(settings.schema_field, settings.default_schema)
        if schema is None:
            raise RewardError(
                f"the problem has no field {settings.schema_field!r}, and default_schema is not set"
            )
        return float(
            valid(response.text, json.loads(schema) if isinstance(schema, str) else schema)
        )

    return reward


def valid(text: str, schema: Any) -> bool:
    """Whether `text` is JSON that is valid against `schema`.

    Raises RewardError where the schema is none, or refers to what does not stand in it: nothing is
    fetched.
    """
    check_schema(schema)
    try:
        value = json.loads(unfenced(text), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    try:
        return bool(Draft202012Validator(schema, registry=Registry()).is_valid(value))
    except Unresolvable as error:
        raise RewardError(f"the schema cannot be used: {error}") from error
    except OverflowError:  # a number beyond all bounds, such as 1e999
        return False
    except RecursionError as error:
        if _is_deep(value):
            return False
        raise RewardError("the schema refers to itself without end") from error


def check_schema(schema: Any) -> None:
    """Raises RewardError where it is none."""
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise RewardError(f"not a JSON schema: {error.message} at {error.json_path}") from error


def _is_deep(value: Any) -> bool:
    """Whether a value is nested more deeply than an answer would be."""
    level = [value]
    for _ in range(DEEPEST):
        level = [item for each in level for item in _items(each)]
    return bool(level)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _refuse(constant: str) -> NoReturn:
    """NaN and Infinity are Python's, not JSON's."""
    raise ValueError(f"{constant} is not JSON")
