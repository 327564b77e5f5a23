"""Responses that must be JSON of a certain shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable

from stages.domains.problem import Problem
from stages.domains.rewards.reward import Response, Reward, RewardError
from stages.domains.rewards.settings import JSONSchemaReward
from stages.domains.rewards.text import unfenced


def make(settings: JSONSchemaReward, _directory: Path) -> Reward:
    """1 where the response, or what its one code fence holds, is valid."""
    if settings.default_schema is not None:
        _check(settings.default_schema)

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
    _check(schema)
    try:
        value = json.loads(unfenced(text), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    try:
        return bool(Draft202012Validator(schema, registry=Registry()).is_valid(value))
    except Unresolvable as error:
        raise RewardError(f"the schema cannot be used: {error}") from error


def _check(schema: Any) -> None:
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise RewardError(f"not a JSON schema: {error.message} at {error.json_path}") from error


def _refuse(constant: str) -> NoReturn:
    """NaN and Infinity are Python's, not JSON's."""
    raise ValueError(f"{constant} is not JSON")
