"""A real expert is killed and resumed: what the log has of its steps is trained on as before."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.checkpoint import load
from parallel.checkpoint.save import Saver
from stages.kinds.grpo.work import GrpoStage
from stages.sampling.logprob_check import Mismatch, MismatchError
from tests.fake_engines import (
    GROUP,
    PROMPTS,
    FakeEngine,
    toy_domain,
    toy_job,
    toy_run,
)
from tests.stages.conftest import OPENED
from tests.stages.toys import Killed, after, asked, opened
from tests.tiers import tiered

pytestmark = pytest.mark.usefixtures("one_rank")

A_STEP = PROMPTS * GROUP


def expert(
    directory: Path,
    engine: FakeEngine,
    deterministic: bool = False,
    bound: float = 1e9,
    **rollout: Any,
) -> tuple[GrpoStage, int]:
    """Return an expert resumed from its newest checkpoint, as the loop does, and its last step."""
    settings = toy_run(bound, sums=toy_domain(rollout=rollout, loop={"steps": 6}))
    settings = settings.model_copy(update={"deterministic": deterministic})
    stage = opened(toy_job(directory, settings, engine))
    stage.engines.fleet.sequences = 1000  # type: ignore[attr-defined]  # one stream a call
    newest, _ = load.newest_intact(directory / "checkpoints")
    if newest is None:
        stage.policy.start_fresh(0)
        return stage, 0
    state = load.training_state(stage.policy, newest)
    stage.restore(state)
    return stage, state["step"]


def save(stage: GrpoStage, directory: Path, step: int) -> None:
    saver = Saver(directory / "checkpoints")
    saver.begin(stage.policy, step, stage.state())
    saver.finish()


def logs(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "rollouts" / "log").iterdir())


def run(directory: Path, engine: FakeEngine, **how: Any) -> list[dict[str, float]]:
    """Steps to the fourth, saved after the second and the fourth."""
    stage, done = expert(directory, engine, **how)
    measured = []
    for step in range(done + 1, 5):
        measured.append(stage.step(step))
        if step % 2 == 0:
            save(stage, directory, step)
    stage.close()
    return measured


@pytest.mark.parametrize("deterministic", tiered([False, True], {True}))
def test_a_stage_killed_in_two_steps_ends_with_the_same_weights(
    deterministic: bool, tmp_path: Path
) -> None:
    calm = FakeEngine()
    expected = run(tmp_path / "calm", calm, deterministic=deterministic)
    total = Counter[int]()
    for answers in (A_STEP + 5, 30, 4 * A_STEP):
        engine = FakeEngine(trouble=after(answers))
        try:
            measured = run(tmp_path / "killed", engine, deterministic=deterministic)
        except Killed:
            OPENED.pop().close()
        total += engine.drawn
    calm_weights, weights = (stage.policy.named_weights() for stage in OPENED)
    assert all(torch.equal(calm_weights[name], weights[name]) for name in calm_weights)
    assert [each["reward"] for each in measured] == [each["reward"] for each in expected[-2:]]
    if deterministic:  # a step whose answers had not all come is drawn again as a whole
        assert total.total() == 4 * A_STEP + 5 + 14
    else:
        assert total == calm.drawn  # nothing twice
    assert not logs(tmp_path / "killed")  # a checkpoint has it all


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_killed_step_is_replayed_and_counted(deterministic: bool, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path, FakeEngine(trouble=after(3 * A_STEP + 5)), deterministic=deterministic)
    OPENED.pop().close()
    engine = FakeEngine()
    third, fourth = run(tmp_path, engine, deterministic=deterministic)
    left = 0 if deterministic else 5
    assert (third["replayed"], fourth["replayed"]) == (A_STEP, left)
    assert asked(engine).total() == A_STEP - left


def disagreeing(stage: GrpoStage, *found: float) -> None:
    """Have the engine seem to be so far from the policy, attempt for attempt."""
    accept, left = stage._accept, iter(found)

    def accepted(differences: Mismatch) -> dict[str, float]:
        return accept(
            Mismatch(differences.tokens, {**differences.metrics, "mismatch_max": next(left)})
        )

    stage._accept = accepted  # type: ignore[method-assign]


def test_replayed_samples_that_fail_the_logprob_check_are_sampled_again(tmp_path: Path) -> None:
    """The check of replayed samples is no attempt at a refit: there are two more."""
    with pytest.raises(Killed):
        run(tmp_path, FakeEngine(trouble=after(2 * A_STEP + 5)))
    OPENED.pop().close()
    engine = FakeEngine()
    stage, _ = expert(tmp_path, engine, bound=5.0)
    disagreeing(stage, 9.0, 9.0, 1.0)
    assert stage.step(3)["replayed"] == 5
    assert stage.engines.fleet.versions == [3, 3, 3]  # type: ignore[attr-defined]
    assert asked(engine).total() == 3 * A_STEP - 5
    assert set(asked(engine).values()) == {1}  # every attempt has its own seeds
    stage.close()
    # The log has the one that was taken, and the next to resume asks for the others again.
    other, _ = expert(tmp_path, engine := FakeEngine(), bound=5.0)
    disagreeing(other, 9.0, 9.0)
    with pytest.raises(MismatchError):
        other.step(3)
    assert asked(engine).total() == 2 * A_STEP
    assert not logs(tmp_path)


@pytest.mark.parametrize("mode", tiered(["overlap", "async"], {"async"}))
def test_only_the_first_step_sampled_by_older_weights_is_replayed(
    mode: str, tmp_path: Path
) -> None:
    """The weights that a stage resumes with are those of before; the next ones are not."""
    stage, _ = expert(tmp_path, FakeEngine(), mode=mode)
    for step in range(1, 6):
        stage.step(step)
        while stage.engines.scheduler.owed:  # so that no response is of several weights
            time.sleep(0.01)
        if step == 2:
            save(stage, tmp_path, step)
    stage.close()
    assert {"version_3.log", "version_4.log"} <= set(logs(tmp_path))
    resumed, done = expert(tmp_path, engine := FakeEngine(), mode=mode)
    assert done == 2
    assert resumed.step(3)["replayed"] == A_STEP  # of step 4, begun while step 3 trains
    assert resumed.step(4)["replayed"] == 0
    assert set(asked(engine).values()) == {1}
