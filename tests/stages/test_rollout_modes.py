"""A real expert trains in every mode on samples of fake engines, which die on demand."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parallel.engine.wire import Prompt
from stages.kinds.grpo.work import GrpoStage
from stages.sampling.logprob_check import MismatchError
from tests.fake_engines import (
    GROUP,
    PROMPTS,
    FakeEngine,
    RefittedFleet,
    toy_domain,
    toy_job,
    toy_run,
)
from tests.stages.toys import opened, trained
from tests.tiers import tiered

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 4


def expert(
    directory: Path, *engines: FakeEngine, bound: float = 1e9, **rollout: Any
) -> tuple[GrpoStage, RefittedFleet]:
    """Return an expert that starts from random weights, and its fleet."""
    settings = toy_run(bound, sums=toy_domain(rollout=rollout, loop={"steps": STEPS}))
    stage = opened(toy_job(directory, settings, *engines))
    stage.policy.start_fresh(0)
    fleet = stage.engines.fleet
    assert isinstance(fleet, RefittedFleet)
    return stage, fleet


def prompts(directory: Path) -> list[str]:
    """Return all prompts of all steps, sorted."""
    return sorted(prompt for step in trained(directory) for prompt in step)


def run(stage: GrpoStage) -> list[dict[str, float]]:
    return [stage.step(step) for step in range(1, STEPS + 1)]


def test_in_turn_trains_on_samples_of_its_own_weights(tmp_path: Path) -> None:
    stage, fleet = expert(tmp_path, FakeEngine())
    for metrics in run(stage):
        assert metrics["staleness_0"] == 1.0
        assert metrics["staleness_max"] == metrics["dropped_stale"] == metrics["requeued"] == 0
        assert metrics["mismatch_max"] > 0
        assert "drift_max" not in metrics
    assert fleet.versions == [1, 2, 3, 4]
    assert [len(step) for step in trained(tmp_path)] == [PROMPTS * GROUP] * STEPS
    assert stage.state()["begun"] == {"sums": []}


def test_one_ahead_samples_a_batch_by_the_previous_weights(tmp_path: Path) -> None:
    engine = FakeEngine(pace=0.002)
    stage, fleet = expert(tmp_path, engine, max_steps_ahead=1)
    refit = fleet.refit

    def watched(policy: Any, version: int) -> dict[str, float]:
        assert stage.engines.scheduler.owed == 0  # never in the middle of a batch
        return refit(policy, version)

    fleet.refit = watched  # type: ignore[method-assign]
    measured = run(stage)
    assert [metrics["staleness_max"] for metrics in measured] == [0, 1, 1, 1]
    assert [metrics["staleness_1"] for metrics in measured] == [0, 1, 1, 1]
    assert all(metrics["drift_max"] > 0 for metrics in measured)
    assert sorted(set(fleet.versions)) == [1, 2, 3, 4]
    assert stage.state()["begun"] == {"sums": []}  # nothing is begun that no step would train on


def test_groups_that_wait_for_a_later_step_need_probes(tmp_path: Path) -> None:
    """Their tokens are of older weights, so they cannot show that a weight sync was wrong."""
    stage, _ = expert(tmp_path, FakeEngine(), oversampling=1.5, max_staleness=2)
    assert stage.probes


@pytest.mark.parametrize("bound", [1, 2])
def test_continuous_stays_within_its_bound_and_accounts_for_every_prompt(
    bound: int, tmp_path: Path
) -> None:
    ahead = {"max_steps_ahead": bound, "sync_in_flight": True}
    stage, fleet = expert(tmp_path, FakeEngine(pace=0.01), **ahead)
    measured = run(stage)
    assert fleet.versions == [1, 2, 3, 4]
    assert all(metrics["staleness_max"] <= bound for metrics in measured)
    assert max(metrics["staleness_max"] for metrics in measured) >= 1
    shares = [sum(metrics[f"staleness_{n}"] for n in range(bound + 1)) for metrics in measured]
    assert shares == pytest.approx([1.0] * STEPS)
    dropped = sum(metrics["dropped_stale"] for metrics in measured)
    left = len(stage.state()["begun"]["sums"]) * GROUP
    taken = sum(len(step) for step in trained(tmp_path))
    engine = fleet.engines[0]
    asked = sum(len(request.prompts) for request in engine.requests)
    assert asked == taken + dropped + left + STEPS * 4  # four probes a step
    assert taken == STEPS * PROMPTS * GROUP
    stage.close()


def test_continuous_samples_no_earlier_than_needed(tmp_path: Path) -> None:
    stage, _ = expert(tmp_path, FakeEngine(), max_steps_ahead=3)
    assert [metrics["staleness_mean"] for metrics in run(stage)] == [0, 1, 1, 1]


def test_oversampling_keeps_late_groups_for_the_next_step(tmp_path: Path) -> None:
    stage, _ = expert(tmp_path, FakeEngine(pace=0.001), oversampling=1.5)
    measured = run(stage)
    begun = stage.state()["begun"]["sums"]
    assert len(begun) == PROMPTS // 2
    assert all(metrics["staleness_max"] <= 1 for metrics in measured)
    assert {metrics["dropped_stale"] for metrics in measured} == {0}
    assert len(prompts(tmp_path)) == STEPS * PROMPTS * GROUP
    stage.close()


def test_dynamic_sampling_reports_replaced_groups(tmp_path: Path) -> None:
    plain, _ = expert(tmp_path / "plain", FakeEngine())
    flat = plain.step(1)["zero_variance"]
    assert 0 < flat < 1
    replacing, _ = expert(tmp_path / "replacing", FakeEngine(), dynamic_sampling=1)
    metrics = replacing.step(1)
    assert metrics["resampled_groups"] == flat * PROMPTS
    assert [len(step) for step in trained(tmp_path / "replacing")] == [PROMPTS * GROUP]


@pytest.mark.parametrize("mode", ["sync", "overlap", "async"])
@pytest.mark.parametrize("engines", tiered([1, 2], {2}))
def test_a_step_completes_whatever_its_engines_do(mode: str, engines: int, tmp_path: Path) -> None:
    calm, _ = expert(tmp_path / "calm", FakeEngine(), mode=mode)
    run(calm)
    calls = 0

    def trouble(_: Prompt) -> str | None:
        nonlocal calls
        calls += 1
        return ("dies", "garbage", "ends")[calls % 3] if calls % 17 == 0 else None

    fakes = [FakeEngine(f"engine {number}", trouble, 0.001) for number in range(engines)]
    stage, fleet = expert(tmp_path / "stormy", *fakes, mode=mode)
    measured = run(stage)
    assert fleet.losses >= 2
    assert sum(metrics["engine_restarts"] for metrics in measured) == pytest.approx(
        fleet.losses, abs=1
    )
    assert sum(metrics["requeued"] for metrics in measured) > 0
    assert sum(metrics["dropped_stale"] for metrics in measured) == 0
    assert prompts(tmp_path / "calm") == prompts(tmp_path / "stormy")  # none lost, none twice
    stage.close()


@pytest.mark.parametrize("mode", ["sync", "overlap", "async"])
def test_engines_that_disagree_twice_end_the_stage(mode: str, tmp_path: Path) -> None:
    stage, fleet = expert(tmp_path, FakeEngine(), bound=1e-4, mode=mode)
    with pytest.raises(MismatchError):
        stage.step(1)
    assert fleet.versions.count(1) >= 2


@pytest.mark.parametrize("mode", ["sync", "overlap", "async"])
def test_a_resumed_stage_continues_with_the_prompts_in_flight(mode: str, tmp_path: Path) -> None:
    make: Callable[[Path], tuple[GrpoStage, RefittedFleet]] = partial(expert, mode=mode)
    whole, _ = make(tmp_path / "whole", FakeEngine())
    run(whole)
    first, _ = make(tmp_path / "cut", FakeEngine())
    for step in (1, 2):
        first.step(step)
    state = json.loads(json.dumps(first.state()))
    first.close()
    second, _ = make(tmp_path / "cut", FakeEngine())
    second.restore(state)
    for step in (3, 4):
        second.step(step)
    assert prompts(tmp_path / "whole") == prompts(tmp_path / "cut")
