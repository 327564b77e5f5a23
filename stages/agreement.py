"""Engine and trainer must agree: same weights, same tokens, log-probabilities equal to rounding."""

from __future__ import annotations

import math

import torch

from parallel.batch import MicroBatch
from parallel.distributed import max_over_ranks, sum_over_data
from parallel.policy import Policy


class MismatchError(RuntimeError):
    """The engine and the trainer disagree about the same tokens under the same weights."""

    def __init__(self, largest: float, bound: float) -> None:
        super().__init__(
            f"after a refit the engine's log-probabilities differ from the trainer's by up to"
            f" {largest:.3g} nats; engine.max_logprob_difference allows {bound:g}"
        )


def measure_mismatch(
    policy: Policy, batches: list[MicroBatch], temperature: float
) -> dict[str, float]:
    """Recompute log pi_old of every batch, keep it there, and hold it against the engine's mu.

    Collective. Returns the mismatch metrics (section 4 of the algorithms); a NaN on either side
    is an infinite mismatch.
    """
    largest, total, high, tokens = 0.0, 0.0, 0, 0
    # Only the last pipeline stage has log-probabilities to compare.
    for batch, logprobs in zip(batches, policy.target_logprobs(batches, temperature), strict=False):
        batch.old_logprobs = logprobs
        difference = (batch.engine_logprobs - logprobs)[batch.mask].abs()
        difference = torch.nan_to_num(difference, nan=math.inf)
        largest = max(largest, *difference.tolist(), 0.0)
        total += difference.sum().item()
        high += int((difference > math.log(2)).sum())
        tokens += difference.numel()
    sums = sum_over_data({"total": total, "high": high, "tokens": tokens})
    return {
        "mismatch_max": max_over_ranks(largest),
        "mismatch_mean": sums["total"] / sums["tokens"],
        "high_ratio": sums["high"] / sums["tokens"],
    }
