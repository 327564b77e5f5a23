"""Models that take turns on a device: one leaves before the next comes, so that both find room."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from parallel.model import offload
from parallel.model.offload import WEIGHTS, DeviceShare, Residency
from tests.layouts.offload_cases import bytes_on_device

WIDTH = 16
BYTES = 4 * WIDTH * (WIDTH + 1)  # of a model: a matrix and a bias in fp32


class Peak:
    """The most bytes of the models on the device since `begin`; CPU storages stand for it."""

    def __init__(self, models: list[Residency]) -> None:
        self.models = models
        self.begin()

    def begin(self) -> None:
        self.bytes = self.now()

    def now(self) -> int:
        return sum(sum(bytes_on_device(each).values()) for each in self.models)

    def note(self) -> None:
        self.bytes = max(self.bytes, self.now())


@pytest.fixture
def models() -> list[Residency]:
    """Models that do not train, such as references and teachers, all on the host."""
    made = [Residency([torch.nn.Linear(WIDTH, WIDTH)]) for _ in range(3)]
    turns = DeviceShare(active=True, engine=True)
    for each in made:
        turns.add(each)
    return made


@pytest.fixture
def peak(models: list[Residency], monkeypatch: pytest.MonkeyPatch) -> Iterator[Peak]:
    """Look after every move of a part; a move is complete before the next begins."""
    found, place = Peak(models), Residency.place

    def placed(model: Residency, parts: frozenset[str]) -> None:
        place(model, parts)  # type: ignore[arg-type]
        found.note()

    monkeypatch.setattr(Residency, "place", placed)
    yield found


def together(turns: DeviceShare, model: Residency) -> None:
    with turns.together([model], WEIGHTS):
        pass


@pytest.mark.parametrize(
    "bring",
    [
        lambda turns, model: turns.hold(model, WEIGHTS),
        lambda turns, model: turns.only(model),
        together,
    ],
    ids=["hold", "only", "together"],
)
@pytest.mark.parametrize(("first", "then"), [(0, 2), (2, 0)])
def test_a_model_leaves_before_the_next_one_comes(
    first: int,
    then: int,
    bring: Callable[[DeviceShare, Residency], None],
    models: list[Residency],
    peak: Peak,
) -> None:
    """Each may be as large as the device: a teacher of 30 B takes 60 GB of 80."""
    turns = models[0].share
    assert peak.now() == 0
    bring(turns, models[first])
    assert peak.now() == BYTES
    peak.begin()
    bring(turns, models[then])
    assert models[then].on_device == WEIGHTS
    assert models[first].on_device == frozenset()
    assert peak.bytes == BYTES


def test_room_for_a_model_is_awaited_once_the_others_have_left(
    models: list[Residency], peak: Peak, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before it comes: an engine may still be leaving the device."""
    asked: list[tuple[int, float, int]] = []

    def wait(needed: int, seconds: float) -> None:
        if needed:
            asked.append((needed, seconds, peak.now()))

    monkeypatch.setattr(offload, "_wait_for_room", wait)
    turns = models[0].share
    for model in models:
        turns.hold(model, WEIGHTS)
    assert asked == [(BYTES, turns.room_seconds, 0)] * len(models)
