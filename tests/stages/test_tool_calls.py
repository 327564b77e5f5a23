"""The reward of tool calls: their form, their schemas, and the expected calls."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.validate import load_domain
from stages.data.problem import Problem
from stages.domain_tools.domain_check import reference
from stages.rewards.kinds.tool_call import ToolCallReward
from stages.rewards.reward import Response, RewardError, RewardPoolSettings, make
from tests.runs import REPOSITORY

PLACE = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
         "required": ["city"], "additionalProperties": False}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"name": "now", "description": "the time"},
]
CALL = {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}
NOW = {"name": "now", "arguments": {}}


def problem(calls: Any = (CALL,), tools: Any = TOOLS) -> Problem:
    found = list(calls) if isinstance(calls, tuple) else calls
    return Problem("agents", 0, "?", "", {"tools": tools, "calls": found})


def tagged(*calls: Any) -> str:
    return "\n".join(f"<tool_call>{json.dumps(each)}</tool_call>" for each in calls)


def score(text: str, asked: Problem, **settings: Any) -> tuple[float, str]:
    made = make("agents", "right", ToolCallReward(**settings), Path())
    found = made(asked, Response(text, 1))
    assert isinstance(found, tuple) and isinstance(found[0], float)
    return found[0], found[1]


@pytest.mark.parametrize(
    "text",
    [
        tagged(CALL),
        f"<think>\nOslo, so\n</think>\n\n{tagged(CALL)}\n",
        f"<think>\n\n</think>\n\n{tagged(CALL)}",  # of a model that was asked not to think
        f"<think>use <tool_call>? yes</think>{tagged(CALL)}",
        tagged({"arguments": {"days": 2.0, "city": "Oslo"}, "name": "weather"}),
        "<tool_call>\n" + json.dumps(CALL, indent=1) + "\n</tool_call>",
    ],
)
def test_the_expected_call_is_right(text: str) -> None:
    assert score(text, problem()) == (1.0, "")
    assert score(text, problem(), calls_field=None) == (1.0, "")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not calls in <tool_call> and </tool_call> alone"),
        (json.dumps(CALL), "not calls in <tool_call> and </tool_call> alone"),
        (f"Sure: {tagged(CALL)}", "not calls in <tool_call> and </tool_call> alone"),
        (f"{tagged(CALL)} done", "not calls in <tool_call> and </tool_call> alone"),
        ("<tool_call>" + json.dumps(CALL), "not calls in <tool_call> and </tool_call> alone"),
        (f"so</think>{tagged(CALL)}", "not calls in <tool_call> and </tool_call> alone"),
        (f"<think>so {tagged(CALL)}", "no answer: the thoughts do not end"),
        ("<tool_call>{name: weather}</tool_call>", "no JSON: Expecting property name"),
        ("<tool_call>NaN</tool_call>", "no JSON: NaN is not JSON"),
        ("<tool_call>" + "[" * 10**5 + "</tool_call>", "no JSON: "),
        (tagged([CALL]), "a call must be"),
        (tagged({**CALL, "id": 1}), "a call must be"),
        (tagged({"name": "weather", "arguments": '{"city": "Oslo"}'}), "a call must be"),
        (tagged({"name": "wether", "arguments": {}}), "no tool 'wether'; known: weather, now"),
        (tagged({"name": "weather", "arguments": {}}), "weather: $: 'city' is a required prop"),
        (tagged({"name": "weather", "arguments": {"city": 3}}), "weather: $.city: 3 is not of"),
    ],
)
def test_what_is_no_valid_call_earns_nothing(text: str, why: str) -> None:
    for settings in ({}, {"calls_field": None}):
        value, said = score(text, problem(), **settings)
        assert value == 0.0
        assert said.startswith(why), said


@pytest.mark.parametrize(
    "calls",
    [
        (NOW,),
        (CALL, CALL),
        ({"name": "weather", "arguments": {"city": "Oslo"}},),
        ({"name": "weather", "arguments": {"city": "oslo", "days": 2}},),
    ],
)
def test_another_valid_call_is_valid_alone(calls: tuple[Any, ...]) -> None:
    assert score(tagged(*calls), problem())[0] == 0.0
    assert score(tagged(*calls), problem(), calls_field=None) == (1.0, "")


def test_calls_have_no_order_and_may_be_one_value_of_json() -> None:
    both = problem((CALL, NOW))
    assert score(tagged(NOW, CALL), both)[0] == 1.0
    assert score(json.dumps([NOW, CALL]), both, form="json")[0] == 1.0
    assert score(f"```json\n{json.dumps(CALL)}\n```", problem(), form="json")[0] == 1.0
    assert score(tagged(CALL), problem(), form="json")[0] == 0.0


DEEP = {"name": "now", "arguments": {"a": json.loads("[" * 500 + "]" * 500)}}


def test_a_response_cannot_end_its_stage_or_take_long() -> None:
    """A reward that raises stops a stage, which a policy could learn."""
    begun = time.process_time()
    for asked in (problem((NOW,)), problem([])):
        for form, many in (
            ("tagged", tagged(*[NOW] * 3000)),
            ("json", json.dumps([NOW] * 3000)),
        ):
            most = 16 + 4 * len(asked.fields["calls"])
            assert score(many, asked, form=form) == (0.0, f"more than {most} calls")
        deep = "arguments nested more than 50 deep"
        assert score(tagged(DEEP), asked) == (0.0, deep)
        assert score(json.dumps(DEEP), asked, form="json") == (0.0, deep)
    assert score(tagged(*[NOW] * 1001), problem(), calls_field=None)[0] == 0.0
    assert score(tagged(*[NOW] * 900), problem(), calls_field=None)[0] == 1.0
    long = {**NOW, "arguments": {"a": "a" * (1 << 18)}}
    assert score(tagged(long), problem((NOW,))) == (0.0, "more than 262144 characters")
    assert score("a" * (1 << 19), problem([])) == (1.0, "")
    assert time.process_time() - begun < 3


def test_equal_elements_are_found_at_once() -> None:
    unique = {"type": "array", "uniqueItems": True}
    tools = [{"name": "set", "parameters": {"properties": {"to": unique}}}]
    found = [{"a": each} for each in range(3000)]
    begun = time.process_time()
    for more, right in (([], 1.0), ([{"a": 7.0}], 0.0), ([{"a": True}, 1, "1", "true"], 1.0)):
        call = {"name": "set", "arguments": {"to": [*found, *more]}}
        assert score(tagged(call), problem(tools=tools), calls_field=None)[0] == right
    assert time.process_time() - begun < 3


def test_true_is_not_one() -> None:
    tools = [{"name": "set", "parameters": {"type": "object"}}]
    asked = problem(({"name": "set", "arguments": {"to": 1}},), tools)
    assert score(tagged({"name": "set", "arguments": {"to": True}}), asked)[0] == 0.0


def test_where_no_call_is_expected_an_answer_is_right() -> None:
    asked = problem([])
    assert score("Oslo is in Norway.", asked) == (1.0, "")
    assert score("", asked)[0] == score("<think>so</think>", asked)[0] == 0.0
    assert score(tagged(CALL), asked)[0] == score("<tool_call>", asked)[0] == 0.0
    assert score(json.dumps(CALL), asked, form="json")[0] == 0.0
    assert score("Oslo is in Norway.", asked, form="json") == (1.0, "")


@pytest.mark.parametrize(("thoughts", "with_any", "without"), [
    ("optional", 1.0, 1.0), ("required", 1.0, 0.0), ("forbidden", 0.0, 1.0),
])  # fmt: skip
def test_thoughts_may_be_required_or_forbidden(
    thoughts: str, with_any: float, without: float
) -> None:
    assert score(f"<think>so</think>{tagged(CALL)}", problem(), thoughts=thoughts)[0] == with_any
    assert score(tagged(CALL), problem(), thoughts=thoughts)[0] == without
    assert score(f"<think> </think>{tagged(CALL)}", problem(), thoughts=thoughts)[0] == without


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (Problem("agents", 0, "?", "", {"calls": []}), "the problem has no field 'tools' with its"),
        (problem(tools={}), "field 'tools' must be a list of tools"),
        (problem(tools=[{"parameters": {}}]), "field 'tools' has a tool without a name"),
        (problem(calls=None), "the problem has no field 'calls'; calls_field: null wants none"),
        (problem(calls=["weather"]), "field 'calls' must be a list of calls: name and arguments"),
        (problem(({"name": "rain", "arguments": {}},)), "the expected call of 'rain' has no such"),
        (problem("[" * 100_000), "JSON nested too deeply"),
        (problem("[1"), "Expecting ',' delimiter"),
        (problem((DEEP,)), "field 'calls' has arguments nested more than 50 deep"),
        (problem(tools="[" * 100_000), "JSON nested too deeply"),
        (problem(tools=[DEEP["arguments"]]), "field 'tools' has a tool without a name"),
        (
            problem(tools=[{"name": "now", "parameters": "[" * 100_000}]),
            "field 'tools': parameters of 'now': JSON nested too deeply",
        ),
        (
            problem(tools=[{"name": "now", "parameters": "{"}]),
            "field 'tools': parameters of 'now': Expecting property name",
        ),
        (problem(tools=[*TOOLS, {"name": "now"}]), "field 'tools' has two tools of the name 'now'"),
        (
            problem(({"function": {"name": "now", "arguments": "{"}},)),
            "field 'calls': arguments of 'now': Expecting property name",
        ),
        (problem(({"function": {"name": "now"}},)), "field 'calls' must be a list of calls"),
    ],
)
def test_a_row_that_cannot_be_scored_is_found_without_a_library(asked: Problem, why: str) -> None:
    found = ToolCallReward().row_violation(asked.fields, "")
    assert found is not None and found.startswith(why)
    if "rain" not in why:
        with pytest.raises(RewardError, match=why[:20]):
            score(tagged(CALL), asked)


def test_schemas_and_expected_arguments_are_checked_with_one() -> None:
    settings = ToolCallReward()
    wrong = problem(({"name": "weather", "arguments": {"days": "two"}},))
    assert settings.row_violation(wrong.fields, "") is None
    assert "the expected call is invalid: weather: $" in str(settings.problem_violation(wrong))
    broken = problem((), [{"name": "now", "parameters": {"type": "objekt"}}])
    assert "tool now: not a JSON schema" in str(settings.problem_violation(broken))
    assert settings.problem_violation(problem()) is None


def test_fields_may_be_json_text() -> None:
    """As a Parquet file holds them, where structures would have each other's keys."""
    asked = problem(json.dumps([CALL]), json.dumps(TOOLS))
    assert score(tagged(CALL), asked)[0] == 1.0
    assert ToolCallReward().problem_violation(asked) is None
    other = Problem("agents", 0, "?", "", {"functions": TOOLS, "calls": [CALL]})
    assert score(tagged(CALL), other, tools_field="functions")[0] == 1.0


def test_expected_calls_may_be_nested_as_openai_has_them() -> None:
    own = {"name": "weather", "arguments": json.dumps(CALL["arguments"])}
    for function in (own, CALL):
        asked = problem(({"id": "call_1", "type": "function", "function": function},))
        assert score(tagged(CALL), asked) == (1.0, "")
        assert ToolCallReward().problem_violation(asked) is None
        assert ToolCallReward().reference_response(asked) == (
            f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
        )


def test_the_shipped_domain_scores_the_expected_calls_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "Oslo?", "tools": TOOLS, "calls": [CALL]}) + "\n")
    path = tmp_path / "agents.yaml"
    shipped = REPOSITORY / "configs" / "domains" / "tool_calls.yaml"
    path.write_text(f"extends: {shipped}\nprompts: {{path: {rows}}}\n")
    settings = load_domain(path, RewardPoolSettings())
    text = reference(problem(), settings)
    assert text is not None
    rewards = {name: make("agents", name, each, Path()) for name, each in settings.rewards.items()}
    found = {name: each(problem(), Response(text, 1)) for name, each in rewards.items()}
    assert found == {"right": (1.0, ""), "valid": (1.0, "")}
