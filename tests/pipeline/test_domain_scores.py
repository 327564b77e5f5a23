"""The errors, notes and counts that `braid domain check` reports."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.report.domain_scores import (
    binned,
    cut_off,
    demonstrated,
    described,
    errors,
    notes,
    previewed,
)
from stages.domains import DomainSettings

RIGHT = {"right": {"kind": "math"}}


def settings(**rewards: Any) -> DomainSettings:
    return DomainSettings.model_validate(
        {
            "prompts": {"dataset": "chain_sum"},
            "rewards": rewards,
            "optimizer": {"learning_rate": 1},
            "loop": {"steps": 1},
        }
    )


def prompt(
    failure: str | None = None, watch_failures: tuple[str, ...] = (), **scores: float
) -> dict[str, Any]:
    """Return a prompt at which the reward `right` gave these scores."""
    return {
        "prompt": "1+1=",
        "answer": "2",
        "tokens": 4,
        "responses": [
            {
                "what": what,
                "text": what,
                "parts": {"right": score},
                "reward": score,
                "failure": failure,
                "watch_failures": watch_failures,
            }
            for what, score in scores.items()
        ],
    }


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({"reference": 1.0, "empty": 0.0, "garbage": 0.0}, None),
        ({"reference": 0.5, "empty": 0.0, "garbage": 0.0}, None),
        ({"reference": 0.0, "empty": 0.0, "garbage": 0.0}, "the reference scores 0, no more"),
        ({"reference": 1.0, "empty": 1.0, "garbage": 0.0}, "the reference scores 1, no more"),
        ({"empty": 1.0, "garbage": 0.0}, "the empty response scores 1 on every prompt"),
        ({"empty": 0.0, "garbage": 1.0}, "the garbage response scores 1 on every prompt"),
        ({"empty": 0.0, "garbage": 0.0}, None),
    ],
)
def test_right_must_score_above_wrong(scores: dict[str, float], message: str | None) -> None:
    found = list(errors("sums", settings(**RIGHT), [prompt(**scores)] * 2))
    assert len(found) == (message is not None)
    assert not found or found[0].startswith(f"domains.sums.rewards.right: {message}")


def test_what_judges_no_answer_may_give_what_it_likes_where_the_sum_is_right() -> None:
    watched = settings(right={"kind": "math", "weight": 0}, form={"kind": "format", "pattern": "x"})
    assert not list(errors("sums", watched, [prompt(reference=1.0, empty=0.0)]))
    [error] = errors("sums", watched, [prompt(reference=0.0, empty=0.0)] * 2)
    assert error.startswith(
        "domains.sums.rewards: none of them judges the answer, and the reference earns 0, no more"
    )
    assert error.endswith("named with them: exact: {kind: reasoning_gym}")


def test_one_reward_of_several_may_be_met_by_a_wrong_response() -> None:
    auxiliary = prompt(reference=1.0, empty=1.0)
    for response, reward in zip(auxiliary["responses"], (1.2, 0.2), strict=True):
        response["reward"] = reward
    assert not list(errors("sums", settings(**RIGHT), [auxiliary]))
    [note] = notes("sums", settings(**RIGHT), [auxiliary])
    assert note.startswith("domains.sums.rewards.right: by itself it does not tell right from wro")


def test_a_reward_that_fails_is_an_error() -> None:
    failed = prompt(failure="domains.sums.rewards.right: raised KeyError('x')", empty=0.0)
    [found] = errors("sums", settings(**RIGHT), [failed, failed])
    assert found.startswith("a reward failed on 2 responses, which then have none; domains.sums.re")


def test_a_reward_that_only_watches_and_fails_is_noted() -> None:
    found = [prompt(watch_failures=("it hung",), reference=1.0, empty=0.0)]
    assert not list(errors("sums", settings(**RIGHT), found))
    assert list(notes("sums", settings(**RIGHT), found)) == [
        "rewards of weight 0 failed on 2 responses, which keep the others' rewards; the first: it "
        "hung"
    ]


def test_what_was_not_tried_is_noted() -> None:
    whole = {"reference": 1.0, "empty": 0.0}
    assert list(notes("sums", settings(**RIGHT), [prompt(**whole)])) == []
    [partly] = notes("sums", settings(**RIGHT), [prompt(reference=0.5, empty=0.0)])
    assert "the reference scores 0.5 on 1 of 1 prompts, and evaluation counts only 1" in partly
    [untried] = notes("sums", settings(**RIGHT), [prompt(empty=0.0)])
    assert untried.startswith("there are no reference answers")
    form = settings(form={"kind": "format", "pattern": "x"})
    assert next(iter(notes("sums", form, [prompt(**whole)]))).startswith("no reward judges")


def test_counts_are_reported() -> None:
    lengths = {
        "rows": 100,
        "bad": 0,
        "duplicates": 4,
        "prompts": 96,
        "held_out": 19,
        "for_gates": 5,
        "too_long": 0,
        "tokens": {"0": 5, "100": 12},
    }
    assert list(described(settings(**RIGHT), lengths)) == [
        "prompts: reasoning-gym's chain_sum, without end; 100 sampled",
        "  4 repeated, 0 unusable: 72 to train on, 19 held out, 5 for gates; 0 of all are too long",
        "  tokens of a prompt, by percentile: 5 (0 %), 12 (100 %)",
        "  the longest prompt and sampling.max_response_tokens = 24 are 36 tokens; "
        "engine.max_model_tokens must allow them",
    ]


def test_the_demonstrations_are_described() -> None:
    report = {
        "rows": 2000,
        "bad": 0,
        "duplicates": 3,
        "held_out": 4,
        "usable": 1993,
        "limit": 40,
        "too_long": 5,
        "tokens": {"0": 5, "100": 41},
        "learned": 0.375,
        "examples": [("1+1=", "<2>2")],
        "turns": {"checked": 2000, "limit": 24, "too_long": 0, "tokens": {"0": 3, "100": 9}},
    }
    assert list(demonstrated(settings(**RIGHT), report)) == [
        "demonstrations: generated, 4000 in a run; 2000 checked",
        "  3 repeated, 0 unusable: 1993 to learn from, 4 whose prompts are held out",
        "  5 of these are too long: more than 40 tokens",
        "  tokens of a demonstration, by percentile: 5 (0 %), 41 (100 %)",
        "  tokens of its longest answer, by percentile: 3 (0 %), 9 (100 %)",
        "  38 % of tokens are trained on: the assistant's",
        "  '1+1=' is answered '<2>2'",
    ]
    lines = list(demonstrated(settings(**RIGHT), {**report, "limit": None}))
    assert lines[2].endswith("are too long: count them with --run")
    assert list(demonstrated(settings(**RIGHT), None)) == [
        "demonstrations: none; a run with a cold start needs them from files"
    ]


def test_a_distribution_counts_every_value_once() -> None:
    assert binned([1.0, 0.0, 1.0]) == {"0": 1, "1": 2}
    many = [n / 100 for n in range(101)]
    counts = binned(many)
    assert next(iter(counts)) == "0 to 0.1"
    assert list(counts)[-1] == "0.9 to 1"
    assert sum(counts.values()) == len(many)
    assert set(counts.values()) <= {9, 10, 11}  # edges are rounded


def test_a_sample_without_a_reward_is_in_no_distribution() -> None:
    lost = {"prompt": "1+1=", "response": "2", "reward": None, "parts": {}}
    lost |= {"solved": False, "finished": True, "tokens": 1}
    found = {"groups": [[lost]], "failures": ["it hung"], "watch_failures": ["it raised"]}
    assert list(previewed(found))[-2:] == [
        "  without a reward: 100 %; the first: it hung",
        "  a reward of weight 0 failed 1 times; the first: it raised",
    ]


def test_a_limit_below_the_right_answers_is_an_error_and_below_some_demonstrations_a_note() -> None:
    def lengths(too_long: int) -> dict[str, Any]:
        return {"checked": 100, "limit": 32, "too_long": too_long, "tokens": {"0": 9, "100": 42}}

    assert not [*cut_off("calls", None, None)]
    assert not [*cut_off("calls", lengths(5), lengths(5))]  # as many as are healthy
    [(text, prevents)] = cut_off("calls", lengths(97), lengths(0))
    assert prevents
    assert text == (
        "domains.calls.sampling.max_response_tokens = 32: 97% of the reference answers are longer,"
        " up to 42 tokens with the end token; such responses are truncated and earn nothing: raise"
        " it to 42 or more"
    )
    [(text, prevents)] = cut_off("calls", None, lengths(40))
    assert "40% of the demonstrated answers are longer" in text and not prevents
    assert [prevents for _, prevents in cut_off("calls", None, lengths(60))] == [True]
