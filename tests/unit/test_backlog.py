"""Which prompts a step takes: none twice, none lost, none too old, flat ones replaced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from parallel.sample import Sample
from stages.backlog import Backlog, Batch, Collection
from stages.domains.problem import Problem
from stages.groups import Group
from stages.settings import DomainSettings, RolloutSettings, RunSettings, SamplingSettings, StageJob
from stages.tokenizer import CharacterTokenizer

SAMPLING = SamplingSettings(prompts_per_step=3, group_size=2)
NAMES = ("sums", "words")


class FakeRollouts:
    """Remembers what was asked for; a test ends it."""

    tokenizer = CharacterTokenizer()

    def __init__(self) -> None:
        self.asked: list[Group] = []
        self.ended = 0

    def request(
        self, groups: list[Group], sampling: SamplingSettings, at_once: bool = False
    ) -> None:
        self.asked += groups

    def text(self, sample: Sample) -> str:
        return "x" * len(sample.response)

    def end(self, group: Group, lengths: tuple[int, int] = (1, 2), version: int = 1) -> None:
        for index, length in enumerate(lengths):
            group.drawn[index] = Sample(
                domain=group.problem.domain,
                prompt=np.ones(2, np.int32),
                response=np.ones(length, np.int32),
                versions=np.arange(version, version + length, dtype=np.int32),
            )
        group.ended = self.ended
        self.ended += 1
        self.asked.remove(group)

    def end_all(self, **how: int) -> None:
        for group in list(self.asked):
            self.end(group, **how)


def length(problem: Problem, response: str) -> float:
    """The reward of these tests."""
    return float(len(response))


def backlog(rollouts: FakeRollouts, *domains: str) -> Backlog:
    settings = {
        domain: DomainSettings.model_validate(
            {
                "prompts": {"dataset": "chain_sum"},
                "reward": "test_backlog:length",
                "optimizer": {"learning_rate": 1.0},
                "loop": {"steps": 5},
            }
        )
        for domain in domains
    }
    job = StageJob.model_construct(
        stage="experts.sums", directory=Path(), settings=RunSettings.model_construct(seed=0)
    )
    return Backlog(job, settings, SAMPLING, rollouts)


def indices(groups: list[Group]) -> list[int]:
    return [group.problem.index for group in groups]


def test_a_step_takes_the_prompts_of_its_stream_in_their_order() -> None:
    rollouts = FakeRollouts()
    source = backlog(rollouts, "sums")
    seen = []
    for step in (1, 2):
        source.begin({"sums": 3})
        collection = Collection(source, RolloutSettings(), step)
        assert collection.batch() is None
        for group in reversed(list(rollouts.asked)):
            assert collection.batch() is None
            rollouts.end(group, version=step)
        batch = collection.batch()
        assert isinstance(batch, Batch)
        assert [sample.reward for sample in batch.groups[0].samples] == [1.0, 2.0]
        seen += indices(batch.groups)
    assert seen == sorted(set(seen))
    assert source.state() == {"cursors": {"sums": seen[-1] + 1}, "begun": {"sums": []}}


def test_every_domain_gives_its_own_share() -> None:
    rollouts = FakeRollouts()
    source = backlog(rollouts, *NAMES)
    source.begin(dict.fromkeys(NAMES, 3))
    collection = Collection(source, RolloutSettings(), 1)
    rollouts.end_all()
    batch = collection.batch()
    assert batch is not None
    assert [group.problem.domain for group in batch.groups] == ["sums"] * 3 + ["words"] * 3
    assert len({group.seed for group in batch.groups}) == 6


def test_what_is_not_taken_is_left_for_the_next_step_and_saved() -> None:
    rollouts = FakeRollouts()
    source = backlog(rollouts, "sums")
    source.begin({"sums": 5})
    first = list(rollouts.asked)
    for group in first[2:]:
        rollouts.end(group)
    batch = Collection(source, RolloutSettings(oversampling=1.6), 1).batch()
    assert batch is not None
    assert indices(batch.groups) == indices(first[2:])
    assert source.state()["begun"] == {"sums": indices(first[:2])}

    again = FakeRollouts()
    resumed = backlog(again, "sums")
    resumed.restore(source.state())
    assert resumed.state() == source.state()
    resumed.begin({"sums": 3})
    assert indices(again.asked[:2]) == indices(first[:2])
    assert [group.seed for group in again.asked[:2]] == [group.seed for group in first[:2]]
    assert again.asked[2].problem.index > first[-1].problem.index

    source.begin({"sums": 3})
    assert indices(rollouts.asked) == indices(again.asked)


@pytest.mark.parametrize(("bound", "dropped"), [(1, 4), (2, 2), (3, 0)])
def test_groups_that_are_too_old_are_dropped_counted_and_replaced(bound: int, dropped: int) -> None:
    rollouts = FakeRollouts()
    source = backlog(rollouts, "sums")
    source.begin({"sums": 3})
    for group, version in zip(list(rollouts.asked), (2, 3, 4), strict=True):
        rollouts.end(group, version=version)  # its later tokens are younger
    collection = Collection(source, RolloutSettings(mode="async", max_staleness=bound), 5)
    batch = collection.batch()
    assert (batch is None) == (dropped > 0)
    assert len(rollouts.asked) == dropped // 2
    rollouts.end_all(version=5)
    batch = collection.batch()
    assert batch is not None
    assert batch.too_old == dropped
    assert len(batch.groups) == 3
    assert all(5 - group.weight_version <= bound for group in batch.groups)


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_flat_groups_are_replaced_in_so_many_rounds(rounds: int) -> None:
    rollouts = FakeRollouts()
    source = backlog(rollouts, "sums")
    source.begin({"sums": 3})
    collection = Collection(source, RolloutSettings(dynamic_sampling=rounds), 1)
    for _ in range(rounds):
        uneven, *flat = list(rollouts.asked)
        if len(flat) == 2:
            rollouts.end(uneven)
        for group in flat if len(flat) == 2 else [uneven, *flat]:
            rollouts.end(group, lengths=(2, 2))
        assert collection.batch() is None
        assert len(rollouts.asked) == 2  # as many as were flat
    for group in list(rollouts.asked):
        rollouts.end(group, lengths=(3, 3))
    batch = collection.batch()
    assert batch is not None
    assert len(batch.groups) == 3
    assert len(batch.replaced) == 2 * rounds
    assert sum(not group.flat for group in batch.groups) == min(rounds, 1)


def test_the_same_prompts_again_have_other_seeds() -> None:
    rollouts = FakeRollouts()
    source = backlog(rollouts, "sums")
    source.begin({"sums": 3})
    rollouts.end_all()
    batch = Collection(source, RolloutSettings(), 1).batch()
    assert batch is not None
    source.again(batch.groups, attempt=1)
    assert indices(rollouts.asked) == indices(batch.groups)
    assert not {g.seed for g in rollouts.asked} & {g.seed for g in batch.groups}


def test_probes_leave_their_prompts_in_the_stream() -> None:
    rollouts = FakeRollouts()
    source = backlog(rollouts, "sums")
    state = source.state()
    probes = source.probes(4, "probe 1", longest=8)
    assert source.state() == state
    source.begin({"sums": 4})
    assert indices(rollouts.asked[4:]) == indices(probes)
