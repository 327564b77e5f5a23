"""The prompts that a step takes: none twice, none lost, none stale, zero-variance ones replaced."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest

from parallel.sample import Sample
from stages.domains import RolloutSettings
from stages.metrics import reward_metrics
from stages.objectives.groups import Batch
from stages.rewards.reward import RewardError
from stages.sampling.prompt_buffer import Collection, PromptBuffer
from tests.awaiting import PATIENCE_SECONDS
from tests.stages.toys import FakeEngines, indices, prompt_buffer

NAMES = ("sums", "words")


def own(function: str) -> dict[str, Any]:
    return {"kind": "python", "function": f"tests.stages.small_rewards:{function}"}


def buffer(engines: FakeEngines, *domains: str, **rewards: dict[str, Any]) -> PromptBuffer:
    block = {"rewards": rewards or {"length": own("length")}}
    return prompt_buffer(engines, **dict.fromkeys(domains, block))


def test_a_step_takes_its_stream_s_prompts_in_order() -> None:
    engines = FakeEngines()
    source = buffer(engines, "sums")
    seen = []
    for step in (1, 2):
        source.request({"sums": 3})
        collection = Collection(source, RolloutSettings(), step)
        assert engines.batch(collection) is None
        for group in reversed(list(engines.asked)):
            assert engines.batch(collection) is None
            engines.end(group, version=step)
        batch = engines.batch(collection)
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
    source = buffer(FakeEngines(), "sums")
    source.restore({"cursors": {"sums": 5}, "begun": {"sums": []}})
    assert source.metrics() == {"too_long": 0}
    assert source.state() == {"cursors": {"sums": 5}, "begun": {"sums": []}, "too_long": 0}


def test_every_domain_contributes_its_share() -> None:
    engines = FakeEngines()
    source = buffer(engines, *NAMES)
    source.request(dict.fromkeys(NAMES, 3))
    collection = Collection(source, RolloutSettings(), 1)
    engines.end_all()
    batch = engines.batch(collection)
    assert batch is not None
    assert [group.problem.domain for group in batch.groups] == ["sums"] * 3 + ["words"] * 3
    assert len({group.seed for group in batch.groups}) == 6


def test_groups_left_over_are_saved_for_the_next_step() -> None:
    engines = FakeEngines()
    source = buffer(engines, "sums")
    source.request({"sums": 5})
    first = list(engines.asked)
    for group in first[2:]:
        engines.end(group)
    batch = engines.batch(Collection(source, RolloutSettings(oversampling=1.6), 1))
    assert batch is not None
    assert indices(batch.groups) == indices(first[2:])
    assert source.state()["begun"] == {"sums": indices(first[:2])}

    again = FakeEngines()
    resumed = buffer(again, "sums")
    resumed.restore(source.state())
    assert resumed.state() == source.state()
    resumed.request({"sums": 3})
    assert indices(again.asked[:2]) == indices(first[:2])
    assert [group.seed for group in again.asked[:2]] == [group.seed for group in first[:2]]
    assert again.asked[2].problem.index > first[-1].problem.index

    source.request({"sums": 3})
    assert indices(engines.asked) == indices(again.asked)


@pytest.mark.parametrize(("bound", "dropped"), [(1, 4), (2, 2), (3, 0)])
def test_groups_that_are_too_old_are_dropped_counted_and_replaced(bound: int, dropped: int) -> None:
    engines = FakeEngines()
    source = buffer(engines, "sums")
    source.request({"sums": 3})
    for group, version in zip(list(engines.asked), (2, 3, 4), strict=True):
        engines.end(group, version=version)  # its later tokens are younger
    collection = Collection(source, RolloutSettings(max_steps_ahead=bound), 5)
    batch = engines.batch(collection)
    assert (batch is None) == (dropped > 0)
    assert len(engines.asked) == dropped // 2
    engines.end_all(version=5)
    batch = engines.batch(collection)
    assert batch is not None
    assert batch.too_old == dropped
    assert len(batch.groups) == 3
    assert all(5 - group.weight_version <= bound for group in batch.groups)


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_zero_variance_groups_are_replaced_for_a_number_of_rounds(rounds: int) -> None:
    engines = FakeEngines()
    source = buffer(engines, "sums")
    source.request({"sums": 3})
    collection = Collection(source, RolloutSettings(dynamic_sampling=rounds), 1)
    for _ in range(rounds):
        uneven, *flat = list(engines.asked)
        if len(flat) == 2:
            engines.end(uneven)
        for group in flat if len(flat) == 2 else [uneven, *flat]:
            engines.end(group, lengths=(2, 2))
        assert engines.batch(collection) is None
        assert len(engines.asked) == 2  # as many as were flat
    for group in list(engines.asked):
        engines.end(group, lengths=(3, 3))
    batch = engines.batch(collection)
    assert batch is not None
    assert len(batch.groups) == 3
    assert len(batch.replaced) == 2 * rounds
    assert sum(not group.zero_variance for group in batch.groups) == min(rounds, 1)


def test_the_stage_decides_which_groups_are_replaced() -> None:
    engines = FakeEngines()
    source = buffer(engines, "sums")
    source.request({"sums": 3})
    flat = {index for index in indices(engines.asked) if index % 2}
    collection = Collection(
        source,
        RolloutSettings(dynamic_sampling=1),
        1,
        lambda group: group.problem.index in flat,
    )
    engines.end_all()
    assert engines.batch(collection) is None
    engines.end_all()
    batch = engines.batch(collection)
    assert batch is not None
    assert set(indices(batch.replaced)) == flat


def test_the_same_prompts_again_have_other_seeds() -> None:
    engines = FakeEngines()
    source = buffer(engines, "sums")
    source.request({"sums": 3})
    engines.end_all()
    batch = engines.batch(Collection(source, RolloutSettings(), 1))
    assert batch is not None
    source.redraw(batch.groups, attempt=1)
    assert indices(engines.asked) == indices(batch.groups)
    assert not {g.seed for g in engines.asked} & {g.seed for g in batch.groups}


def test_probes_continue_the_first_half_of_prompts() -> None:
    engines = FakeEngines()
    source = buffer(engines, "sums")
    probes = source.probes(4, "probe 1", longest=64)
    source.request({"sums": 4})
    whole = [group.problem.prompt for group in engines.asked[4:]]
    assert [group.problem.prompt for group in probes] == [
        prompt[: math.ceil(len(prompt) / 2)] for prompt in whole
    ]
    assert all(len(prompt) > 2 for prompt in whole)


def test_probes_are_short() -> None:
    engines = FakeEngines()
    with mock.patch.object(engines, "request", wraps=engines.request) as request:
        buffer(engines, "sums").probes(4, "probe 1", longest=3)
    assert request.call_args.args[1].max_response_tokens == 3


def test_probes_leave_their_prompts_in_the_stream() -> None:
    engines = FakeEngines()
    source = buffer(engines, "sums")
    state = source.state()
    probes = source.probes(4, "probe 1", longest=8)
    assert source.state() == state
    source.request({"sums": 4})
    assert indices(engines.asked[4:]) == indices(probes)


@pytest.mark.parametrize("order", [1, -1])
def test_groups_keep_their_order_whatever_the_grades_order(order: int) -> None:
    """The first of two whole groups is taken, though the second is graded long before."""
    engines = FakeEngines(lambda tokens: "sleep 0.3" if len(tokens) == 3 else "x")
    source = buffer(engines, "sums", slow=own("does"))
    source.request({"sums": 5})
    for index, group in enumerate(list(engines.asked)[::order]):
        engines.end(group, lengths=(3, 1) if index == 0 else (1, 1))
    whole = [group for begun in source._in_flight.values() for group in begun]
    batch = engines.batch(Collection(source, RolloutSettings(oversampling=1.6), 1))
    assert batch is not None
    assert indices(batch.groups) == sorted(indices(whole[::order][:3]))


def test_a_sample_without_a_reward_is_none_and_counted() -> None:
    texts = {1: "raise x", 2: "good", 3: "nan", 4: "better one"}
    engines = FakeEngines(lambda tokens: texts[len(tokens)])
    source = buffer(engines, "sums", odd=own("does"))
    source.request({"sums": 3})
    for group, lengths in zip(list(engines.asked), [(1, 2), (2, 4), (3, 4)], strict=True):
        engines.end(group, lengths=lengths)
    batch = engines.batch(Collection(source, RolloutSettings(), 1))
    assert batch is not None
    rewards = [[sample.reward for sample in group.samples] for group in batch.groups]
    assert rewards == [[None, 4.0], [4.0, 10.0], [None, 10.0]]
    assert batch.failures == 2
    assert [group.zero_variance for group in batch.groups] == [True, False, True]
    samples = [sample for group in batch.groups for sample in group.samples]
    assert reward_metrics(samples) == {"reward": 7.0, "reward/odd": 7.0}


def test_failures_of_a_reward_of_weight_0_are_counted() -> None:
    texts = {1: "raise x", 2: "good"}
    engines = FakeEngines(lambda tokens: texts[len(tokens)])
    source = buffer(engines, "sums", odd={**own("does"), "weight": 0.0}, size=own("length"))
    source.request({"sums": 3})
    for group, lengths in zip(list(engines.asked), [(1, 2), (1, 1), (1, 1)], strict=True):
        engines.end(group, lengths=lengths)
    batch = engines.batch(Collection(source, RolloutSettings(), 1))  # 5 of 6: none is dropped
    assert batch is not None
    rewards = [[sample.reward for sample in group.samples] for group in batch.groups]
    assert rewards == [[7.0, 4.0], [7.0, 7.0], [7.0, 7.0]]
    assert (batch.failures, batch.watch_failures) == (0, 5)
    samples = [sample for group in batch.groups for sample in group.samples]
    assert reward_metrics(samples) == {"reward": 6.5, "reward/odd": 4.0, "reward/size": 6.5}


def test_too_many_samples_without_a_reward_end_the_stage() -> None:
    engines = FakeEngines(lambda tokens: "raise x")
    source = buffer(engines, "sums", odd=own("does"))
    source.request({"sums": 3})
    engines.end_all()
    message = (
        r"4 of 6 samples have no reward, which exceeds rewards.max_failed_fraction = 0.5; first "
        r"failure: domains.sums.rewards.odd: raised ZeroDivisionError\('x'\) at small_rewards"
    )
    with pytest.raises(RewardError, match=message):
        engines.batch(Collection(source, RolloutSettings(), 1))


def test_a_reward_that_cannot_be_loaded_ends_the_stage() -> None:
    engines = FakeEngines()
    source = buffer(engines, "sums", odd=own("no_such"))
    source.request({"sums": 3})
    engines.end_all()
    with pytest.raises(
        RewardError, match=r"domains.sums.rewards.odd: tests.stages.small_rewards has no functi"
    ):
        engines.batch(Collection(source, RolloutSettings(), 1))


def test_a_sample_records_parts_and_steps() -> None:
    engines = FakeEngines(lambda tokens: "ab,c"[: len(tokens)])
    source = buffer(
        engines,
        "sums",
        steps={**own("lines"), "weight": 0.5},
        long={"kind": "length", "at_most": 4, "slack": 1, "weight": 2.0},
    )
    source.request({"sums": 3})
    engines.end_all(lengths=(4, 5))
    batch = engines.batch(Collection(source, RolloutSettings(), 1))
    assert batch is not None
    first, second = batch.groups[0].samples
    assert first.step_rewards == second.step_rewards == [(2, 1.5), (3, 0.5)]
    assert first.reward_parts == {"steps": 2.0, "long": 1.0}
    assert second.reward_parts == {"steps": 2.0, "long": 0.5}
    assert (first.reward, second.reward) == (3.0, 2.0)


def test_a_sample_is_graded_while_its_group_is_still_sampled() -> None:
    engines = FakeEngines()
    source = buffer(engines, "sums")
    [probe] = source.probes(1, "probe 1", longest=8)
    source.request({"sums": 1})
    group = engines.asked[1]
    sample = Sample("sums", np.ones(2, np.int32), np.ones(3, np.int32))
    for asked in (probe, group):
        engines.rewards.dispatch(asked, 0, sample)
    assert probe.grades is None
    assert group.grades is not None
    assert group.ended is group.grades[1] is None
    first = group.grades[0]
    assert first is not None
    assert first.result(PATIENCE_SECONDS).reward == 3.0
