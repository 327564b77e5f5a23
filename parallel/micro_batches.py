"""The sizes of micro-batches, as the trainer cuts them and the planner counts them. No torch.

A device computes about `loop.micro_batch_tokens` at once. The C context-parallel ranks of a row
share it, so the row has C times that. Sequences are whole, so a row is never shorter than one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

# Sequences are dealt longest first, and not repacked where a row has a little more than its budget:
# 1-3 % in most steps, 9-11 % with sequences of half of it.
DEALING = 1.1


def slot_multiple(context: int) -> int:
    """Return the number of tokens that each sequence's slot in a row is a multiple of."""
    return 2 * context if context > 1 else 1


def slot_tokens(length: int, context: int) -> int:
    """Return the tokens of a sequence's slot, padding included.

    Example: two context-parallel ranks cut a slot into 4 pieces.

        >>> slot_tokens(5, context=2), slot_tokens(5, context=1)
        (8, 5)
    """
    multiple = slot_multiple(context)
    return -(-length // multiple) * multiple


def most_row_tokens(device_tokens: int, context: int, longest: int) -> int:
    """Return the most tokens of a micro-batch's row, on all its context-parallel ranks together.

    Example: 16,384 tokens a device, context 4 and sequences of 10,240 give 72,089; 4,096 tokens a
    device without context parallelism give 10,240, a row of one sequence.

    Args:
        device_tokens: `loop.micro_batch_tokens`.
        context: context-parallel ranks.
        longest: slots of the longest sequence, or of those that stay together, in tokens.
    """
    return max(int(DEALING * device_tokens * context), slot_tokens(longest, context))


def micro_batch_count(
    shares: Sequence[Sequence[Sequence[int]]], device_tokens: int, context: int, multiple: int = 1
) -> int:
    """Return the number of micro-batches of every data-parallel rank, a multiple of `multiple`.

    The fullest rank decides it, since expert parallelism needs equally many passes on all ranks.
    No row has more than `most_row_tokens`, rounded up for sequence parallelism.

    Example: two data-parallel ranks, each with sequences of 16 tokens in all.

        >>> shares = [[[10], [6]], [[9], [7]]]
        >>> micro_batch_count(shares, device_tokens=16, context=1)
        1
        >>> micro_batch_count(shares, device_tokens=8, context=1)
        2

    Args:
        shares: of each data-parallel rank, the lengths of the sequences of each unit: one sequence,
            or those that must be in the same micro-batch.
        device_tokens, context: as in `most_row_tokens`.
        multiple: micro-batches of a round of an interleaved pipeline.
    """
    lengths = [[sum(unit) for unit in share] for share in shares]
    slots = [
        [sum(slot_tokens(length, context) for length in unit) for unit in share] for share in shares
    ]
    limit = most_row_tokens(device_tokens, context, max(map(max, filter(None, slots)), default=1))
    fullest = max(map(sum, lengths))
    fewest = min(map(len, lengths))
    count = max(1, min(-(-fullest // (device_tokens * context)), fewest))
    count = -(-count // multiple) * multiple
    while any(
        _fullest_row(units, rows, count) > limit for units, rows in zip(lengths, slots, strict=True)
    ):
        count += multiple
    return count


def deal(lengths: Sequence[int], hands: int) -> list[list[int]]:
    """Return the positions in `lengths` that each hand gets.

    The longest goes first, each to the hand with the fewest tokens so far.

    Example: 10 and 9 go first; 7 joins the 9, and 6 the 10.

        >>> deal([10, 6, 9, 7], hands=2)
        [[0, 1], [2, 3]]
    """
    loads = [(0, hand) for hand in range(hands)]
    dealt: list[list[int]] = [[] for _ in range(hands)]
    for position in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        load, hand = loads[0]
        dealt[hand].append(position)
        heapq.heapreplace(loads, (load + lengths[position], hand))
    return dealt


def _fullest_row(lengths: Sequence[int], slots: Sequence[int], count: int) -> int:
    """Return the tokens of the slots of the fullest of `count` micro-batches."""
    return max(sum(slots[position] for position in hand) for hand in deal(lengths, count))
