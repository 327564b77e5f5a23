"""The log of a stage's metrics, metrics.jsonl and trackers, and what every stage logs.

Two responses are similar where they share shingles, runs of a few tokens (Jaccard). A long response
is represented by the smallest hashes of its shingles (bottom-k sketches, Broder 1997), so that a
pair costs the same at any length; a short one by all of them, exactly.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, pstdev

import numpy as np

from parallel.batch import MicroBatch, token_counts
from parallel.distributed import sum_over_data
from parallel.engine.wire import keeps_part, largest_kept_set
from parallel.errors import UserError
from parallel.files import naming, open_in_place, touch
from parallel.sample import Sample
from stages.domains import SamplingSettings
from stages.metric_definitions import METRICS, declared_as
from stages.objectives.groups import Batch, Group, is_right, rewarded
from stages.objectives.loss import MetricSum, Totals
from stages.rewards.reward import RewardBase
from stages.sampling.sample_files import samples_file
from stages.settings import StageJob
from stages.trackers.tracker import TrackedStage, Trackers

SHINGLE = 3  # tokens
SKETCH = 256  # hashes; the estimate's standard error is then at most 0.03
SIMILAR = 0.8  # share of common shingles of nearly equal responses
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # splitmix64's


class MetricsLog:
    """The writer of metrics.jsonl, one line a step, and of the same numbers to the trackers.

    Example: a line, with `time` in seconds since 1970:
        {"step": 3, "steps": 50, "time": 1764276000.5, "reward": 0.25, "loss": -0.01}
    """

    def __init__(self, job: StageJob, steps: int) -> None:
        self.path = job.files.metrics
        self.steps = steps
        self.path.parent.mkdir(parents=True, exist_ok=True)
        touch(self.path)  # the launcher sees that the model is loaded
        self._files = job.files
        self._trackers = Trackers(job.settings.logging.active_trackers, _tracked(job))
        self._saving: list[int] = []  # steps of checkpoints that may not be whole yet

    def write(self, step: int, metrics: dict[str, float], **labels: str) -> None:
        """Append a step's metrics; raise KeyError for one that is not in METRICS."""
        if undeclared := sorted(name for name in metrics if declared_as(name) not in METRICS):
            raise KeyError(f"undeclared metrics: {undeclared}")
        line = {"step": step, "steps": self.steps, "time": time.time(), **labels, **metrics}
        with naming(self.path), open_in_place(self.path, "ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
        self._trackers.metrics(step, metrics, labels)
        self._send_checkpoints()

    def saved(self, step: int) -> None:
        """Send the checkpoint of a step to the trackers, once it is whole."""
        self._saving.append(step)

    def _send_checkpoints(self) -> None:
        for step in list(self._saving):
            with suppress(UserError):  # it is damaged, which whoever loads it says
                if (checkpoint := self._files.checkpoint(step)) is not None:
                    samples = samples_file(self._files.rollouts, step)
                    self._trackers.checkpoint(checkpoint, self._files.parents(), samples)
                    self._saving.remove(step)

    def close(self) -> None:
        """Flush and end the trackers' runs."""
        self._send_checkpoints()
        self._trackers.close()


def _tracked(job: StageJob) -> TrackedStage:
    settings = job.settings
    return TrackedStage(
        run=settings.name,
        stage=job.stage,
        id=f"{settings.name}-{job.stage}-{job.files.tracker_id()}".replace(".", "-"),
        directory=job.directory,
        project=settings.logging.project,
        online=settings.logging.wandb == "online",
        settings=settings.model_dump(mode="json"),
    )


def reduce_sums(
    sums: Sequence[tuple[Collection[str], Mapping[str, MetricSum]]], totals: Mapping[str, Totals]
) -> dict[str, float]:
    """Return this rank's share of each metric: its sum over the step's global count.

    `sums` are of shards, each with the domains whose samples it may hold, and `totals` the counts
    by domain. A metric is divided by the count of all domains that have it; one that no domain has
    a count of is left out.
    """
    having: dict[str, set[str]] = {}
    for domains, metrics in sums:
        for name in metrics:
            having.setdefault(name, set()).update(domains)
    whole = {
        name: Totals.together([totals[domain] for domain in domains])
        for name, domains in having.items()
    }
    reduced: dict[str, float] = {}
    for name, metric_sum in (named_sum for _, metrics in sums for named_sum in metrics.items()):
        counts = {"sequences": whole[name].learned, "tokens": whole[name].tokens}
        if count := counts[metric_sum.denominator]:
            reduced[name] = reduced.get(name, 0.0) + metric_sum.total.item() / count
    return reduced


def token_efficiency(batches: Sequence[MicroBatch]) -> dict[str, float]:
    """Return the share of the computed tokens that are not padding. Collective."""
    sums = sum_over_data(token_counts(batches))
    return {"token_efficiency": sums["real"] / sums["computed"]}


def mean_of_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each metric's mean over the updates that have it.

    >>> mean_of_updates([{"loss": 1.0, "kl": 0.5}, {"loss": 3.0}])
    {'loss': 2.0, 'kl': 0.5}
    """
    values: dict[str, list[float]] = {}
    for name, value in (named_value for update in updates for named_value in update.items()):
        values.setdefault(name, []).append(value)
    return {name: sum(of) / len(of) for name, of in values.items()}


def batch_metrics(
    batch: Batch, step: int, sampling: SamplingSettings, vocabulary: int, most: int
) -> dict[str, float]:
    """Return the metrics of a step's samples that every stage logs; `most` is the maximum lag.

    A policy lag is in training steps, from a sample's oldest weights to the version `step`.
    """
    # Replaced groups count: without them the reward would tend to one half.
    sampled = [sample for group in batch.sampled for sample in group.samples]
    trained = [sample for group in batch.groups for sample in group.samples]
    lags = Counter(step - sample.weight_version for sample in trained)
    return {
        **reward_metrics(sampled),
        "unfinished": sum(not sample.finished for sample in sampled) / len(sampled),
        "response_tokens": sum(len(sample.response) for sample in sampled) / len(sampled),
        "sampled_tokens": float(sum(len(sample.response) for sample in sampled)),
        "trained_tokens": trained_tokens(trained),
        **saturated(trained, sampling, vocabulary),
        "staleness_mean": sum(lag * n for lag, n in lags.items()) / len(trained),
        "staleness_max": float(max(lags)),
        **{f"staleness_{lag}": lags[lag] / len(trained) for lag in range(most + 1)},
        "dropped_stale": float(batch.too_old),
        "reward_failures": float(batch.failures),
        "watch_failures": float(batch.watch_failures),
    }


def trained_tokens(samples: Sequence[Sample]) -> float:
    """Return the number of tokens that a step trains on."""
    return float(sum(len(sample.learned) for sample in samples))


def reward_metrics(samples: list[Sample]) -> dict[str, float]:
    """Return the mean reward, and the mean of each of its parts, over the graded samples."""
    graded = [sample for sample in samples if sample.reward is not None]
    by_name: dict[str, list[float]] = {}
    for sample in graded:
        for name, value in (sample.reward_parts or {}).items():
            by_name.setdefault(name, []).append(value)
    return {
        "reward": sum(sample.reward or 0.0 for sample in graded) / max(len(graded), 1),
        **{f"reward/{name}": sum(values) / len(values) for name, values in sorted(by_name.items())},
    }


def saturated(
    samples: list[Sample], sampling: SamplingSettings, vocabulary: int
) -> dict[str, float]:
    """Return the share of tokens whose kept set is as large as the engine may return.

    Such a set may have been larger. Nothing where sampling keeps the whole vocabulary.
    """
    if not keeps_part(sampling.top_k, sampling.top_p):
        return {}
    most = largest_kept_set(sampling.top_k, sampling.top_p, vocabulary)
    sizes = [len(kept_ids) for sample in samples for kept_ids in sample.kept or []]
    full = sum(size >= most for size in sizes) if most < vocabulary else 0
    return {"kept_saturated": full / max(len(sizes), 1)}


def group_metrics(
    groups: Sequence[Group], rewards: Mapping[str, Mapping[str, RewardBase]]
) -> dict[str, float]:
    """Return the metrics of all groups sampled for a step, given the rewards of each domain.

    A sample without a reward is in no metric of rewards; a metric of no sample is left out.
    `reward_spread` is the mean population std of a group's rewards, `wrong_over_right` the ratio of
    mean lengths. `identical_responses` and `similar_responses` are the shares of samples equal, or
    nearly equal, to an earlier one of their group, among those that have an earlier one.
    """
    rated = [
        [(sample, is_right(sample, rewards[sample.domain])) for sample in rewarded(group)]
        for group in groups
    ]
    verdicts = [[right for _, right in group] for group in rated if group]
    metrics = {
        "all_right": sum(map(all, verdicts)) / max(len(groups), 1),
        "all_wrong": sum(not any(rights) for rights in verdicts) / max(len(groups), 1),
    }
    earned = [[sample.reward or 0.0 for sample, _ in group] for group in rated if len(group) >= 2]
    if earned:
        metrics["reward_spread"] = fmean(map(pstdev, earned))
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for sample, right in (pair for group in rated for pair in group):
        lengths[right].append(len(sample.response))
    if lengths[True] and lengths[False]:
        metrics["wrong_over_right"] = fmean(lengths[False]) / fmean(lengths[True])
    counts = [repeats([sample.response for sample in group.samples], SIMILAR) for group in groups]
    later = max(sum(len(group.samples) - 1 for group in groups), 1)
    metrics["identical_responses"] = sum(identical for identical, _ in counts) / later
    metrics["similar_responses"] = sum(alike for _, alike in counts) / later
    return metrics


@dataclass(frozen=True)
class Sketch:
    """The `SKETCH` smallest hashes of a response's shingles; `whole` where there are no others."""

    hashes: frozenset[int]
    whole: bool


def sketch(tokens: np.ndarray) -> Sketch:
    """Return the sketch of tokens, int [length]; fewer than `SHINGLE` tokens are one shingle.

    All shingles are hashed together, one token of each at a time: hash = mix(hash + token + 1).
    """
    size = min(SHINGLE, len(tokens))
    shingles = len(tokens) - size + 1
    hashes = np.zeros(shingles if size else 0, np.uint64)
    for offset in range(size):
        column = tokens[offset : offset + shingles].astype(np.uint64)
        hashes = _mix(hashes + column + np.uint64(1))  # mix(0) is 0: token 0 would not count
    smallest = np.unique(hashes)
    return Sketch(frozenset(smallest[:SKETCH].tolist()), len(smallest) <= SKETCH)


def jaccard(one: Sketch, other: Sketch) -> float:
    """Return the share of the shingles of either that both have, in [0, 1]; 1 if both are empty."""
    either, both = one.hashes | other.hashes, one.hashes & other.hashes
    if not either:
        return 1.0
    if one.whole and other.whole:
        return len(both) / len(either)
    # Hashes beyond the smallest of the union were cut from one of the sketches, or not seen.
    smallest = sorted(either)[:SKETCH]
    return sum(shingle in both for shingle in smallest) / len(smallest)


def repeats(responses: list[np.ndarray], similar: float) -> tuple[int, int]:
    """Count responses equal to an earlier one of the group, and those similar to an earlier one.

    Similar ones share at least `similar` of their shingles; equal ones are among them.
    """
    seen: set[bytes] = set()
    sketches: list[Sketch] = []
    identical = alike = 0
    for response in responses:
        text = response.tobytes()
        if text in seen:
            # An equal response needs no sketch: later ones are compared with the first of them.
            identical += 1
            continue
        seen.add(text)
        response_sketch = sketch(response)
        alike += any(_alike(response_sketch, earlier, similar) for earlier in sketches)
        sketches.append(response_sketch)
    return identical, identical + alike


def _alike(one: Sketch, other: Sketch, similar: float) -> bool:
    """Return true where two unequal sketches are similar; most need no union."""
    most = max(len(one.hashes), len(other.hashes))
    return len(one.hashes & other.hashes) >= similar * most and jaccard(one, other) >= similar


def _mix(values: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 values as splitmix64 does; arithmetic is modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
