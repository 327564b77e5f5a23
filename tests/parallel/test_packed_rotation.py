"""A packed row is rotated at once with the bits of megatron-core's rotation by sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from parallel.cpu.megatron import _rotate_at_once, activate


class ContextRank:
    """A group of context-parallel ranks, of which this is one."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def by_sequence(
    row: torch.Tensor, ends: torch.Tensor, freqs: torch.Tensor, group: Any, **options: Any
) -> Any:
    """Rotate each sequence by itself."""
    lengths = (ends.diff() // group.size()).tolist()
    return torch.cat(
        [
            rope_utils._apply_rotary_pos_emb_bshd(
                sequence.unsqueeze(1),
                rope_utils._get_thd_freqs_on_this_cp_rank(
                    group.rank(), group.size(), sequence, freqs
                ),
                **options,
            ).squeeze(1)
            for sequence in row.split(lengths)
        ]
    )


@pytest.mark.parametrize("options", [{}, {"mla_rotary_interleaved": True, "mscale": 1.2}])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_a_row_is_rotated_with_the_bits_of_its_sequences(
    rank: int, size: int, options: dict[str, Any]
) -> None:
    activate()
    group, ends = ContextRank(rank, size), torch.tensor([0, 8, 8, 20, 24])
    random = torch.Generator().manual_seed(0)
    freqs = torch.rand(16, 1, 1, 6, generator=random) * 6
    rows = [torch.randn(24 // size, 3, 8, generator=random.manual_seed(1)) for _ in range(2)]
    one, other = (row.requires_grad_() for row in rows)
    weights = torch.randn(24 // size, 3, 8, generator=random)
    at_once = rope_utils._apply_rotary_pos_emb_thd(one, ends, freqs, cp_group=group, **options)
    expected = by_sequence(other, ends, freqs, group, **options)
    assert torch.equal(at_once, expected)
    (at_once * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.equal(one.grad, other.grad)


def test_positions_of_the_whole_row_are_left_to_megatron_core() -> None:
    rotated = _rotate_at_once(rope_utils, lambda *_, **options: options["cp_group"])
    row, freqs = torch.zeros(24, 3, 8), torch.zeros(24, 1, 1, 6)
    assert rotated(row, torch.tensor([0, 8, 24]), freqs, cp_group="its own") == "its own"
