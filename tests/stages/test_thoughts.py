"""The one rule of thoughts: every reward of an answer scores what follows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from parallel.settings import CHARACTERS
from stages.data.problem import Problem
from stages.data.thoughts import split_thoughts
from stages.domain_tools.domain_check import checked
from stages.rewards.kinds import KINDS, RewardSettings
from stages.rewards.kinds.judge import Judge
from stages.rewards.reward import AnswerReward, Response, RewardContext, make
from stages.settings import DomainCheckJob

CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
ANALYSIS = "<|channel|>analysis<|message|>"
CHANNEL = "<|channel|>final<|message|>"
FINAL = f"<|end|><|start|>assistant{CHANNEL}"
# A right answer of each kind, its settings, and its problem's answer and fields.
ANSWERS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "math": ("It is 7.", {}, "7", {}),
    "json_schema": ('{"a": 1}', {}, "", {"schema": {"type": "object", "required": ["a"]}}),
    "instruction": (
        "No commas",
        {},
        "",
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    ),
    "tool_call": (
        f"<tool_call>{json.dumps(CALL)}</tool_call>",
        {},
        "",
        {"tools": [{"name": "weather"}], "calls": [CALL]},
    ),
    "code": ("```python\nprint(7)\n```", {}, "", {"tests": [{"input": "", "output": "7"}]}),
    "judge": ("seven", {"base_url": "http://j", "model": "m", "rubric": "{response}"}, "", {}),
    "format": ("seven", {"pattern": "seven", "thought_markers": [["<think>", "</think>"]]}, "", {}),
    "language": ("seven", {"scripts": ["latin"]}, "", {}),
    "length": ("seven", {"unit": "words", "at_most": 1}, "", {}),
}
THOUGHTS = "So, it is \\boxed{6}, {, ```python\nprint(6)\n```, шесть"


def score(kind: str, prompt: str, text: str, **given: Any) -> float:
    """Return the score of a response, of a judge that gives 10 to the rubric `seven` alone."""
    _, keys, answer, fields = ANSWERS[kind]
    settings = TypeAdapter(RewardSettings).validate_python({"kind": kind, **keys, **given})
    scored = make("it", kind, settings, Path("/nowhere"))(
        Problem("it", 0, prompt, answer, fields), Response(text, len(text))
    )
    score = scored[0] if isinstance(scored, tuple) else scored
    assert isinstance(score, float)
    return score


@pytest.fixture(autouse=True)
def _judge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def ask(_: Judge, body: bytes) -> str:
        return f"Score: {10 * (json.loads(body)['messages'][0]['content'] == 'seven')}"

    monkeypatch.setattr(Judge, "_ask", ask)
    monkeypatch.setattr("stages.rewards.kinds.judge.write_atomically", lambda *_: None)


@pytest.mark.parametrize("kind", sorted(ANSWERS))
def test_every_reward_of_an_answer_scores_what_follows_the_thoughts(kind: str) -> None:
    answer = ANSWERS[kind][0]
    pairs = {"thought_markers": [["<think>", "</think>"], [ANALYSIS, CHANNEL]]}
    for markers in ({}, pairs) if kind not in ("format", "language", "length") else (pairs,):
        assert score(kind, "?", answer, **markers) == 1
        assert score(kind, "?", f"<think>{THOUGHTS}</think>\n\n{answer}", **markers) == 1
        assert score(kind, "?<think>\n", f"{THOUGHTS}</think>{answer}", **markers) == 1
        assert score(kind, "?<think>\n\n</think>\n\n", answer, **markers) == 1
        assert score(kind, "?<|start|>assistant", f"{ANALYSIS}so{FINAL}{answer}", **markers) == 1
        for prompt, text in (
            ("?", f"<think>{THOUGHTS}\n{answer}"),
            ("?<think>\n", answer),
            ("?", f"{ANALYSIS}{answer}"),
        ):
            assert score(kind, prompt, text, **markers) == 0


def test_every_kind_that_reads_text_is_tried_above() -> None:
    kinds = {kind for kind, entry in KINDS.items() if issubclass(entry.settings, AnswerReward)}
    assert kinds == ANSWERS.keys() == KINDS.keys() - {"reasoning_gym", "python", "overlong"}


@pytest.mark.parametrize(
    ("prompt", "text", "thoughts", "answer"),
    [
        ("?", "4", "", "4"),
        ("?", " <think>\n\n</think>\n\n4", "\n\n", "4"),
        ("?", "</think>\n4", "", "4"),  # of a model that skips thoughts
        ("?<think>\n", "<think>so</think>4", "so", "4"),  # it opens them again
        ("?<think>", "so</think>\n</think>\n4", "so</think>\n", "4"),
        ("?", "<think>a</think><think>b</think>4", "a</think><think>b", "4"),
        ("?", "<think>a</think><think>b, 4", "a</think><think>b, 4", None),
        ("?", "[THINK]so[/THINK]4", "so", "4"),
        ("?", f"{CHANNEL}4", "", "4"),
        # A prompt that asks for the markers opens nothing, nor does a program that names them.
        ("Use <think> and </think>.", "4", "", "4"),
        ("Think in <think> ... first", "4", "", "4"),
        ("?", 'print("<think></think>")', "", 'print("<think></think>")'),
        ("?", "so</think>4", "", "so</think>4"),
    ],
)
def test_thoughts_are_opened_by_the_prompt_or_the_response(
    prompt: str, text: str, thoughts: str, answer: str | None
) -> None:
    assert split_thoughts(prompt, text) == (thoughts, answer)


def test_other_markers_or_none_may_be_set() -> None:
    seed = {"thought_markers": [["<seed:think>", "</seed:think>"]]}
    text = "<seed:think>so, {</seed:think>" + ANSWERS["json_schema"][0]
    assert score("json_schema", "?", text, **seed) == 1
    assert score("json_schema", "?", text) == 0
    assert score("judge", "?", "<think>so</think>seven", thought_markers=[]) == 0


def test_a_program_after_thoughts_is_not_in_the_fence_that_the_prompt_opens() -> None:
    """The thoughts have continued what the prompt opened; the answer has its own fence."""
    answer = "It prints 7:\n```python\nprint(7)\n```"
    assert score("code", "Print 7.\n```python\n", f"<think>so</think>\n{answer}") == 1
    assert score("code", "Print 7.\n```python\n", "print(7)\n```") == 1


def test_a_length_in_tokens_counts_the_thoughts_too() -> None:
    settings = TypeAdapter(RewardSettings).validate_python(
        {"kind": "length", "at_most": 4, "thought_markers": [["<think>", "</think>"]]}
    )
    [(key, why)] = settings.rules(RewardContext("rewards.short", "jsonl", 8, None))
    assert key == "rewards.short.thought_markers"
    assert why == "tokens are counted with the thoughts; set unit: words or characters"


def test_the_check_of_a_domain_ends_thoughts_that_the_prompt_opens(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "3+4=<think>", "answer": "7"}\n')
    domain = {
        "prompts": {
            "source": "jsonl",
            "path": f"{tmp_path}/rows.jsonl",
            "answer": "answer",
            "held_out_fraction": 1e-9,
        },
        "rewards": {"brief": {"kind": "length", "at_most": 99}, "right": {"kind": "math"}},
        "optimizer": {"learning_rate": 1},
        "loop": {"steps": 1},
    }
    job = {"domain": "sums", "settings": domain, "tokenizer": CHARACTERS, "pool": {"workers": 1}}
    report = checked(
        DomainCheckJob.model_validate({**job, "prompts": 1, "result": tmp_path / "result.json"})
    )
    [row] = report["prompts"]
    scores = {shown["what"]: shown["parts"]["right"] for shown in row["responses"]}
    assert scores == {"reference": 1.0, "empty": 0.0, "garbage": 0.0}
