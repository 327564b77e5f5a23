"""The log of a stage's metrics, metrics.jsonl and trackers, and what every stage logs."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from parallel.batch import MicroBatch, token_counts
from parallel.distributed import sum_over_data
from parallel.engine.wire import keeps_part, kept_limits
from parallel.errors import UserError
from parallel.files import naming, open_in_place, touch
from parallel.sample import Sample
from stages.domains import SamplingSettings
from stages.metric_definitions import METRICS, declared_as
from stages.objectives.groups import Batch
from stages.objectives.loss import MetricSum, Totals
from stages.sampling.sample_files import samples_file
from stages.settings import StageJob
from stages.trackers.tracker import TrackedStage, Trackers


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
    _, most = kept_limits(sampling.top_k, sampling.top_p, vocabulary)
    sizes = [len(kept_ids) for sample in samples for kept_ids in sample.kept or []]
    full = sum(size >= most for size in sizes) if most < vocabulary else 0
    return {"kept_saturated": full / max(len(sizes), 1)}
