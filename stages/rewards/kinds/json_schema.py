"""The reward of a response that must be JSON valid against a schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from stages.data.columns import column_or_none
from stages.data.problem import Problem
from stages.rewards.fences import unfenced
from stages.rewards.json_values import (
    check_schema,
    draft_of,
    field_value,
    parsed,
    schema_violation,
    unwrapped,
)
from stages.rewards.reward import (
    AnswerReward,
    Explained,
    Response,
    Reward,
    RewardContext,
    RewardError,
    register,
)


class JSONSchemaReward(AnswerReward):
    """1 where the response is JSON that is valid against a schema, else 0.

    A schema is of the draft that its `$schema` states, and of 2020-12 without one. It may stand in
    a `response_format` of OpenAI's APIs, as `{"name": ..., "strict": ..., "schema": {...}}`.
    """

    kind: Literal["json_schema"] = "json_schema"
    schema_field: str = Field(default="schema", description="field of the problem with its schema")
    default_schema: dict[str, Any] | None = Field(
        default=None, description="schema of a problem without that field"
    )

    def row_violation(self, row: Mapping[str, Any], answer: str) -> str | None:
        try:
            draft_of(self.schema_of(row))
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
        schema = column_or_none(row, self.schema_field)
        schema = self.default_schema if schema is None else schema
        if schema is None:
            field = self.schema_field
            raise RewardError(f"the problem has no field {field!r}, and default_schema is null")
        return unwrapped(field_value(schema))

    def rules(self, at: RewardContext) -> Iterator[tuple[str, str]]:
        try:
            if self.default_schema is not None:
                check_schema(unwrapped(self.default_schema))
        except RewardError as error:
            yield f"{at.key}.default_schema", str(error)


@register(JSONSchemaReward, imports=("jsonschema",))
def make(settings: JSONSchemaReward, _directory: Path) -> Reward:
    """Return the reward: 1 for JSON, bare or in a code fence, that the problem's schema allows."""
    if settings.default_schema is not None:
        check_schema(unwrapped(settings.default_schema))

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
    return schema_violation(value, schema)
