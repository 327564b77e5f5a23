"""The guards' metrics, by hand; when they warn and stop; and their memory over a restart."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from parallel.sample import Sample
from stages.domains import DomainSettings
from stages.guards.registry import GUARDS
from stages.guards.settings import GuardsSettings
from stages.guards.watch import GuardMonitor, StepVerdict
from stages.kinds.rules import under
from stages.metric_definitions import METRICS
from stages.metrics import SKETCH, group_metrics, jaccard, repeats, sketch
from stages.objectives.groups import Group
from stages.rewards.kinds import RewardSettings
from stages.rewards.kinds.format import FormatReward
from stages.rewards.kinds.length import LengthReward
from stages.rewards.kinds.math import MathReward

REWARDS: dict[str, RewardSettings] = {"right": MathReward(), "brief": LengthReward(at_most=3)}
DOMAINS = {"sums": REWARDS}


def tokens(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def similarity(one: list[int], other: list[int]) -> float:
    return jaccard(sketch(tokens(*one)), sketch(tokens(*other)))


def test_similarity_is_the_share_of_common_shingles() -> None:
    assert similarity([1, 2, 3, 4], [1, 2, 3, 5]) == pytest.approx(1 / 3)
    assert similarity([1, 2, 3, 4], [1, 2, 3, 4, 9]) == pytest.approx(2 / 3)
    assert similarity([1, 2, 3], [3, 2, 1]) == 0
    assert similarity([1, 2], [1, 2, 3]) == 0  # two tokens are one shingle
    assert similarity([7], [7]) == similarity([], []) == 1
    assert similarity([], [1]) == 0


@pytest.mark.parametrize("shared", [0, 1000, 3000, 4000])
def test_long_responses_are_estimated_by_sketches(shared: int) -> None:
    draw = np.random.default_rng(shared)
    one, other = (draw.integers(0, 50_000, 4000, dtype=np.int32) for _ in range(2))
    other[:shared] = one[:shared]
    exact = max(0, shared - 2) / (2 * 3998 - max(0, shared - 2))  # no shingle repeats by chance
    assert len(sketch(one).hashes) == SKETCH
    assert jaccard(sketch(one), sketch(other)) == pytest.approx(exact, abs=0.1)


def test_repeats_of_a_group_are_counted_once_each() -> None:
    one = np.arange(12, dtype=np.int32)
    near = one.copy()
    near[-1] = 99  # 9 of 11 runs: .818
    assert repeats([one, near, one, one], 0.8) == (2, 3)
    assert repeats([one, near, one, one], 0.82) == (2, 2)
    assert repeats([one, one[::-1].copy()], 0.8) == (0, 0)


def group(*samples: tuple[int, float | None, float]) -> Group:
    """Return a group of (length, right, brief) each; no reward where right is None."""
    found = []
    for place, (length, right, brief) in enumerate(samples):
        sample = Sample("sums", tokens(1), np.full(length, 10 * place, np.int32))
        if right is not None:
            sample.reward_parts = {"right": right, "brief": brief}
            sample.reward = right + 0.5 * brief
        found.append(sample)
    return Group(mock.Mock(), 0, list(found), ended=0)


def test_group_metrics() -> None:
    groups = [
        group((2, 1.0, 1.0), (4, 1.0, 0.0)),
        group((6, 0.0, 0.0), (6, 0.0, 0.0)),
        group((2, 1.0, 0.0), (8, 0.0, 0.0)),
        group((4, 0.0, 1.0), (4, None, 0.0)),
    ]
    assert group_metrics(groups, DOMAINS) == {
        "all_right": 1 / 4,
        "all_wrong": 2 / 4,
        "reward_spread": pytest.approx((0.25 + 0 + 0.5) / 3),
        "wrong_over_right": pytest.approx(6 / (8 / 3)),
        "identical_responses": 0,
        "similar_responses": 0,
    }


def test_groups_without_rewards_count_only_as_similar() -> None:
    nothing = group((3, None, 0.0), (3, None, 0.0))
    nothing.slots[1] = nothing.slots[0]
    assert group_metrics([nothing], DOMAINS) == {
        "all_right": 0,
        "all_wrong": 0,
        "identical_responses": 1,  # of the one that has an earlier one
        "similar_responses": 1,
    }


def trends(
    rewards: dict[str, RewardSettings], **windows: int
) -> Callable[[dict[str, float]], dict[str, float]]:
    """Return a function that takes a step's metrics and returns those of the full windows."""
    given = {name: {"window": window} for name, window in windows.items()}
    settings = domain_settings(guards=given)
    monitor = GuardMonitor("experts.sums", under("domains.sums"), settings, rewards)
    return lambda metrics: monitor.observe(1, metrics).metrics


def test_the_reward_drop_is_measured_from_the_best_window() -> None:
    watched = trends(REWARDS, reward_collapse=2)
    found = [watched({"reward": reward}) for reward in (0.0, 1.0, 1.0, 0.0, 0.0)]
    assert found[0] == {}
    assert [each["reward_drop"] for each in found[1:]] == [0, 0, 0.5, 1]


def test_length_inflation_is_relative_to_the_first_window() -> None:
    watched = trends(REWARDS, length_inflation=2)
    steps = [{"wrong_over_right": ratio} for ratio in (1.0, 1.0, 2.0, 2.0)]
    steps.insert(2, {})  # no right answer, or no wrong one
    found = [watched(step).get("length_inflation") for step in steps]
    assert found == [None, 1, 1, 1.5, 2]


def test_a_format_gain_is_reduced_by_a_gain_of_the_answers() -> None:
    rewards = {"right": MathReward(), "form": FormatReward(pattern="x", weight=0.5)}
    steps = [(0.2, 0.4), (0.2, 0.8), (0.5, 0.9), (0.3, 1.0)]
    watched = trends(rewards, format_gain=1)
    found = [watched({"reward/right": a, "reward/form": b}) for a, b in steps]
    assert found[0] == {}
    gains = [each["format_gain"] for each in found[1:]]
    assert gains == pytest.approx([0.2, 0.0, 0.05])
    for unwatched in (
        {"right": MathReward()},
        {**rewards, "form": FormatReward(pattern="x", weight=0)},
    ):
        watched = trends(unwatched, format_gain=1)
        metrics = {f"reward/{name}": 1.0 for name in unwatched}
        assert [watched(metrics) for _ in range(3)] == [{}] * 3


def domain_settings(steps: int = 9, **given: Any) -> DomainSettings:
    domain = {
        "prompts": {"dataset": "chain_sum"},
        "optimizer": {"learning_rate": 1.0},
        "loop": {"steps": steps},
        **given,
    }
    return DomainSettings.model_validate(domain)


def watch(**given: Any) -> GuardMonitor:
    settings = domain_settings(**given)
    return GuardMonitor("experts.sums", under("domains.sums"), settings, settings.rewards)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr("stages.guards.watch.report_notice", found.append)
    return found


def observe(watched: GuardMonitor, metric: str, *values: float | None) -> list[StepVerdict]:
    given = [{} if value is None else {metric: value} for value in values]
    return [watched.observe(step, metrics) for step, metrics in enumerate(given, start=1)]


def test_a_warning_is_reported_once_an_episode(said: list[str]) -> None:
    watched = watch(guards={"entropy_collapse": {"threshold": 0.5, "patience": 2}})
    values = (0.4, 0.5, 0.4, None, 0.3, 0.2, 0.6, 0.4, 0.4)  # at the threshold is not beyond it
    assert observe(watched, "entropy", *values) == [StepVerdict()] * 9
    assert [line.partition(":")[0] for line in said] == [
        "step 5 of experts.sums",
        "step 9 of experts.sums",
    ]
    assert said[0].startswith(
        "step 5 of experts.sums: guard entropy_collapse: entropy is 0.3, below"
        " domains.sums.guards.entropy_collapse.threshold = 0.5, for 2 steps in a row; raise "
    )


def test_a_guard_that_stops_reports_its_remedy(said: list[str]) -> None:
    given = {"threshold": 0.25, "patience": 2, "action": "stop"}
    verdicts = observe(watch(guards={"truncation": given}), "unfinished", 0.3, 0.2, 0.3, 0.5)
    assert [verdict.stop for verdict in verdicts[:3]] == [None] * 3
    assert verdicts[3].stop == (
        "step 4 of experts.sums: guard truncation: unfinished is 0.5, above"
        " domains.sums.guards.truncation.threshold = 0.25, for 2 steps in a row; raise"
        " sampling.max_response_tokens. The stage saved a checkpoint and stopped; to continue"
        " from there regardless, set domains.sums.guards.truncation.action=warn, or another"
        " threshold, and run it again"
    )
    assert said == []


def test_a_guard_that_is_off_is_silent(said: list[str]) -> None:
    watched = watch(guards={"truncation": {"action": "off", "patience": 1}})
    assert observe(watched, "unfinished", 1.0, 1.0) == [StepVerdict()] * 2
    assert said == []


def test_a_mismatch_that_the_correction_may_weigh_is_a_warning(said: list[str]) -> None:
    """The engine's bound stops at ten times as much."""
    verdicts = observe(watch(), "high_ratio", 0.002, 0.002, 0.002)
    assert verdicts == [StepVerdict()] * 3
    [warning] = said
    assert "guard mismatch: high_ratio is 0.002, above" in warning


def test_a_stage_ends_when_a_full_window_reaches_the_rule(said: list[str]) -> None:
    rule = {"metric": "all_right", "at_least": 0.5, "window": 2}
    ends = [each.end for each in observe(watch(stop=rule), "all_right", 0.9, None, 0.0, 0.4, 0.6)]
    assert ends[:4] == [None] * 4
    assert ends[4] == (
        "done at step 5 of 9: all_right is 0.5 over 2 steps, at least"
        " domains.sums.stop.at_least = 0.5"
    )
    assert said == [ends[4]]
    last = observe(watch(steps=2, stop=rule), "all_right", 1.0, 1.0)
    assert last[1].end is None  # that was the last step anyway


def test_a_guard_s_stop_precedes_the_rule_s(said: list[str]) -> None:
    watched = watch(
        stop={"at_least": 0.5, "window": 1},
        guards={"truncation": {"action": "stop", "patience": 1}},
    )
    verdict = watched.observe(1, {"reward": 1.0, "unfinished": 1.0})
    assert verdict.stop is not None
    assert verdict.end is None
    assert said == []


@pytest.mark.parametrize("cut", range(1, 12, 3))
def test_the_memory_survives_a_restart(cut: int, said: list[str]) -> None:
    names = ("entropy", "reward", "wrong_over_right", "reward/exact", "reward/form", "unfinished")
    draw = np.random.default_rng(cut)
    steps = [dict(zip(names, draw.random(len(names)).tolist(), strict=True)) for _ in range(12)]
    small = {"threshold": 0.1, "patience": 2, "window": 2}
    given = {
        "rewards": {"exact": {"kind": "reasoning_gym"}, "form": {"kind": "format", "pattern": "x"}},
        "guards": {
            "reward_collapse": small,
            "length_inflation": small,
            "format_gain": small,
            "entropy_collapse": {"threshold": 0.6, "action": "stop", "patience": 2},
        },
        "stop": {"at_least": 0.5, "window": 3},
        "steps": 99,
    }
    whole = watch(**given)
    expected = [whole.observe(step, each) for step, each in enumerate(steps)]
    expected_said = list(said)
    said.clear()
    first, second = watch(**given), watch(**given)
    found = [first.observe(step, each) for step, each in enumerate(steps[:cut])]
    second.restore(json.loads(json.dumps(first.state())))
    found += [second.observe(step, each) for step, each in enumerate(steps[cut:], start=cut)]
    assert found == expected
    assert said == expected_said
    assert second.state() == whole.state()
    assert any(verdict.stop for verdict in expected)
    assert any(verdict.end for verdict in expected)


def test_every_guard_watches_a_declared_metric() -> None:
    assert list(GUARDS) == list(GuardsSettings.model_fields)
    assert {guard.metric for guard in GUARDS.values()} <= METRICS.keys()


def test_a_part_of_a_long_response_is_estimated_by_sketches() -> None:
    whole = np.random.default_rng(0).integers(0, 50_000, 4000, dtype=np.int32)
    assert jaccard(sketch(whole), sketch(whole[:2000])) == pytest.approx(0.5, abs=0.1)
