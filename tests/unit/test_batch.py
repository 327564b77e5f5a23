"""Packing loses nothing, mixes nothing up, and gives every rank the same number of passes."""

from __future__ import annotations

import numpy as np
import pytest

from parallel.batch import ROW_TOKENS, collate, split
from parallel.sample import Sample


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


@pytest.mark.parametrize("seed", range(5))
def test_a_micro_batch_holds_every_sequence_whole_and_apart(seed: int) -> None:
    drawn = samples(40, seed)
    batch = collate(drawn, replay=True)
    rows, width = batch.tokens.shape
    assert width == ROW_TOKENS
    assert rows * width < 1.3 * sum(sample.length for sample in drawn)
    assert batch.routes is not None
    routes = batch.routes.view(3, width, rows, 2)
    for index, sample in enumerate(drawn):
        count = len(sample.response)
        row, last = divmod(int(batch.position[index, count - 1]), width)
        first = last - sample.length + 1
        whole = np.concatenate([sample.prompt, sample.response])
        assert batch.tokens[row, first : last + 1].tolist() == whole[:-1].tolist()
        assert batch.positions[row, first : last + 1].tolist() == list(range(sample.length))
        seen = batch.attention[row, 0, last].nonzero().flatten().tolist()
        assert seen == list(range(first, last + 1))
        assert batch.targets[index, :count].tolist() == sample.response.tolist()
        assert batch.mask[index].sum() == count
        assert np.allclose(batch.engine_logprobs[index, :count], sample.logprobs)
        assert sample.routes is not None
        found = routes[:, first : last + 1, row].numpy()
        assert np.array_equal(found, sample.routes.transpose(1, 0, 2))


def test_a_long_sequence_widens_the_rows() -> None:
    drawn = samples(3, 0, longest=200)
    batch = collate(drawn, replay=False)
    assert batch.tokens.shape[1] == max(ROW_TOKENS, *(sample.length for sample in drawn))
    assert batch.routes is None


def test_every_token_sees_something() -> None:
    assert collate(samples(7, 1), replay=False).attention.any(-1).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("budget", [64, 300, 10_000])
def test_ranks_share_the_samples_and_run_alike_many_passes(ranks: int, budget: int) -> None:
    drawn = samples(60, 2)
    parts = [split(drawn, rank, ranks, budget, replay=False) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    held = [sample.domain for part in parts for batch in part for sample in batch.samples]
    assert sorted(held) == sorted(sample.domain for sample in drawn)
    loads = [sum(s.length for batch in part for s in batch.samples) for part in parts]
    assert max(loads) - min(loads) <= 60


def test_a_budget_below_one_sample_gives_one_sample_a_pass() -> None:
    parts = split(samples(6, 3), 0, 1, token_budget=1, replay=False)
    assert [len(part.samples) for part in parts] == [1] * 6


def test_too_few_samples_are_said_to_be_too_few() -> None:
    with pytest.raises(ValueError, match="2 samples are too few for 3 ranks"):
        split(samples(2, 0), 0, 3, 100, replay=False)
