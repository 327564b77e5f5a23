"""The reward of a response that must be JSON valid against a schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import Field

from stages.data.problem import Problem
from stages.rewards.kinds.format import unfenced
from stages.rewards.reward import (
    Explained,
    Response,
    Reward,
    RewardBase,
    RewardContext,
    RewardError,
    register,
)

DEEPEST = 50  # nested lists and objects of an answer that can be valid


class JSONSchemaReward(RewardBase):
    """1 where the response is JSON that is valid against a schema, else 0."""

    kind: Literal["json_schema"] = "json_schema"
    schema_field: str = Field(default="schema", description="field of the problem with its schema")
    default_schema: dict[str, Any] | None = Field(
        default=None, description="schema of a problem without that field"
    )

    def row_violation(self, row: Mapping[str, Any], answer: str) -> str | None:
        try:
            self.schema_of(row)
        except RewardError as error:
            return str(error)
        return None

    def problem_violation(self, problem: Problem) -> str | None:
        """Return why the problem has no JSON schema, or None."""
        try:
            check_schema(self.schema_of(problem.fields))
        except RewardError as error:
            return str(error)
        return None

    def schema_of(self, row: Mapping[str, Any]) -> Any:
        """Return a row's schema. Raises RewardError without one, and for text that is not JSON."""
        schema = row.get(self.schema_field, self.default_schema)
        if schema is None:
            field = self.schema_field
            raise RewardError(f"the problem has no field {field!r}, and default_schema is null")
        return field_value(schema)

    def rules(self, at: RewardContext) -> Iterator[tuple[str, str]]:
        try:
            if self.default_schema is not None:
                check_schema(self.default_schema)
        except RewardError as error:
            yield f"{at.key}.default_schema", str(error)


@register(JSONSchemaReward, imports=("jsonschema",))
def make(settings: JSONSchemaReward, _directory: Path) -> Reward:
    """Return the reward: 1 for JSON, bare or in a code fence, that the problem's schema allows."""
    if settings.default_schema is not None:
        check_schema(settings.default_schema)

    def reward(problem: Problem, response: Response) -> Explained:
        wrong = violation(response.text, settings.schema_of(problem.fields))
        return float(not wrong), wrong

    return reward


def violation(text: str, schema: Any) -> str:
    """Return why `text` is no JSON that `schema` allows; "" where it is.

    Raises RewardError where the schema is invalid, or refers outside itself: nothing is fetched.
    """
    check_schema(schema)  # an error of the problem, whatever the text
    try:
        value = parsed(unfenced(text))
    except (ValueError, RecursionError) as error:
        return f"no JSON: {error}"
    return value_violation(value, schema)


def parsed(text: str) -> Any:
    """Return the value of JSON. Raises ValueError or RecursionError for other text."""
    return json.loads(text, parse_constant=_refuse)


def value_violation(value: Any, schema: Any) -> str:
    """Return why `schema` does not allow a value of JSON; "" where it does.

    Raises RewardError where the schema is invalid, or refers outside itself: nothing is fetched.
    """
    check_schema(schema)
    return checked_violation(value, schema)


def checked_violation(value: Any, schema: Any) -> str:
    """Return what `value_violation` does, of a schema that `check_schema` has passed."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        first = next(_validator()(schema, registry=Registry()).iter_errors(value), None)
        return "" if first is None else f"{first.json_path}: {first.message}"
    except Unresolvable as error:
        raise RewardError(f"the schema cannot be used: {error}") from error
    except OverflowError:  # such as 1e999
        return "an infinite number"
    except RecursionError as error:
        if is_deep(value):
            return f"nested more than {DEEPEST} deep"
        raise RewardError("the schema refers to itself without end") from error
    except (AttributeError, TypeError, ValueError, LookupError) as error:  # of a $ref to no schema
        raise RewardError(f"the schema cannot be used: {error!r}") from error


def check_schema(schema: Any) -> None:
    """Raise RewardError where `schema` is no JSON schema."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise RewardError(f"not a JSON schema: {error.message} at {error.json_path}") from error
    except RecursionError as error:
        raise RewardError("not a JSON schema: nested too deeply") from error
    except (AttributeError, TypeError, ValueError, LookupError, OverflowError) as error:
        # Such as the OverflowError of a regular expression with too many repetitions.
        raise RewardError(f"not a JSON schema: {error!r}") from error


@cache
def _validator() -> Any:
    """Return jsonschema's class, except that equal elements are found in one pass.

    It compares objects pair by pair, which takes seconds for 3,000 of them.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError
    from jsonschema.validators import extend

    def unique(_own: Any, wanted: Any, value: Any, _schema: Any) -> Iterator[Any]:
        if wanted and isinstance(value, list) and len({*map(canonical, value)}) < len(value):
            yield ValidationError(f"{value!r} has non-unique elements")

    return extend(Draft202012Validator, {"uniqueItems": unique})


def canonical(value: Any) -> str:
    """Return one text of equal values of JSON: 1 equals 1.0, and true does not equal 1."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """Return a value of JSON whose whole numbers are integers."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def field_value(given: Any) -> Any:
    """Return a field of a row, or the value of its JSON where it is text.

    Raises RewardError for text that is not JSON.
    """
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise RewardError(str(error)) from error
    except RecursionError as error:
        raise RewardError("JSON nested too deeply") from error


def is_deep(value: Any) -> bool:
    """Return whether a value is nested more deeply than DEEPEST."""
    level = [value]
    for _ in range(DEEPEST):
        nested = [list(each.values()) if isinstance(each, dict) else each for each in level]
        level = [item for each in nested if isinstance(each, list) for item in each]
    return bool(level)


def _refuse(constant: str) -> NoReturn:
    """Raise ValueError: NaN and Infinity are Python's, not JSON's."""
    raise ValueError(f"{constant} is not JSON")
