"""The check that engine and trainer give equal log-probabilities, to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from parallel.batch import MicroBatch, RankPlace, Responses, split
from parallel.distributed import is_main, max_over_ranks, sum_over_data
from parallel.errors import UserError, report_notice
from parallel.mismatch import GUIDE, HIGH_RATIO, MismatchBounds, warning
from parallel.model.policy import Policy
from parallel.sample import Sample
from stages.objectives.kl import k3
from stages.objectives.surrogate import sequence_means

# A check fails where two draws do. Among a million tokens a few are so ill-conditioned that fp32
# cannot resolve them, and a wrong weight sync is wrong again.
ATTEMPTS = 2


class MismatchError(UserError):
    """Different log-probabilities of engine and trainer, of equal tokens under equal weights."""

    def __init__(self, exceeded: list[str]) -> None:
        super().__init__(
            "after a weight sync the engine's log-probabilities differ from the trainer's "
            f"{', and '.join(exceeded)}; {GUIDE}"
        )


class Mismatch(NamedTuple):
    """The number of `tokens` whose log-probabilities were compared, and what differed."""

    tokens: float
    metrics: dict[str, float]


def check_samples(
    policy: Policy,
    draw: Callable[[int], list[Sample]],
    temperature: float,
    bounds: MismatchBounds,
    budget: int = 4096,
    replay: bool = True,
) -> None:
    """Raise MismatchError where the engine's weights are not the policy's. Collective.

    `draw` returns the samples of an attempt, from 0; the error is that of the last attempt.
    `budget` is the tokens of a rank's micro-batch; with `replay`, the engine's experts are used.
    """
    for attempt in range(ATTEMPTS):
        batches = split(draw(attempt), RankPlace.here(), budget, replay)
        mismatch = measure_mismatch(policy, batches, temperature)
        if not (exceeded := bounds.exceeded(mismatch.metrics, mismatch.tokens)):
            break
    else:
        raise MismatchError(exceeded)
    if is_main() and (notice := warning(mismatch.metrics, mismatch.tokens)):
        differ = "the engine's log-probabilities differ from the trainer's"
        report_notice(f"{differ} {notice}; {GUIDE}")


def measure_mismatch(
    policy: Policy, batches: list[MicroBatch], temperature: float, entropies: bool = False
) -> Mismatch:
    """Compute log pi_old of every batch, with its entropies if asked, and `compare`. Collective.

    The batches keep both.
    """

    def recomputed(responses: Responses) -> tuple[torch.Tensor, torch.Tensor | None]:
        entropy = responses.entropy(temperature) if entropies else None
        return responses.logprobs(temperature), entropy

    policy.agreement.start()
    # Only the last pipeline stage has log-probabilities.
    for batch, outputs in zip(batches, policy.evaluate(batches, recomputed), strict=False):
        batch.old_logprobs, batch.old_entropies = outputs
    return compare(policy, batches)


def compare(policy: Policy, batches: list[MicroBatch]) -> Mismatch:
    """Compare every batch's log pi_old with the engine's mu, and the routes chosen. Collective.

    Returns the metrics of the training-inference mismatch (arXiv 2510.11370), infinite where either
    side is NaN; and, where routes were replayed, the shares of experts that both chose since
    `agreement.start`.

    Example: one response of 3 tokens, log-probabilities in nats:
        log pi_old = [-1.0, -2.0, -0.5]   log mu = [-1.1, -2.0, -0.3]   difference [.1, 0, -.2]
        mismatch_max = .2   mismatch_mean = .1   high_ratio = 0, beyond log 2
        mismatch_sequence_k3 = r - log r - 1 = 5.5e-4, with r = exp(-.1 / 3)

    Waits for: the sums of all data-parallel ranks. Unblocked by: every rank's call.
    """
    largest = 0.0
    sums = dict.fromkeys(("total", "high", "tokens", "k3", "sequences"), 0.0)
    for batch in batches:
        if batch.old_logprobs is None:  # not on the last pipeline stage
            continue
        if batch.demonstrated:  # no engine has log-probabilities of them
            continue
        log_ratio = batch.old_logprobs - batch.engine_logprobs
        difference = torch.nan_to_num(log_ratio[batch.mask].abs(), nan=math.inf)
        largest = max(largest, *difference.tolist(), 0.0)
        sums["total"] += difference.sum().item()
        sums["high"] += float((difference > HIGH_RATIO).sum())
        sums["tokens"] += difference.numel()
        # The sequence's ratio is a geometric mean: a product would grow with its length.
        sequence = sequence_means(log_ratio, batch.mask)
        divergence = k3(torch.zeros_like(sequence), sequence, sequence)
        sums["k3"] += torch.nan_to_num(divergence, nan=math.inf).sum().item()
        sums["sequences"] += int(batch.mask.any(-1).sum())
    sums = sum_over_data(sums)
    tokens = max(sums["tokens"], 1)
    metrics = {
        "mismatch_max": max_over_ranks(largest),
        "mismatch_mean": sums["total"] / tokens,
        "mismatch_sequence_k3": sums["k3"] / max(sums["sequences"], 1),
        "high_ratio": sums["high"] / tokens,
        **policy.agreement.shares(),
    }
    return Mismatch(sums["tokens"], metrics)
