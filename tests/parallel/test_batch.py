"""Packing loses nothing, mixes nothing up, and gives every rank the same number of passes."""

from __future__ import annotations

import numpy as np
import pytest

from parallel.batch import RankPlace, collate, split
from parallel.cpu.attention import _grids
from parallel.machine.device import device
from parallel.micro_batches import most_row_tokens
from parallel.sample import Sample

CONTEXTS = [[RankPlace()], [RankPlace(context=2, context_rank=rank, tensor=2) for rank in range(2)]]
CONTEXTS.append([RankPlace(context=4, context_rank=rank, tensor=3) for rank in range(4)])


def samples(count: int, seed: int, longest: int = 30) -> list[Sample]:
    draw = np.random.default_rng(seed)
    made = []
    for index in range(count):
        prompt, response = (draw.integers(2, 70, draw.integers(1, longest)) for _ in range(2))
        routes = draw.integers(0, 8, (len(prompt) + len(response) - 1, 3, 2))
        made.append(
            Sample(
                domain=str(index),
                prompt=prompt.astype(np.int32),
                response=response.astype(np.int32),
                logprobs=draw.normal(size=len(response)).astype(np.float32),
                routes=routes,
                advantage=float(index),
            )
        )
    return made


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("places", CONTEXTS, ids=["whole", "context 2", "context 4"])
def test_the_ranks_of_a_row_hold_every_sequence_whole_and_apart(
    places: list[RankPlace], padded: bool
) -> None:
    drawn = samples(40, seed=len(places), longest=200)
    parts = [collate(drawn, place, replay=True, padded=padded) for place in places]
    row = parts[0].row
    assert row.tokens % places[0].row == 0
    tokens, routes = np.full(row.tokens, -1), np.full((row.tokens, 3, 2), -1)
    positions = np.full(row.tokens, -1)
    for part in parts:
        assert len(part.row.local_positions) == row.tokens // len(places)
        tokens[part.row.local_positions] = part.tokens[0].numpy()
        positions[part.row.local_positions] = part.positions[0].numpy()
        assert part.row.routes is not None
        routes[part.row.local_positions] = part.row.routes.numpy().transpose(1, 0, 2)
    predicted = np.zeros(parts[0].mask.shape, int)
    for part in parts:
        np.add.at(predicted.reshape(-1), part.place.numpy(), 1)
    assert np.array_equal(predicted, parts[0].mask.numpy().astype(int))  # each by one rank
    for index, (sample, start) in enumerate(zip(drawn, row.starts, strict=False)):
        own = slice(start, start + sample.length)
        whole = [*sample.prompt, *sample.response]
        assert tokens[own].tolist() == whole[:-1]
        assert positions[own].tolist() == list(range(sample.length))
        assert np.array_equal(routes[own], sample.routes)
        count = len(sample.response)
        assert parts[0].targets[index, :count].tolist() == sample.response.tolist()
        assert parts[0].mask[index].sum() == count
        assert np.allclose(parts[0].engine_logprobs[index, :count], sample.logprobs)


@pytest.mark.parametrize("places", CONTEXTS, ids=["whole", "context 2", "context 4"])
def test_every_token_has_its_kept_set(places: list[RankPlace]) -> None:
    drawn = samples(9, seed=5)
    for sample in drawn[::2]:  # the others were drawn from the whole vocabulary
        sample.kept = [np.arange(token, token + 1 + token % 4) for token in sample.response]
    seen = 0
    for place in places:
        part = collate(drawn, place, replay=False)
        assert part.kept is not None
        for token, at, ids in zip(part.own_targets, part.place, part.kept, strict=True):
            sample = drawn[int(at) // part.mask.shape[1]]
            own = [] if sample.kept is None else range(int(token), int(token + 1 + token % 4))
            assert [i for i in ids.tolist() if i >= 0] == list(own)
            seen += 1
    assert seen == sum(len(sample.response) for sample in drawn)
    assert collate(samples(3, 0), RankPlace(), replay=False).kept is None


def test_packing_computes_little_but_the_samples() -> None:
    drawn = samples(40, 0)
    real = sum(sample.length for sample in drawn)
    assert collate(drawn, RankPlace(), replay=False).row.tokens == real
    assert collate(drawn, RankPlace(context=2, tensor=2), replay=False).row.tokens < 1.15 * real


@pytest.mark.parametrize("places", CONTEXTS, ids=["whole", "context 2", "context 4"])
def test_every_token_sees_its_own_sequence_up_to_itself(places: list[RankPlace]) -> None:
    drawn = samples(12, 3, longest=150)
    gathered = np.concatenate(
        [collate(drawn, place, False).row.local_positions for place in places]
    )
    for place in places:
        row = collate(drawn, place, replay=False).row
        grids, back = _grids(row, place, device())
        seen: list[list[int]] = []
        for grid in grids:
            for line in range(grid.queries.shape[0]):
                for column in range(grid.queries.shape[1]):
                    sees = np.arange(grid.keys.shape[1]) <= column
                    if (mask := grid.sees(None)) is not None:
                        sees = mask[line, 0, column].numpy()
                    seen.append(gathered[grid.keys[line].numpy()[sees]].tolist())
        for local, index in enumerate(row.local_positions):
            start = row.starts[np.searchsorted(row.starts, index, side="right") - 1]
            assert seen[int(back[local])] == list(range(start, index + 1))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("budget", [64, 300, 10_000])
def test_ranks_share_the_samples_and_run_equal_numbers_of_passes(ranks: int, budget: int) -> None:
    drawn = samples(60, 2)
    parts = [
        split(drawn, RankPlace(data=ranks, data_rank=rank), budget, replay=False)
        for rank in range(ranks)
    ]
    assert len({len(part) for part in parts}) == 1
    held = [sample.domain for part in parts for batch in part for sample in batch.samples]
    assert sorted(held) == sorted(sample.domain for sample in drawn)
    loads = [sum(s.length for batch in part for s in batch.samples) for part in parts]
    assert max(loads) - min(loads) <= 60


def test_a_budget_below_one_sample_gives_one_sample_a_pass() -> None:
    parts = split(samples(6, 3), RankPlace(), token_budget=1, replay=False)
    assert [len(part.samples) for part in parts] == [1] * 6


def of_lengths(lengths: list[int]) -> list[Sample]:
    """Return samples of these lengths: a prompt of one token and a response."""
    return [Sample("d", np.ones(1, np.int32), np.ones(length, np.int32)) for length in lengths]


LENGTHS = {
    "spread": np.minimum(np.random.default_rng(0).lognormal(5, 0.8, 200), 800).astype(int).tolist(),
    # All just below a budget: dealt to rows of 1024 on average, some rows would have two.
    "truncated": [1000] * 130,
    "odd": [17] * 400,  # whose slots have up to 7 tokens of padding
    "one is long": [1900, *[10] * 50],
}


@pytest.mark.parametrize("context", [1, 2, 4])
@pytest.mark.parametrize("name", LENGTHS)
def test_no_row_is_longer_than_planned(context: int, name: str) -> None:
    lengths, places = LENGTHS[name], RankPlace(context=context)
    rows = [part.row.tokens for part in split(of_lengths(lengths), places, 1024 // context, False)]
    # By hand: a tenth more than the budget of all devices, or the longest sample in its slot.
    longest = -(-max(lengths) // 8) * 8 if context == 4 else max(lengths)
    assert max(rows) <= max(1126, longest) + places.row
    assert max(rows) <= most_row_tokens(1024 // context, context, max(lengths)) + places.row


@pytest.mark.parametrize("context", [1, 2, 4])
def test_context_parallel_devices_share_a_row(context: int) -> None:
    parts = split(of_lengths([100] * 160), RankPlace(context=context), 1000, replay=False)
    assert len(parts) == 16 // context
    assert {part.row.tokens for part in parts} == {
        -(-100 // 8) * 8 * 40 if context == 4 else 1000 * context
    }
    assert {part.tokens.shape[1] for part in parts} <= {1000, 1040}


def test_a_pair_stays_in_one_row_of_its_own_length() -> None:
    parts = split(of_lengths([300, 200] * 9), RankPlace(), 64, replay=False, together=2)
    assert [part.row.tokens for part in parts] == [500] * 9


def test_each_sequence_of_a_pair_is_padded_for_context_parallelism() -> None:
    """A pair of 9 tokens each takes two slots of 16: three of them exceed 1.1 * 4 * 20 tokens."""
    parts = split(of_lengths([9] * 18), RankPlace(context=4), 20, replay=False, together=2)
    assert max(part.row.tokens for part in parts) <= 88


def test_an_interleaved_pipeline_gets_whole_rounds() -> None:
    parts = split(samples(5, 3), RankPlace(round=4), token_budget=1, replay=False)
    assert sorted(len(part.samples) for part in parts) == [0, 0, 0, 1, 1, 1, 1, 1]
    # Two rows would hold 180 tokens, but one of them 120 of three equal samples.
    parts = split(of_lengths([60] * 3), RankPlace(round=2), token_budget=100, replay=False)
    assert sorted(len(part.samples) for part in parts) == [0, 1, 1, 1]


def test_a_rank_without_samples_runs_padding() -> None:
    [part] = split(samples(2, 0), RankPlace(data=3, data_rank=2, tensor=2), 100, replay=True)
    assert part.samples == []
    assert part.mask.shape == (0, 1)
    assert part.row.tokens == 2
    assert not part.row.real.any()
    assert part.row.routes is None
