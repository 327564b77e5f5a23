"""The engine's sampling: its log-probabilities, and the sets that top-k and top-p kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stages.audit.model import Model
from stages.audit.recorded import RecordedSample
from stages.audit.rows import Comparison, number

# Rounding decides whether tokens that tie with the last kept one are kept.
OF_TIES = 0.02


def mismatch(
    samples: Sequence[RecordedSample], old: Sequence[torch.Tensor], logged: Mapping[str, float]
) -> list[Comparison]:
    """Compare the engine's mismatch with pi_old, relative to one nat: it is rounding itself.

    For samples of older weights it is the policy's drift.
    """
    pairs = zip(samples, old, strict=True)
    apart = torch.cat([mine - sample.logprobs[sample.learned] for sample, mine in pairs]).abs()
    if not len(apart):  # no learned tokens
        apart = torch.zeros(1, dtype=torch.float64)
    moved = "drift_max" in logged
    prefix = "drift" if moved else "mismatch"
    found = {
        f"{prefix}_max": float(apart.max()),
        f"{prefix}_mean": float(apart.mean()),
        f"{'drift_' * moved}high_ratio": float((apart > math.log(2)).double().mean()),
    }
    return [number(name, logged[name], value, scale=1.0) for name, value in found.items()]


def kept_sets(
    samples: Sequence[RecordedSample], model: Model, sampling: dict[str, Any], replay: bool
) -> list[Comparison]:
    """Compare the kept sets of freshly sampled tokens: the share that is equal, 1 in the run.

    No rows where sampling keeps the whole vocabulary.
    """
    if not samples or (sampling["top_k"] == 0 and sampling["top_p"] == 1.0):
        return []
    alike, tokens = 0, 0
    with torch.no_grad():
        for sample in samples:
            logits = model.read(sample, replay).logits / sampling["temperature"]
            sets = sample.kept or [torch.empty(0)] * len(logits)
            for row, given in zip(logits, sets, strict=True):
                wanted = _kept(row, sampling["top_k"], sampling["top_p"])
                alike += set(given.tolist() or range(len(row))) == wanted
                tokens += 1
    share = alike / tokens
    return [Comparison("kept sets", 1.0, share, 1.0 - share, OF_TIES)]


def _kept(row: torch.Tensor, top_k: int, top_p: float) -> set[int]:
    """Return the `top_k` likeliest tokens, and of those the fewest that sum to `top_p` or more."""
    order = row.argsort(descending=True)[: top_k or len(row)]
    before = row[order].softmax(0).cumsum(0) - row[order].softmax(0)
    return set(order[before < top_p].tolist())
