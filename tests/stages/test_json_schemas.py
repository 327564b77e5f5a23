"""JSON that a row's schema allows, in every draft and in the wrappers of APIs."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from stages.data.problem import DomainError
from stages.rewards.json_values import unwrapped
from stages.rewards.kinds.json_schema import violation
from stages.rewards.reward import RewardError
from tests.stages.test_rewards import GARBAGE, problem, reward, score, settings

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"name": "a", "age": 3}', 1),
        ('```json\n{"name": "a"}\n```', 1),
        ('{"age": 3}', 0),
        ('{"name": "a", "age": -1}', 0),
        ('{"name": "a", "age": NaN}', 0),
        ('Here: {"name": "a"}', 0),
        *((text, 0) for text in GARBAGE),
    ],
)
@pytest.mark.parametrize("stated", ["field", "text", "settings"])
def test_json_is_validated_against_its_schema(text: str, right: int, stated: str) -> None:
    asked = {"field": problem(shape=SCHEMA), "text": problem(shape=json.dumps(SCHEMA))}
    default = SCHEMA if stated == "settings" else None
    made = reward("json_schema", schema_field="shape", default_schema=default)
    assert score(made, text, asked.get(stated)) == right


def test_unusual_json_is_scored() -> None:
    tree = {"items": {"$ref": "#"}, "multipleOf": 0.01}
    deep = "[" * 400 + "]" * 400
    for text in (deep, "1e999"):
        assert violation(text, tree)
    with pytest.raises(RewardError, match="the schema refers to itself without end"):
        violation("1", {"$ref": "#"})


@pytest.mark.parametrize(
    ("draft", "schema", "text", "right"),
    [
        ("draft-04", {"maximum": 3, "exclusiveMaximum": True}, "3", 0),
        ("draft-04", {"maximum": 3, "exclusiveMaximum": True}, "2", 1),
        ("draft-07", {"items": [{"type": "string"}, {"type": "string"}]}, '["x", 1]', 0),
        ("draft-07", {"items": [{"type": "string"}, {"type": "string"}]}, '["x", "y", 1]', 1),
        ("draft-07", {"dependencies": {"a": ["b"]}}, '{"a": 1}', 0),
        ("draft-07", {"uniqueItems": True}, "[1, 1.0]", 0),
        ("draft/2019-09", {"items": [{"type": "string"}]}, "[1]", 0),
        ("draft/2020-12", {"prefixItems": [{"type": "string"}]}, "[1]", 0),
    ],
)
def test_a_schema_is_of_the_draft_that_it_states(
    draft: str, schema: dict[str, Any], text: str, right: int
) -> None:
    for stated in (
        f"http://json-schema.org/{draft}/schema#",
        f"https://json-schema.org/{draft}/schema",
    ):
        asked = problem(schema={"$schema": stated, **schema})
        assert score(reward("json_schema"), text, asked) == right, stated


@pytest.mark.parametrize("stated", ["draft-07", "http://json-schema.org/draft-99/schema#", 7])
def test_an_unknown_draft_is_an_error_of_the_row(stated: object) -> None:
    schema = {"$schema": stated}
    why = f"not a JSON schema: unknown $schema {stated!r}; known are"
    assert why in str(settings("json_schema").row_violation({"schema": schema}, ""))
    tools = {"tools": [{"name": "now", "parameters": schema}], "calls": []}
    assert f"tool now: {why}" in str(settings("tool_call").row_violation(tools, ""))


def test_an_invalid_schema_is_an_error() -> None:
    with pytest.raises(RewardError, match="has no field 'schema'"):
        score(reward("json_schema"), "{}")
    with pytest.raises(RewardError, match="not a JSON schema: 'objekt' is not valid"):
        score(reward("json_schema"), "{}", problem(schema={"type": "objekt"}))
    with pytest.raises(RewardError, match="the schema cannot be used"):  # nothing is fetched
        score(reward("json_schema"), "{}", problem(schema={"$ref": "http://127.0.0.1:9/x"}))
    with pytest.raises(DomainError, match=r"domains\.math\.rewards\.it: not a JSON schema"):
        reward("json_schema", default_schema={"type": "objekt"})


NESTED: Any = functools.reduce(lambda inner, _: {"items": inner}, range(400), {})


@pytest.mark.parametrize(
    ("schema", "text", "message"),
    [
        ("[" * 100_000, "1", "JSON nested too deeply"),
        ("{", "1", "Expecting property name enclosed in double quotes"),
        (NESTED, "1", "not a JSON schema: nested too deeply"),
        ({"patternProperties": {"a{99999999999}": {}}}, '{"a": 1}', "not a JSON schema: Overflow"),
        ({"$ref": "#/default", "default": 3}, "1", "the schema cannot be used: TypeError"),
        ({"$ref": "#/default", "default": [3]}, "1", "the schema cannot be used: AttributeError"),
    ],
)
def test_a_schema_that_cannot_be_used_is_an_error(schema: Any, text: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        score(reward("json_schema"), text, problem(schema=schema))


A = {"type": "object", "required": ["a"]}
NAMED = {"name": "x", "strict": True, "schema": A}
WRAPPED: dict[str, Any] = {
    "function of chat completions": NAMED,
    "json_schema": {"type": "json_schema", "json_schema": {**NAMED, "description": "an a"}},
    "response_format": {"response_format": {"type": "json_schema", "json_schema": NAMED}},
    "format of responses": {"type": "json_schema", **NAMED},
    "text of responses": {"format": {"type": "json_schema", **NAMED}},
    "Together's and llama.cpp's": {"type": "json_object", "schema": A},
    "Anthropic's": {"type": "json_schema", "schema": A},
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_schema_is_taken_out_of_a_response_format(name: str) -> None:
    wrapped = WRAPPED[name]
    assert unwrapped(wrapped) == A
    for made, asked in (
        (reward("json_schema"), problem(schema=wrapped)),
        (reward("json_schema"), problem(schema=json.dumps(wrapped))),
        (reward("json_schema", default_schema=wrapped), problem()),
    ):
        assert score(made, '{"a": 1}', asked) == 1
        assert score(made, '{"zzz": 1}', asked) == 0


def test_schemas_that_resemble_a_wrapper_are_schemas() -> None:
    for schema in (
        {"properties": {"schema": {"type": "object"}, "name": {}}},
        {"type": "string", "format": "date"},
        {"type": "object", "title": "schema"},
        {"schema": {}, "properties": {}},
        {"title": "anything"},
        {},
        True,
    ):
        assert unwrapped(schema) == schema
        assert settings("json_schema").problem_violation(problem(schema=schema)) is None
    asked = problem(schema={"type": "json_object"})  # any object
    assert score(reward("json_schema"), "{}", asked) == 1
    assert score(reward("json_schema"), "[]", asked) == 0


@pytest.mark.parametrize(
    "schema",
    [
        {"name": "x", "parameters": {"type": "object"}},
        {"response_schema": A},
        {"city": {"type": "str", "description": "where"}},  # xlam's parameters, by name alone
        {"schema": A, "examples_of": []},
    ],
)
def test_a_mapping_without_a_keyword_is_no_schema(schema: dict[str, Any]) -> None:
    """As a schema it would allow all JSON."""
    why = f"not a JSON schema: none of its keys is a keyword of one: {next(iter(schema))!r}"
    assert str(settings("json_schema").row_violation({"schema": schema}, "")).startswith(why)
    tools = {"tools": [{"name": "now", "parameters": schema}], "calls": []}
    assert f"tool now: {why}" in str(settings("tool_call").row_violation(tools, ""))


def test_half_of_a_surrogate_pair_in_the_json_of_a_row_is_an_error_of_the_row() -> None:
    why = "half of a surrogate pair, which is not text"
    schema = '{"const": "\\ud800"}'
    assert settings("json_schema").row_violation({"schema": schema}, "") == why
    assert (
        settings("json_schema").row_violation({"schema": '{"const": "\\ud83d\\ude00"}'}, "") is None
    )
    assert settings("code").row_violation({"tests": '["assert \\"\\ud800\\""]'}, "") == why


def test_a_response_with_unusual_line_ends_in_its_fence_is_json() -> None:
    asked = problem(schema=A)
    for text in ('{"a": "b\u2028c"}', '{"a": "b\x85c"}', '{\r\n"a": 1}'):
        assert score(reward("json_schema"), f"```json\n{text}\n```", asked) == 1
        assert score(reward("json_schema"), text, asked) == 1


def test_tools_may_have_their_schema_under_the_names_of_other_apis() -> None:
    for key in ("parameters", "input_schema", "inputSchema"):
        row = {"tools": [{"name": "now", key: A}], "calls": []}
        made, text = (
            reward("tool_call", calls_field=None),
            '<tool_call>{"name": "now", "arguments": %s}</tool_call>',
        )
        assert score(made, text % '{"a": 1}', problem(**row)) == 1
        assert score(made, text % "{}", problem(**row)) == 0
