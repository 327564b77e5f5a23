"""JSON in rows and responses: its values, and their validity against JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NoReturn

from stages.data.row_forms import SURROGATE, TOO_MANY_DIGITS
from stages.rewards.reward import RewardError

# Of jsonschema's validator classes, by what a schema may state as its $schema.
DRAFTS = {
    "draft-03": "Draft3Validator",
    "draft-04": "Draft4Validator",
    "draft-06": "Draft6Validator",
    "draft-07": "Draft7Validator",
    "draft/2019-09": "Draft201909Validator",
    "draft/2020-12": "Draft202012Validator",
}
# Keywords of all drafts, and annotations. A mapping with other keys alone would allow everything.
KEYWORDS = frozenset({
    "$anchor", "$comment", "$defs", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveAnchor",
    "$recursiveRef", "$ref", "$schema", "$vocabulary", "additionalItems",
    "additionalProperties", "allOf", "anyOf", "const", "contains", "contentEncoding",
    "contentMediaType", "contentSchema", "default", "definitions", "dependencies",
    "dependentRequired", "dependentSchemas", "deprecated", "description", "disallow",
    "divisibleBy", "else", "enum", "examples", "exclusiveMaximum", "exclusiveMinimum",
    "extends", "format", "id", "if", "items", "maxContains", "maxItems", "maxLength",
    "maxProperties", "maximum", "minContains", "minItems", "minLength", "minProperties",
    "minimum", "multipleOf", "not", "nullable", "oneOf", "pattern", "patternProperties",
    "prefixItems", "properties", "propertyNames", "readOnly", "required", "then", "title",
    "type", "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "writeOnly",
})  # fmt: skip
# What holds a schema in requests of OpenAI's APIs and those like them, and what stands beside it.
WRAPPERS = ("response_format", "format", "json_schema", "schema")
BESIDE = {"description", "name", "strict", "type"}
STATED = re.compile(r"https?://json-schema\.org/(?P<draft>.+)/schema#?")
DEEPEST = 50  # nested lists and objects of an answer that can be valid


def parsed(text: str) -> Any:
    """Return the value of JSON. Raises ValueError or RecursionError for other text."""
    return json.loads(text, parse_constant=_refuse)


def field_value(field: Any) -> Any:
    """Return a field of a row, or the value of its JSON where it is text.

    Raises RewardError for text that is not JSON, or holds half of a surrogate pair, as for a row.
    """
    try:
        value = json.loads(field) if isinstance(field, str) else field
        if isinstance(field, str) and SURROGATE.search(field.encode()):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        raise RewardError("half of a surrogate pair, which is not text") from error
    except json.JSONDecodeError as error:
        raise RewardError(str(error)) from error
    except ValueError as error:
        raise RewardError(f"JSON with {TOO_MANY_DIGITS}") from error
    except RecursionError as error:
        raise RewardError("JSON nested too deeply") from error


def unwrapped(schema: Any) -> Any:
    """Return the schema within a `response_format` of OpenAI's APIs, or the schema as it is.

    Example:
        >>> unwrapped({"name": "x", "strict": True, "schema": {"type": "object"}})
        {'type': 'object'}
        >>> unwrapped({"type": "json_object"})
        {'type': 'object'}
    """
    while isinstance(schema, dict) and schema.get("type") in (None, "json_object", "json_schema"):
        inside = [key for key in WRAPPERS if isinstance(schema.get(key), dict)]
        if not inside or schema.keys() - {inside[0], *BESIDE}:
            break
        schema = schema[inside[0]]
    return {"type": "object"} if schema == {"type": "json_object"} else schema


def canonical(value: Any) -> str:
    """Return one text of equal values of JSON: 1 equals 1.0, and true does not equal 1."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """Return a value of JSON whose whole numbers are integers."""
    if isinstance(value, dict):
        return {key: _plain(element) for key, element in value.items()}
    if isinstance(value, list):
        return [_plain(element) for element in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_deep(value: Any) -> bool:
    """Return whether a value is nested more deeply than DEEPEST."""
    level = [value]
    for _ in range(DEEPEST):
        nested = [list(node.values()) if isinstance(node, dict) else node for node in level]
        level = [child for children in nested if isinstance(children, list) for child in children]
    return bool(level)


def draft_of(schema: Any) -> str:
    """Return the name of the validator class of a schema's draft, 2020-12 where it states none.

    Raises RewardError where it states another, and for a mapping without any keyword of a schema.
    Imports no library.
    """
    if isinstance(schema, dict) and schema and not schema.keys() & KEYWORDS:
        keys = ", ".join(map(repr, schema))
        raise RewardError(f"not a JSON schema: none of its keys is a keyword of one: {keys}")
    stated = schema.get("$schema") if isinstance(schema, dict) else None
    if stated is None:
        return DRAFTS["draft/2020-12"]
    match = STATED.fullmatch(stated) if isinstance(stated, str) else None
    if match is None or match["draft"] not in DRAFTS:
        drafts = ", ".join(DRAFTS)
        raise RewardError(
            f"not a JSON schema: unknown $schema {stated!r}; known are"
            f" http://json-schema.org/DRAFT/schema with DRAFT of {drafts}"
        )
    return DRAFTS[match["draft"]]


def check_schema(schema: Any) -> None:
    """Raise RewardError where `schema` is no JSON schema of the draft that it states."""
    from jsonschema.exceptions import SchemaError

    validator = _validator(draft_of(schema))
    try:
        validator.check_schema(schema)
    except SchemaError as error:
        raise RewardError(f"not a JSON schema: {error.message} at {error.json_path}") from error
    except RecursionError as error:
        raise RewardError("not a JSON schema: nested too deeply") from error
    except (AttributeError, TypeError, ValueError, LookupError, OverflowError) as error:
        # Such as the OverflowError of a regular expression with too many repetitions.
        raise RewardError(f"not a JSON schema: {error!r}") from error


def schema_violation(value: Any, schema: Any) -> str:
    """Return why a schema does not allow a value of JSON; "" where it does.

    `check_schema` must have passed the schema. Raises RewardError where it refers outside itself,
    since nothing is fetched, or to itself without end.
    """
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    validator = _validator(draft_of(schema))
    try:
        first_error = next(validator(schema, registry=Registry()).iter_errors(value), None)
        return "" if first_error is None else f"{first_error.json_path}: {first_error.message}"
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


@cache
def _validator(name: str) -> Any:
    """Return jsonschema's class, except that equal elements are found in one pass.

    It compares objects pair by pair, which takes seconds for 3,000 of them.
    """
    import jsonschema
    from jsonschema.exceptions import ValidationError
    from jsonschema.validators import extend

    def unique(_validator_class: Any, unique_items: Any, value: Any, _schema: Any) -> Iterator[Any]:
        if unique_items and isinstance(value, list) and len({*map(canonical, value)}) < len(value):
            yield ValidationError(f"{value!r} has non-unique elements")

    return extend(getattr(jsonschema, name), {"uniqueItems": unique})


def _refuse(constant: str) -> NoReturn:
    """Raise ValueError: NaN and Infinity are Python's, not JSON's."""
    raise ValueError(f"{constant} is not JSON")
