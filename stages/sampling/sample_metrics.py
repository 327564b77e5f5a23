"""The metrics of a step's samples that every stage logs."""

from __future__ import annotations

from collections import Counter

from parallel.engine.wire import keeps_part, kept_limits
from parallel.sample import Sample
from stages.settings import SamplingSettings


def rollout_metrics(samples: list[Sample]) -> dict[str, float]:
    """Return the rewards, lengths and truncation of all samples of a step."""
    count = len(samples)
    return {
        **reward_metrics(samples),
        "unfinished": sum(not sample.finished for sample in samples) / count,
        "response_tokens": sum(len(sample.response) for sample in samples) / count,
    }


def reward_metrics(samples: list[Sample]) -> dict[str, float]:
    """Return the mean reward, and the mean of each of its parts, over the graded samples."""
    graded = [sample for sample in samples if sample.reward is not None]
    named: dict[str, list[float]] = {}
    for sample in graded:
        for name, value in (sample.reward_parts or {}).items():
            named.setdefault(name, []).append(value)
    return {
        "reward": sum(sample.reward or 0.0 for sample in graded) / max(len(graded), 1),
        **{f"reward/{name}": sum(values) / len(values) for name, values in sorted(named.items())},
    }


def saturated(
    samples: list[Sample], sampling: SamplingSettings, vocabulary: int
) -> dict[str, float]:
    """Return the share of tokens whose kept set is as large as the engine may return.

    Such a set may have been larger. Nothing where sampling keeps the whole vocabulary.
    """
    if not keeps_part(sampling.top_k, sampling.top_p):
        return {}
    _, most = kept_limits(sampling.top_k, sampling.top_p, vocabulary)
    sizes = [len(kept) for sample in samples for kept in sample.kept or []]
    full = sum(size >= most for size in sizes) if most < vocabulary else 0
    return {"kept_saturated": full / max(len(sizes), 1)}


def staleness_metrics(samples: list[Sample], version: int, most: int) -> dict[str, float]:
    """Return the samples' policy lag, in training steps of their oldest weights behind `version`.

    The mean, the largest, and the share of every lag up to `most`.
    """
    lags = Counter(version - sample.weight_version for sample in samples)
    return {
        "staleness_mean": sum(lag * count for lag, count in lags.items()) / len(samples),
        "staleness_max": float(max(lags)),
        **{f"staleness_{lag}": lags[lag] / len(samples) for lag in range(most + 1)},
    }
