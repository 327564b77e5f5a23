"""A real expert in the real loop, on fake engines: a guard stops it, a rule ends it, it resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from parallel.checkpoint import load
from parallel.files import whole_checkpoints
from parallel.sample import Sample
from stages.kinds.grpo.settings import GrpoSettings
from stages.kinds.grpo.work import GrpoStage
from stages.loop import GuardStopped, StageStopped, train
from stages.settings import StageJob
from tests.fake_engines import toy_domain, toy_job, toy_run
from tests.stages.toys import opened, start_elsewhere, trained

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 4
QUIET = {"mismatch": {"action": "off"}}  # fake engines make their log-probabilities up


def run(directory: Path, stop_after: int | None = None, **given: Any) -> GrpoStage:
    """Return an expert after its training; with `stop_after`, a signal comes in that step."""
    domain = toy_domain(loop={"steps": STEPS, "async_checkpoints": False}, **given)
    job = toy_job(directory, toy_run(sums=domain))
    return looped(opened(job), job, stop_after)


def looped(stage: GrpoStage, job: StageJob, stop_after: int | None = None) -> GrpoStage:
    handlers: list[Any] = []

    def step(number: int, whole: Any = stage.step) -> dict[str, float]:
        if number == stop_after:
            handlers[-1]()
        return whole(number)

    stage.step = step  # type: ignore[method-assign]
    with (
        mock.patch.object(load, "weights", start_elsewhere),
        mock.patch("stages.loop.signal.signal", lambda _, handler: handlers.append(handler)),
    ):
        train(stage, job, stage.loop, stage.watch)
    return stage


def steps(directory: Path) -> list[int]:
    return [line["step"] for line in logged(directory)]


def logged(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def saved(directory: Path) -> tuple[int, dict[str, Any]]:
    newest = whole_checkpoints(directory / "checkpoints")[-1]
    return newest.step, json.loads((newest.path / "state.json").read_text())


def test_a_guard_stops_after_saving_the_step_and_may_be_set_to_continue(tmp_path: Path) -> None:
    with pytest.raises(GuardStopped, match=r"^step 3 of experts.sums: guard mismatch: high_ratio"):
        run(tmp_path, guards={"mismatch": {"action": "stop"}})
    step, state = saved(tmp_path)
    assert step == 3
    assert state["watch"]["beyond"]["mismatch"] == 3
    assert "ended" not in state
    run(tmp_path, guards=QUIET)
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert saved(tmp_path)[0] == STEPS


def test_a_rule_ends_a_stage_which_is_then_finished(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rule = {"metric": "reward/parity", "at_least": 0.0, "window": 2}
    run(tmp_path, guards=QUIET, stop=rule)
    step, state = saved(tmp_path)
    assert step == 2
    assert state["ended"].startswith("done at step 2 of 4: reward/parity is 0.")
    assert f"braid-notice: {state['ended']}" in capfd.readouterr().err
    assert steps(tmp_path) == [1, 2]
    run(tmp_path, guards=QUIET, stop=rule)  # as a launcher does that was killed before it knew
    assert steps(tmp_path) == [1, 2]
    assert saved(tmp_path) == (step, state)


def test_a_rule_s_window_continues_after_a_signal(tmp_path: Path) -> None:
    rule = {"at_least": 0.0, "window": 3}
    with pytest.raises(StageStopped):
        run(tmp_path, stop_after=2, guards=QUIET, stop=rule)
    assert "ended" not in saved(tmp_path)[1]
    run(tmp_path, guards=QUIET, stop=rule)
    assert steps(tmp_path) == [1, 2, 3]
    assert saved(tmp_path)[1]["ended"].startswith("done at step 3 of 4: reward is ")


def test_a_resumed_stage_restores_its_state_and_takes_the_same_prompts(tmp_path: Path) -> None:
    small = {"window": 2}
    given: dict[str, Any] = {
        "guards": {**QUIET, "reward_collapse": small, "length_inflation": small},
        "curriculum": {"name": "frontier", "length_step": 1},
    }
    whole = run(tmp_path / "whole", **given)
    with pytest.raises(StageStopped):
        run(tmp_path / "cut", stop_after=2, **given)
    resumed = run(tmp_path / "cut", **given)
    assert resumed.state() == whole.state()
    assert trained(tmp_path / "cut") == trained(tmp_path / "whole")
    watched = ("all_right", "all_wrong", "reward_spread", "reward_drop", "length_inflation")
    for one, other in zip(logged(tmp_path / "whole"), logged(tmp_path / "cut"), strict=True):
        assert [one.get(name) for name in watched] == [other.get(name) for name in watched]
        assert one["passed_over"] == 4 * 3
    assert {"reward_drop", "length_inflation"} <= one.keys()


def test_one_policy_is_trained_on_all_domains_with_their_own_rewards(tmp_path: Path) -> None:
    own = {"kind": "python", "function": "tests.stages.small_rewards:parity"}
    length = {"kind": "length", "at_most": 4, "slack": 4}
    mixed = GrpoSettings.model_validate(
        {
            "from": "cold_start",
            "sampling": {"prompts_per_step": 2, "group_size": 4, "max_response_tokens": 8},
            "objective": {"advantage": {"name": "mo_grpo"}},
            "routing": {"replay": "none"},
            "optimizer": {"learning_rate": 1e-3},
            "updates_per_rollout": 2,
            "loop": {"steps": 2, "async_checkpoints": False},
            "guards": QUIET,
        }
    )
    settings = toy_run(
        sums=toy_domain(rewards={"parity": own, "brief": {**length, "weight": 0.5}}),
        words=toy_domain(prompts={"dataset": "spell_backward"}, rewards={"odd": own}),
    ).model_copy(update={"stages": {"mixed": mixed}})
    job = toy_job(tmp_path, settings, stage="mixed", block="mixed", domain=None)
    stage = opened(job)
    shares: list[list[str]] = []
    gradients = stage.gradients

    def watched(samples: list[Sample], batches: Any) -> dict[str, float]:
        shares.append([sample.domain for sample in samples])
        assert len({sample.group for sample in samples}) == 2
        return gradients(samples, batches)

    stage.gradients = watched  # type: ignore[method-assign]
    looped(stage, job)
    assert shares == [["sums"] * 4 + ["words"] * 4] * 4  # two updates of each of two steps
    for line in logged(tmp_path):
        assert {"reward/parity", "reward/brief", "reward/odd", "all_right"} <= line.keys()
        assert line["gradient_norm"] > 0
    assert saved(tmp_path)[0] == 2
    assert set(saved(tmp_path)[1]["cursors"]) == {"sums", "words"}
