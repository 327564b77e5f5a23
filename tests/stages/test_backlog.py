"""Which prompts a step takes: none twice, none lost, none too old, flat ones replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel.sample import Sample
from stages.rewards.reward import RewardError
from stages.rewards.settings import RewardPoolSettings
from stages.sampling.prompt_buffer import Backlog, Batch, Collection
from stages.sampling.reward_dispatch import reward_metrics
from stages.settings import DomainSettings, RolloutSettings, RunSettings, SamplingSettings, StageJob
from tests.stages.conftest import OPENED
from tests.stages.toys import FakeRollouts, indices

SAMPLING = SamplingSettings(prompts_per_step=3, group_size=2)
NAMES = ("sums", "words")


def own(function: str) -> dict[str, Any]:
    return {"kind": "python", "function": f"tests.stages.small_rewards:{function}"}


def backlog(rollouts: FakeRollouts, *domains: str, **rewards: dict[str, Any]) -> Backlog:
    settings = {
        domain: DomainSettings.model_validate(
            {
                "prompts": {"dataset": "chain_sum"},
                "rewards": rewards or {"length": own("length")},
                "optimizer": {"learning_rate": 1.0},
                "loop": {"steps": 5},
            }
        )
        for domain in domains
    }
    job = StageJob.model_construct(
        stage="experts.sums",
        directory=Path(),
        settings=RunSettings.model_construct(
            seed=0,
            rewards=RewardPoolSettings(workers=1, timeout_seconds=1, max_failed_fraction=0.5),
        ),
    )
    made = Backlog(job, settings, SAMPLING, rollouts)
    OPENED.append(made)
    return made


def test_a_step_takes_the_prompts_of_its_stream_in_their_order() -> None:
    rollouts = FakeRollouts()
    source = backlog(rollouts, "sums")
    seen = []
    for step in (1, 2):
        source.begin({"sums": 3})
        collection = Collection(source, RolloutSettings(), step)
        assert rollouts.batch(collection) is None
        for group in reversed(list(rollouts.asked)):
            assert rollouts.batch(collection) is None
            rollouts.end(group, version=step)
        batch = rollouts.batch(collection)
        assert isinstance(batch, Batch)
        assert [sample.reward for sample in batch.groups[0].samples] == [1.0, 2.0]
        seen += indices(batch.groups)
    assert seen == sorted(set(seen))
    assert source.state() == {
        "cursors": {"sums": seen[-1] + 1},
        "begun": {"sums": []},
        "too_long": 0,
    }


def test_the_state_of_an_older_version_lacks_what_was_not_told() -> None:
    source = backlog(FakeRollouts(), "sums")
    source.restore({"cursors": {"sums": 5}, "begun": {"sums": []}})
    assert source.too_long() == 0
    assert source.state() == {"cursors": {"sums": 5}, "begun": {"sums": []}, "too_long": 0}


def test_every_domain_gives_its_own_share() -> None:
    rollouts = FakeRollouts()
    source = backlog(rollouts, *NAMES)
    source.begin(dict.fromkeys(NAMES, 3))
    collection = Collection(source, RolloutSettings(), 1)
    rollouts.end_all()
    batch = rollouts.batch(collection)
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
    batch = rollouts.batch(Collection(source, RolloutSettings(oversampling=1.6), 1))
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
    batch = rollouts.batch(collection)
    assert (batch is None) == (dropped > 0)
    assert len(rollouts.asked) == dropped // 2
    rollouts.end_all(version=5)
    batch = rollouts.batch(collection)
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
        assert rollouts.batch(collection) is None
        assert len(rollouts.asked) == 2  # as many as were flat
    for group in list(rollouts.asked):
        rollouts.end(group, lengths=(3, 3))
    batch = rollouts.batch(collection)
    assert batch is not None
    assert len(batch.groups) == 3
    assert len(batch.replaced) == 2 * rounds
    assert sum(not group.zero_variance for group in batch.groups) == min(rounds, 1)


def test_what_is_flat_the_stage_says() -> None:
    rollouts = FakeRollouts()
    source = backlog(rollouts, "sums")
    source.begin({"sums": 3})
    flat = {index for index in indices(rollouts.asked) if index % 2}
    collection = Collection(
        source,
        RolloutSettings(dynamic_sampling=1),
        1,
        lambda group: group.problem.index in flat,
    )
    rollouts.end_all()
    assert rollouts.batch(collection) is None
    rollouts.end_all()
    batch = rollouts.batch(collection)
    assert batch is not None
    assert set(indices(batch.replaced)) == flat


def test_the_same_prompts_again_have_other_seeds() -> None:
    rollouts = FakeRollouts()
    source = backlog(rollouts, "sums")
    source.begin({"sums": 3})
    rollouts.end_all()
    batch = rollouts.batch(Collection(source, RolloutSettings(), 1))
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


@pytest.mark.parametrize("order", [1, -1])
def test_grades_come_in_any_order_and_groups_in_theirs(order: int) -> None:
    """Of two that are whole, the first is taken, though the second is graded long before."""
    rollouts = FakeRollouts()
    rollouts.text = lambda sample: "sleep 0.3" if len(sample.response) == 3 else "x"  # type: ignore[method-assign]
    source = backlog(rollouts, "sums", slow=own("does"))
    source.begin({"sums": 5})
    for index, group in enumerate(list(rollouts.asked)[::order]):
        rollouts.end(group, lengths=(3, 1) if index == 0 else (1, 1))
    whole = [group for begun in source._begun.values() for group in begun]
    batch = rollouts.batch(Collection(source, RolloutSettings(oversampling=1.6), 1))
    assert batch is not None
    assert indices(batch.groups) == sorted(indices(whole[::order][:3]))


def test_a_sample_without_a_reward_is_none_and_counted() -> None:
    rollouts = FakeRollouts()
    texts = {1: "raise x", 2: "good", 3: "nan", 4: "better one"}
    rollouts.text = lambda sample: texts[len(sample.response)]  # type: ignore[method-assign]
    source = backlog(rollouts, "sums", odd=own("does"))
    source.begin({"sums": 3})
    for group, lengths in zip(list(rollouts.asked), [(1, 2), (2, 4), (3, 4)], strict=True):
        rollouts.end(group, lengths=lengths)
    batch = rollouts.batch(Collection(source, RolloutSettings(), 1))
    assert batch is not None
    rewards = [[sample.reward for sample in group.samples] for group in batch.groups]
    assert rewards == [[None, 4.0], [4.0, 10.0], [None, 10.0]]
    assert batch.failures == 2
    assert [group.zero_variance for group in batch.groups] == [True, False, True]
    samples = [sample for group in batch.groups for sample in group.samples]
    assert reward_metrics(samples) == {"reward": 7.0, "reward/odd": 7.0}


def test_a_reward_that_only_watches_is_counted_where_it_fails() -> None:
    rollouts = FakeRollouts()
    texts = {1: "raise x", 2: "good"}
    rollouts.text = lambda sample: texts[len(sample.response)]  # type: ignore[method-assign]
    source = backlog(rollouts, "sums", odd={**own("does"), "weight": 0.0}, size=own("length"))
    source.begin({"sums": 3})
    for group, lengths in zip(list(rollouts.asked), [(1, 2), (1, 1), (1, 1)], strict=True):
        rollouts.end(group, lengths=lengths)
    batch = rollouts.batch(Collection(source, RolloutSettings(), 1))  # 5 of 6: none is dropped
    assert batch is not None
    rewards = [[sample.reward for sample in group.samples] for group in batch.groups]
    assert rewards == [[7.0, 4.0], [7.0, 7.0], [7.0, 7.0]]
    assert (batch.failures, batch.watch_failures) == (0, 5)
    samples = [sample for group in batch.groups for sample in group.samples]
    assert reward_metrics(samples) == {"reward": 6.5, "reward/odd": 4.0, "reward/size": 6.5}


def test_too_many_samples_without_a_reward_end_the_stage() -> None:
    rollouts = FakeRollouts()
    rollouts.text = lambda sample: "raise x"  # type: ignore[method-assign]
    source = backlog(rollouts, "sums", odd=own("does"))
    source.begin({"sums": 3})
    rollouts.end_all()
    message = (
        r"4 of 6 samples have no reward, and rewards.max_failed_fraction = 0.5 bears no more; the"
        r" first: domains.sums.rewards.odd: raised ZeroDivisionError\('x'\) at small_rewards"
    )
    with pytest.raises(RewardError, match=message):
        rollouts.batch(Collection(source, RolloutSettings(), 1))


def test_a_reward_that_cannot_be_loaded_ends_the_stage() -> None:
    rollouts = FakeRollouts()
    source = backlog(rollouts, "sums", odd=own("no_such"))
    source.begin({"sums": 3})
    rollouts.end_all()
    with pytest.raises(
        RewardError, match=r"domains.sums.rewards.odd: tests.stages.small_rewards has no functi"
    ):
        rollouts.batch(Collection(source, RolloutSettings(), 1))


def test_parts_and_steps_stand_on_the_sample() -> None:
    rollouts = FakeRollouts()
    rollouts.text = lambda sample: "ab,c"  # type: ignore[method-assign]
    source = backlog(
        rollouts,
        "sums",
        steps={**own("lines"), "weight": 0.5},
        long={"kind": "length", "at_most": 1, "slack": 1, "weight": 2.0},
    )
    source.begin({"sums": 3})
    rollouts.end_all()
    batch = rollouts.batch(Collection(source, RolloutSettings(), 1))
    assert batch is not None
    first, second = batch.groups[0].samples
    assert first.step_rewards == second.step_rewards == [(2, 1.5), (3, 0.5)]
    assert first.reward_parts == {"steps": 2.0, "long": 1.0}
    assert second.reward_parts == {"steps": 2.0, "long": 0.5}
    assert (first.reward, second.reward) == (3.0, 2.0)


def test_a_sample_is_graded_while_its_group_is_still_drawn() -> None:
    rollouts = FakeRollouts()
    source = backlog(rollouts, "sums")
    [probe] = source.probes(1, "probe 1", longest=8)
    source.begin({"sums": 1})
    group = rollouts.asked[1]
    sample = Sample("sums", np.ones(2, np.int32), np.ones(3, np.int32))
    for asked in (probe, group):
        rollouts.on_sample(asked, 0, sample)
    assert probe.grades is None
    assert group.grades is not None
    assert group.ended is group.grades[1] is None
    first = group.grades[0]
    assert first is not None
    assert first.result(60).reward == 3.0
