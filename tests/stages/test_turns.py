"""Engines and trainer take turns on shared devices; CPU storages stand for the devices' memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from parallel.checkpoint.save import Saver
from parallel.engine.fleet import AllLost
from parallel.errors import UserError
from parallel.files import whole_checkpoints
from parallel.model import offload
from parallel.model.offload import ALL, STATE, WEIGHTS, DeviceShare, Residency
from parallel.settings import EngineSettings, LayoutSettings
from stages.kinds.evaluate import work as evaluate
from stages.kinds.grpo.work import GrpoStage
from stages.main import empty_devices
from stages.sampling.logprob_check import MismatchError
from stages.sampling.step import OnPolicyStage
from stages.settings import turn_violations
from tests.fake_engines import RefittedFleet, toy_domain, toy_job, toy_run
from tests.layouts.offload_cases import bytes_on_device
from tests.stages import test_critic, test_distill, test_evaluate
from tests.stages.toys import expert

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 3
RESERVED = {"memory_reserved": lambda: 0, "memory_allocated": lambda: 0}
KL = {"coefficient": 0.1, "estimator": "unbiased_k3"}


class RecordingShare(DeviceShare):
    """A share of emptied CPU storages that records every move."""

    moves: list[str]
    names: dict[int, str]

    def __init__(self) -> None:
        super().__init__(active=True, engine=True)
        self.moves, self.names = [], {}

    def _place(self, model: Residency, parts: Any) -> None:
        before = model.on_device
        super()._place(model, parts)
        for change, which in (("-", before - model.on_device), ("+", model.on_device - before)):
            name = self.members.index(model)
            self.moves += [f"{change}{part} {name}" for part in sorted(which)]


class TurningFleet(RefittedFleet):
    """Fake engines that sleep, and check at every turn what is on the device beside them."""

    sleeps = True
    share: RecordingShare

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asleep = {"weights", "cache"}
        self.started = False
        self.refits_lost = 0  # refits to come in which all engines are lost

    def held(self) -> set[Any]:
        return {part for model in self.share.members for part in model.on_device}

    def await_engines(self, make_room: Callable[[], None]) -> None:
        if self.started and self.live():
            return
        make_room()
        assert self.held() == set(), "an engine starts, and waits for the trainer's memory"
        self.restart()
        self.started = True
        self.share.moves.append("start")

    def refit(self, policy: Any, version: int) -> dict[str, float]:
        assert self.live(), "the trainer's weights are in the way of an engine's start"
        if self.refits_lost:
            self.refits_lost -= 1
            for engine in self.live():
                self.lost(engine, "it died in a refit")
            raise AllLost("no engine is live")
        self.asleep.discard("weights")
        assert self.held() == WEIGHTS, "only the policy's weights beside the engine's"
        assert policy.residency.on_device == WEIGHTS
        self.share.moves.append("refit")
        return super().refit(policy, version)

    def open_caches(self) -> None:
        assert self.held() == set(), "nothing of the trainer beside the engines' caches"
        assert all(not any(bytes_on_device(m).values()) for m in self.share.members)
        self.asleep.clear()
        self.share.moves.append("caches")

    def sleep(self) -> None:
        assert self.held() == set(), "the trainer came back before the engines left"
        self.asleep = {"weights", "cache"}
        self.share.moves.append("sleep")


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], RecordingShare]]:
    """Have later stages take turns; return a function that returns the last share."""
    shares: list[RecordingShare] = []

    def begin() -> RecordingShare:
        def beside(_: EngineSettings) -> RecordingShare:
            TurningFleet.share = share = RecordingShare()
            shares.append(share)
            return share

        monkeypatch.setattr(DeviceShare, "beside", beside)
        for module in ("tests.stages.toys", "tests.stages.test_distill"):
            monkeypatch.setattr(f"{module}.RefittedFleet", TurningFleet)
        return lambda: shares[-1]  # type: ignore[return-value]

    yield begin


def ema(directory: Path) -> GrpoStage:
    return expert(directory, {"kl": {**KL, "reference": "ema", "ema_decay": 0.5}})


def gentle(directory: Path) -> GrpoStage:
    return expert(directory, {"kl": KL}, updates=1)


KINDS: dict[str, Callable[[Path], OnPolicyStage]] = {
    "reference": gentle,
    "ema": ema,
    "critic": test_critic.ppo,
    "merge": test_distill.merge,
}


def run(stage: OnPolicyStage, directory: Path) -> tuple[list[dict[str, float]], dict[str, str]]:
    """Train, and save after every step; return the metrics and the last checkpoint's files."""
    saver = Saver(directory / "checkpoints", asynchronous=False)
    measured = []
    for step in range(1, STEPS + 1):
        found = stage.step(step)
        measured.append({k: v for k, v in found.items() if not k.startswith("seconds_")})
        saver.begin(stage.policy, step, {})
    stage.close()
    files = whole_checkpoints(directory / "checkpoints")[-1].files
    return measured, {name: value for name, value in files.items() if name != "state.json"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_that_takes_turns_gives_equal_bits(
    kind: str, turns: Callable[[], Any], tmp_path: Path
) -> None:
    """And at every turn the other side has left: `TurningFleet` checks."""
    torch.use_deterministic_algorithms(True)
    still = run(KINDS[kind](tmp_path / "still"), tmp_path / "still")
    last = turns()
    moving = run(KINDS[kind](tmp_path / "moving"), tmp_path / "moving")
    torch.use_deterministic_algorithms(False)
    assert moving == still
    order = [move for move in last().moves if move[0] not in "+-"]
    assert order == ["start", *["refit", "caches", "sleep"] * STEPS]


def test_the_order_of_a_step(turns: Callable[[], Any], tmp_path: Path) -> None:
    last = turns()
    stage = gentle(tmp_path)
    share = last()
    policy, reference = 0, 1
    share.only()
    share.moves.clear()
    stage.step(1)
    assert share.moves.pop(0) == "start"
    first, second = share.moves.copy(), share.moves.clear()
    assert second is None
    stage.step(2)
    assert first == [
        f"+weights {policy}",
        "refit",
        f"-weights {policy}",
        "caches",
        "sleep",
        f"+weights {reference}",
        f"-weights {reference}",
        f"+gradients {policy}",
        f"+optimizer {policy}",
        f"+weights {policy}",
    ]
    assert share.moves == [f"-gradients {policy}", f"-optimizer {policy}", *first[1:]]
    assert stage.policy.residency.on_device == ALL  # a signal saves from here
    stage.close()


def test_turns_are_measured(turns: Callable[[], Any], tmp_path: Path) -> None:
    still = gentle(tmp_path / "still").step(1)
    turns()
    stage = gentle(tmp_path / "moving")
    moving = stage.step(1)
    stage.close()
    assert moving.keys() - still.keys() == {"seconds_offload", "seconds_wake"}
    assert moving["seconds_offload"] > 0


def test_an_engines_start_is_measured_once(tmp_path: Path) -> None:
    stage = gentle(tmp_path)
    stage.engines.fleet.start_seconds = 3.0
    assert stage.step(1)["seconds_start"] == 3.0
    assert "seconds_start" not in stage.step(2)
    stage.close()


def test_a_step_that_is_sampled_again_begins_another_turn(
    turns: Callable[[], Any], tmp_path: Path
) -> None:
    """A mismatch is found while the engines sleep."""
    last = turns()
    stage = expert(tmp_path, {}, engine=EngineSettings(max_logprob_difference=1e-9))
    with pytest.raises(MismatchError):
        stage.step(1)
    order = [move for move in last().moves if move[0] not in "+-"]
    assert order == ["start", *["refit", "caches", "sleep"] * 2]
    stage.close()


def test_engines_that_are_all_lost_get_the_weights_from_the_host(
    turns: Callable[[], Any], tmp_path: Path
) -> None:
    last = turns()
    stage = gentle(tmp_path)
    [engine] = stage.engines.fleet.engines  # type: ignore[attr-defined]
    left = [5]

    def trouble(_: Any) -> str | None:
        left[0] -= 1
        return "dies" if left[0] == 0 else None

    engine.trouble = trouble
    metrics = stage.step(1)
    order = [move for move in last().moves if move[0] not in "+-"]
    assert order == ["start", "refit", "caches", "start", "refit", "caches", "sleep"]
    assert metrics["engine_restarts"] == 1
    assert metrics["requeued"] > 0
    stage.close()


def test_the_trainer_makes_room_for_engines_that_were_lost_in_a_refit(
    turns: Callable[[], Any], tmp_path: Path
) -> None:
    """A new engine waits for the device's memory before it can be connected to."""
    last = turns()
    stage = gentle(tmp_path)
    fleet = stage.engines.fleet
    assert isinstance(fleet, TurningFleet)
    fleet.refits_lost = 2
    metrics = stage.step(1)
    starts = ["start", "+weights 0", "-weights 0"]
    assert last().moves[last().moves.index("start") :][:6] == starts * 2
    order = [move for move in last().moves if move[0] not in "+-"]
    assert order == ["start", "start", "start", "refit", "caches", "sleep"]
    assert metrics["engine_restarts"] == 2
    stage.close()


def test_evaluation_sleeps_for_its_check_and_between_models(
    turns: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    still = tmp_path / "still"
    monkeypatch.setattr("stages.sampling.engines.Fleet", RefittedFleet)
    monkeypatch.setattr("parallel.checkpoint.load.weights", test_evaluate.load_named)
    evaluate.run(test_evaluate.job(still))
    last = turns()
    monkeypatch.setattr("stages.sampling.engines.Fleet", TurningFleet)
    evaluate.run(test_evaluate.job(tmp_path / "moving"))
    assert test_evaluate.results(tmp_path / "moving") == test_evaluate.results(still)
    order = [move for move in last().moves if move[0] not in "+-"]
    assert order == ["start", *["refit", "caches", "sleep"] * 6]


def test_responses_in_flight_are_an_error_when_engines_are_to_sleep(
    turns: Callable[[], Any], tmp_path: Path
) -> None:
    turns()
    stage = gentle(tmp_path)
    stage.engines.sync_weights(1)
    stage.engines.scheduler._owed.add(7)
    with pytest.raises(RuntimeError, match="in flight and their engines are to sleep"):
        stage.engines.sleep()


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (
            {"max_steps_ahead": 1},
            "domains.sums.rollout.max_steps_ahead: 1 keeps responses in flight",
        ),
        (
            {"max_steps_ahead": 2},
            "domains.sums.rollout.max_steps_ahead: 2 keeps responses in flight",
        ),
        ({"oversampling": 1.5}, "domains.sums.rollout.oversampling: 1.5 keeps responses"),
    ],
)
def test_modes_that_keep_responses_in_flight_need_engines_of_their_own(
    rollout: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Found on GPUs before the stage computes anything; on a CPU they are allowed."""
    settings = toy_run(sums=toy_domain(rollout=rollout)).model_copy(
        update={"layout": LayoutSettings()}
    )
    job = toy_job(tmp_path, settings, kind="grpo")
    empty_devices(job)
    monkeypatch.setattr("parallel.machine.device.device", lambda: torch.device("cuda", 0))
    with pytest.raises(UserError) as refused:
        empty_devices(job)
    assert message in str(refused.value)
    assert "or engine.placement: own" in str(refused.value)
    asked: list[bool] = []
    monkeypatch.setattr("parallel.distributed.on_main", lambda call: call())
    monkeypatch.setattr(
        "parallel.engine.fleet.put_to_sleep", lambda *_, needed: asked.append(needed)
    )
    empty_devices(job.model_copy(update={"kind": "evaluate"}))  # it keeps nothing in flight
    assert asked == [True]
    own = settings.engine.model_copy(update={"placement": "own"})
    assert not list(turn_violations(settings.model_copy(update={"engine": own})))
    empty_devices(job.model_copy(update={"settings": settings.model_copy(update={"engine": own})}))


def test_a_checkpoint_needs_no_gradients() -> None:
    assert ALL - {"gradients"} == STATE


def test_the_trainer_waits_for_room_while_an_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is restarted in its turn has the device until it is ready, and then sleeps."""
    clock, free = [0.0], [0]

    def sleep(seconds: float) -> None:
        clock[0] += 60 * seconds
        free[0] = 80 << 30 if clock[0] > 1700 else 0

    fake = mock.Mock(monotonic=lambda: clock[0], sleep=sleep)
    monkeypatch.setattr("parallel.machine.gpus.time", fake)
    monkeypatch.setattr(offload, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(offload, "release_cache", lambda: None)
    for name, value in (("mem_get_info", lambda: (free[0], 80 << 30)), *RESERVED.items()):
        monkeypatch.setattr(torch.cuda, name, value)
    engine = EngineSettings().started_on(gpus=True)
    offload._wait_for_room(1 << 30, DeviceShare.beside(engine).room_seconds)
    assert clock[0] > 1700
    clock[0], free[0] = 0.0, 0
    hasty = engine.model_copy(update={"start_timeout_seconds": 600})
    with pytest.raises(UserError, match="an engine did not leave it within 720 s"):
        offload._wait_for_room(1 << 30, DeviceShare.beside(hasty).room_seconds)
    own = engine.model_copy(update={"placement": "own"})  # no engine's start is in the way
    assert DeviceShare.beside(own).room_seconds == offload.ROOM_SECONDS
