"""The bounds on the mismatch of engine and trainer, by precision and by setting."""

from __future__ import annotations

import math

import pytest

from parallel.mismatch import MismatchBounds, bounds_of, mismatch_bounds, warning
from parallel.settings import EngineSettings
from stages.keys import NON_INVALIDATING_KEYS
from tests.fake_engines import MODEL

LOW = MODEL.model_copy(update={"precision": "bf16"})


def metrics(largest: float, mean: float = 0.0, high: float = 0.0) -> dict[str, float]:
    return {"mismatch_max": largest, "mismatch_mean": mean, "high_ratio": high}


def test_fp32_bounds_the_maximum_and_bf16_the_mean_and_the_share() -> None:
    assert bounds_of(MODEL, EngineSettings()) == MismatchBounds(1e-4, math.inf, math.inf)
    assert bounds_of(LOW, EngineSettings()) == MismatchBounds(math.inf, 0.05, 1e-2)


def test_fp8_weights_are_allowed_more_than_bf16_weights() -> None:
    low, fp8 = mismatch_bounds("bf16"), mismatch_bounds("bf16", "fp8")
    assert fp8.mean > low.mean
    assert fp8.high_ratio > low.high_ratio
    assert mismatch_bounds("fp32", "fp8") == fp8
    if "weights" in EngineSettings.model_fields:
        assert bounds_of(LOW, EngineSettings(weights="fp8")) == fp8  # type: ignore[call-arg]


def test_a_setting_overrides_a_default_and_no_other() -> None:
    engine = EngineSettings(max_logprob_difference=3, max_high_ratio=0.5)
    assert bounds_of(LOW, engine) == MismatchBounds(3, 0.05, 0.5)
    engine = EngineSettings(max_mean_logprob_difference=0.01)
    assert bounds_of(MODEL, engine) == MismatchBounds(1e-4, 0.01, math.inf)


@pytest.mark.parametrize(
    ("model", "found", "named"),
    [
        (MODEL, metrics(9e-5, 9e-5, 0), []),
        (MODEL, metrics(2e-4), ["by up to 0.0002 nats, above engine.max_logprob_difference ="]),
        (MODEL, metrics(math.inf, math.inf, 1), ["by up to inf nats"]),
        (LOW, metrics(5.0, 0.02, 5e-3), []),
        (
            LOW,
            metrics(5.0, 0.06),
            ["by 0.06 nats on average over 10000 tokens, above"],
        ),
        (LOW, metrics(5.0, 0.02, 0.02), ["by more than ln 2 nats on 200 of 10000 tokens, above"]),
        (LOW, metrics(math.inf, math.inf, 1e-4), ["by inf nats on average"]),
    ],
)
def test_a_message_says_which_bound_is_exceeded_by_how_much(
    model: object, found: dict[str, float], named: list[str]
) -> None:
    exceeded = bounds_of(model, EngineSettings()).exceeded(found, 10_000)  # type: ignore[arg-type]
    assert len(exceeded) == len(named)
    for line, start in zip(exceeded, named, strict=True):
        assert line.startswith(start)


def test_one_stray_token_among_few_probes_does_not_stop_a_stage() -> None:
    bounds = bounds_of(LOW, EngineSettings())
    stray = 2.0  # nats
    assert not bounds.exceeded(metrics(stray, 0.01 + stray / 32, 1 / 32), 32)
    assert bounds.exceeded(metrics(stray, 0.06 + stray / 32, 1 / 32), 32)
    assert bounds.exceeded(metrics(stray, 0.01 + 3 * stray / 32, 3 / 32), 32)


@pytest.mark.parametrize(
    ("tokens", "passes", "exceeds"), [(32, 3, 4), (256, 9, 10), (1_000_000, 10_401, 10_402)]
)
def test_more_tokens_far_off_than_chance_explains_stop_a_stage(
    tokens: int, passes: int, exceeds: int
) -> None:
    """One and four standard deviations above 1 in 100, however many tokens there are."""
    bounds = bounds_of(LOW, EngineSettings())
    assert not bounds.exceeded(metrics(2.0, 0.01, passes / tokens), tokens)
    assert bounds.exceeded(metrics(2.0, 0.01, exceeds / tokens), tokens)


@pytest.mark.parametrize(
    ("tokens", "silent", "reported"), [(32, 1, 2), (1_000, 6, 7), (1_000_000, 1_127, 1_128)]
)
def test_a_share_that_stops_nothing_is_a_warning_from_one_in_a_thousand(
    tokens: int, silent: int, reported: int
) -> None:
    assert warning(metrics(2.0, 0.01, silent / tokens), tokens) is None
    found = metrics(2.0, 0.01, reported / tokens)
    assert not bounds_of(LOW, EngineSettings()).exceeded(found, tokens)
    expected = f"by more than ln 2 nats on {reported} of {tokens:g} tokens, a share above 0.001"
    assert warning(found, tokens) == expected


def test_the_bounds_make_no_finished_stage_stale() -> None:
    bounds = ("max_logprob_difference", "max_mean_logprob_difference", "max_high_ratio")
    assert {f"engine.{key}" for key in bounds} <= set(NON_INVALIDATING_KEYS)
