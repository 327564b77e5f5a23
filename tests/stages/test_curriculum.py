"""Prompts near the frontier come more often, the others still come, and all are counted."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest

from stages.data import prompts as module
from stages.data.problem import DomainError, Problem
from stages.data.prompts import Frontier
from stages.data.settings import FrontierSettings
from stages.domains import RolloutSettings
from stages.sampling.prompt_buffer import Collection, PromptBuffer
from tests.stages.toys import FakeEngines, indices, prompt_buffer

LEVELS = ("easy", "middling", "hard")


class LevelStream:
    """Problems of random levels."""

    def __init__(self, cursor: int = 0) -> None:
        self.cursor = cursor

    def take(self, count: int) -> list[Problem]:
        start, self.cursor = self.cursor, self.cursor + count
        return [problem(index) for index in range(start, self.cursor)]


def problem(index: int) -> Problem:
    return Problem("sums", index, f"p{index}", "", {"level": Random(index).choice(LEVELS)})


def frontier(**given: object) -> Frontier:
    settings = FrontierSettings.model_validate({"field": "level", **given})
    return Frontier(settings, "sums", len, seed=7)


def of_level(level: str) -> Problem:
    return Problem("sums", 0, "p", "", {"level": level})


def experienced(**given: object) -> Frontier:
    found = frontier(**given)
    for level, right in zip(LEVELS, (60, 30, 0), strict=True):
        found.update(of_level(level), right, 60 - right)
    return found


def test_difficulty_is_a_length_or_a_field() -> None:
    by_length = Frontier(FrontierSettings(length_step=4), "sums", len, 0)
    assert [by_length.difficulty(Problem("a", 0, "x" * n, "")) for n in (7, 8, 11, 12)] == [
        "4",
        "8",
        "8",
        "12",
    ]
    fields = {"level": 3, "entry": {"metadata": {"difficulty": {"b": (1, 2), "a": 1}}}}
    row = Problem("a", 0, "x", "", fields)
    assert frontier().difficulty(row) == "3"
    nested = frontier(field="entry.metadata.difficulty")
    assert nested.difficulty(row) == '{"a": 1, "b": [1, 2]}'


def test_a_missing_field_is_named() -> None:
    message = (
        r"^domains.sums.curriculum.field: the row of 'p' has no field level.x; at x it has none"
    )
    with pytest.raises(DomainError, match=message):
        frontier(field="level.x").difficulty(of_level("easy"))
    with pytest.raises(DomainError, match=r"no field grade; at grade it has level$"):
        frontier(field="grade").difficulty(of_level("easy"))


def test_an_estimate_covers_the_newest_samples() -> None:
    estimate = frontier(memory=4)
    estimate.update(of_level("easy"), 2, 2)
    assert estimate.state()["tallies"] == [['"easy"', 2.0, 2.0]]
    estimate.update(of_level("easy"), 4, 0)  # 6 of 8, remembered as 3 of 4
    assert estimate.state()["tallies"] == [['"easy"', 3.0, 1.0]]


def test_prompts_of_medium_difficulty_come_more_often_and_others_still_come() -> None:
    chosen, stream = experienced(candidates=4), LevelStream()
    count = 2000
    taken = Counter(chosen.take(stream).fields["level"] for _ in range(count))
    # The middling are taken whenever there is one: 1 - (2/3)^4 = .802.
    assert taken["middling"] / count == pytest.approx(1 - (2 / 3) ** 4, abs=0.04)
    assert min(taken["easy"], taken["hard"]) / count > (1 / 3) ** 4
    assert chosen.passed_over() == 3 * count == stream.cursor - count
    assert chosen.passed_over() == 0


def test_unseen_prompts_are_tried() -> None:
    chosen = frontier(candidates=4)
    chosen.update(of_level("easy"), 60, 0)
    chosen.update(of_level("hard"), 0, 60)
    stream = LevelStream()
    taken = Counter(chosen.take(stream).fields["level"] for _ in range(200))
    assert taken["middling"] > 140


def test_a_restart_takes_the_same_prompts() -> None:
    whole, stream = experienced(), LevelStream()
    expected = [whole.take(stream).index for _ in range(20)]
    first, before = experienced(), LevelStream()
    taken = [first.take(before).index for _ in range(9)]
    second, after = frontier(), LevelStream(before.cursor)
    second.restore(json.loads(json.dumps(first.state())))
    taken += [second.take(after).index for _ in range(11)]
    assert taken == expected
    assert second.state() == whole.state()


def test_the_estimates_seen_least_recently_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DIFFICULTIES", 2)
    estimate = frontier()
    for level in ("easy", "hard", "easy", "middling"):
        estimate.update(of_level(level), 1, 0)
    assert [name for name, *_ in estimate.state()["tallies"]] == ['"easy"', '"middling"']


def buffer(engines: FakeEngines) -> PromptBuffer:
    block = {
        "prompts": {"dataset": "chain_sum", "config": {"max_terms": 6}},
        "rewards": {"odd": {"kind": "python", "function": "tests.stages.small_rewards:parity"}},
        "curriculum": {"name": "frontier", "length_step": 2},
    }
    return prompt_buffer(engines, sums=block)


def test_a_buffer_learns_from_a_step_whatever_its_order() -> None:
    states = []
    for direction in (1, -1):
        engines = FakeEngines()
        source = buffer(engines)
        source.request({"sums": 3})
        assert source.metrics() == {"too_long": 0.0, "passed_over": 9.0}
        for place, group in list(enumerate(engines.asked))[::direction]:
            engines.end(group, lengths=(1, 1 if place else 2))  # an even length is wrong
        batch = engines.batch(Collection(source, RolloutSettings(), 1))
        assert batch is not None
        states.append(source.state())
    assert states[0] == states[1]
    tallies = states[0]["curricula"]["sums"]["tallies"]
    assert sum(right for _, right, _ in tallies) == 5
    assert sum(wrong for _, _, wrong in tallies) == 1
    again = FakeEngines()
    resumed = buffer(again)
    resumed.restore(json.loads(json.dumps(states[0])))
    resumed.request({"sums": 3})
    source.request({"sums": 3})
    assert indices(again.asked) == indices(engines.asked)
    assert resumed.state() == source.state()


def test_a_buffer_learns_from_groups_that_are_replaced_too() -> None:
    engines = FakeEngines()
    source = buffer(engines)
    source.request({"sums": 3})
    collection = Collection(source, RolloutSettings(dynamic_sampling=1), 1)
    for lengths, whole in (((1, 1), False), ((1, 2), True)):  # an even length is wrong
        engines.end_all(lengths=lengths)
        assert (engines.batch(collection) is not None) == whole
    tallies = source.state()["curricula"]["sums"]["tallies"]
    assert sum(right for _, right, _ in tallies) == 6 + 3
    assert sum(wrong for _, _, wrong in tallies) == 3
