"""The functions that run vLLM's second model runner on a CPU compute what its kernels do."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from parallel.cpu import vllm_runner, vllm_sampling
from pipeline.launch.placement import ForkServers
from tests.engine.engine_process import call

LOGITS = torch.tensor([0.5, -1.0, 2.0, -torch.inf, 0.0])
DRAWS = 20_000


def murmur(words: list[int]) -> int:
    """Return the MurmurHash3 (x86, 32 bits, seed 0) of words of 32 bits, as its paper has it."""
    state = 0
    for word in words:
        word = word * 0xCC9E2D51 & 0xFFFFFFFF
        word = (word << 15 | word >> 17) & 0xFFFFFFFF
        state ^= word * 0x1B873593 & 0xFFFFFFFF
        state = (state << 13 | state >> 19) & 0xFFFFFFFF
        state = state * 5 + 0xE6546B64 & 0xFFFFFFFF
    state ^= 4 * len(words)
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ state >> 16


def sampled(seeds: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the token that each of these requests samples from LOGITS at one position."""
    count = len(seeds)
    best, values = torch.zeros(count, 2, dtype=torch.int64), torch.zeros(count, 2)
    unused = (None, 0, 0, None, None, 0)
    vllm_sampling._sample(
        best, 2, values, 2, *unused, LOGITS.expand(count, -1), 5, torch.arange(count), seeds,
        torch.full((count,), 7), torch.full((count,), temperature), 5,
    )  # fmt: skip
    return best.gather(1, values.argmax(1, keepdim=True))[:, 0]


def scans_of_a_worker() -> int:
    """Return how often an engine's start scans the names of all modules."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher

    with mock.patch.object(dispatcher, "_rebind_kernels") as scan:
        vllm_runner.provide()
        current_platform.register_triton_kernel_overrides()  # as vLLM's worker does
    return scan.call_count


def test_a_forked_engine_finds_the_kernels_registered(
    fork_servers: ForkServers, tmp_path: Path
) -> None:
    assert call(fork_servers, scans_of_a_worker, tmp_path) == 0


def test_random_numbers_do_not_depend_on_how_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, positions = np.arange(7), np.arange(7) * 3
    whole = vllm_sampling._uniform(seeds, positions, 10)
    monkeypatch.setattr(vllm_sampling, "CACHED", 20)
    assert np.array_equal(vllm_sampling._uniform(seeds, positions, 10), whole)


def test_random_numbers_are_the_hashes_of_seed_position_and_token() -> None:
    seeds, positions = np.array([3, -5, 1 << 40 | 9]), np.array([0, 11, 1 << 20])
    found = vllm_sampling._uniform(seeds, positions, 4)
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, position]
        hashes = [murmur([*words, token]) for token in range(4)]
        assert found[row].tolist() == [np.float32((each + 0.5) / 2**32) for each in hashes]


def test_tokens_are_sampled_by_their_probabilities() -> None:
    """Within five standard deviations."""
    shares = sampled(torch.arange(DRAWS), 1.0).bincount(minlength=5) / DRAWS
    expected = LOGITS.softmax(0)
    assert ((shares - expected).abs() <= 5 * (expected * (1 - expected) / DRAWS).sqrt()).all()


def test_a_random_number_that_rounds_to_1_samples_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in 2 ** 25 does: in one of 200 samples from a vocabulary of 152,000."""
    monkeypatch.setattr(vllm_sampling, "_uniform", lambda *_: np.float32([[0.5, 1, 0.5, 0.5, 0.5]]))
    assert sampled(torch.zeros(1).long(), 1.0).tolist() == [2]


def test_without_a_temperature_the_likeliest_token_is_sampled() -> None:
    assert sampled(torch.arange(100), 0.0).unique().tolist() == [2]


@pytest.mark.parametrize("most", [2, 5])
def test_masks_hold_ids_bits_and_counts(most: int) -> None:
    """A request in prefill has none."""
    ids, counts = torch.zeros(2, most, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    packed = torch.zeros(2, 1, dtype=torch.uint8)
    vllm_sampling._compact_masks(
        LOGITS.expand(2, -1), 5, 1, torch.arange(3), torch.tensor([1, 0]), ids, most, packed, 1,
        counts, 5, most,
    )  # fmt: skip
    assert counts.tolist() == [4, 0]
    assert packed[:, 0].tolist() == [0b10111, 0]
    assert ids[0, : min(4, most)].tolist() == [0, 1, 2, 4][:most]


def test_staged_ranges_are_written_to_rows_of_tables_and_of_lists() -> None:
    rows, starts, ends = (torch.tensor(values) for values in ([2, 0], [1, 0], [2, 3]))
    table, contents = torch.zeros(3, 4, dtype=torch.int32), torch.tensor([5, 6, 7])
    vllm_runner._apply_writes(table, 4, rows, starts, contents, ends)
    assert table.tolist() == [[7, 0, 0, 0], [0, 0, 0, 0], [0, 5, 6, 0]]
    one, two = torch.zeros(3, dtype=torch.int32), torch.tensor([1, 2])
    vllm_runner._apply_writes(one, 1, rows, torch.zeros(2).long(), torch.tensor([8, 9]), two)
    assert one.tolist() == [9, 0, 8]


def test_blocks_are_zeroed_and_no_others() -> None:
    """Another layer's page ends each block."""
    cache = torch.ones(4, 6)
    address, stride, size = torch.tensor([cache.data_ptr()]), torch.tensor([6]), torch.tensor([4])
    vllm_runner._zero_blocks(address, stride, size, torch.tensor([0, 2]))
    assert cache[:, :4].sum(1).tolist() == [0, 4, 0, 4]
    assert cache[:, 4:].all()
