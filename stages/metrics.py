"""Every metric a stage may log, with its denominator; docs/metrics.md says what healthy is."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.objectives.aggregation import Totals
from stages.objectives.policy_loss import MetricSum
from stages.settings import StageJob


@dataclass(frozen=True)
class Metric:
    """What one value of a metric was divided by, and what it says."""

    denominator: str
    meaning: str


METRICS = {
    "loss": Metric("step", "the objective, normalised by the step's global count"),
    "gradient_norm": Metric("step", "norm of the whole gradient before clipping"),
    "learning_rate": Metric("step", "rate this step used"),
    "reward": Metric("sequences", "mean reward of the step's rollouts"),
    "zero_variance": Metric("groups", "share of prompts whose samples all earned the same"),
    "unfinished": Metric("sequences", "share of responses cut off before their end token"),
    "response_tokens": Metric("sequences", "mean response length in tokens, end token included"),
    "ratio": Metric("sequences", "mean policy ratio"),
    "clip_fraction": Metric("sequences", "mean share of a response that clipping took part in"),
    "entropy": Metric("tokens", "mean of -log pi of the sampled tokens, in nats"),
    "kl": Metric("tokens", "mean of the chosen estimator of KL to the reference, in nats"),
    "teacher_kl": Metric("tokens", "mean full-vocabulary KL(student || its teacher), in nats"),
    "mismatch_max": Metric("step", "largest |log mu - log pi| after the refit, in nats"),
    "mismatch_mean": Metric("tokens", "mean |log mu - log pi| after the refit, in nats"),
    "high_ratio": Metric("tokens", "share of tokens with pi / mu or mu / pi above 2"),
    "seconds_refit": Metric("step", "time to bring the weights to the engine"),
    "seconds_rollout": Metric("step", "time to sample and grade"),
    "seconds_train": Metric("step", "time of all forward, backward and optimizer work"),
    "accuracy": Metric("problems", "share of the problems so far that were solved"),
}


class MetricsLog:
    """metrics.jsonl, one line a step, and the same numbers in Weights & Biases."""

    def __init__(self, job: StageJob, steps: int, start: int) -> None:
        """Continue after step `start`; lines of later steps, soon repeated, are dropped."""
        self.path = job.directory / "metrics.jsonl"
        self.steps = steps
        _keep_until(self.path, start)
        self._wandb = _start_wandb(job)

    def write(self, step: int, metrics: dict[str, float], **labels: str) -> None:
        """Append one line. Raises KeyError for a metric that is not declared above."""
        if undeclared := sorted(metrics.keys() - METRICS.keys()):
            raise KeyError(f"undeclared metrics: {undeclared}")
        line = {"step": step, "steps": self.steps, "time": time.time(), **labels, **metrics}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._wandb is not None:
            self._wandb.log({**labels, **metrics}, step=step)

    def close(self) -> None:
        """Flush what Weights & Biases still holds."""
        if self._wandb is not None:
            self._wandb.finish()


def reduce_sums(sums: Sequence[dict[str, MetricSum]], totals: Totals) -> dict[str, float]:
    """This rank's share of each metric: the sum over micro-batches over the step's global count."""
    counts = {"sequences": totals.sequences, "tokens": totals.tokens}
    reduced: dict[str, float] = {}
    for metrics in sums:
        for name, part in metrics.items():
            share = part.total.item() / max(counts[part.denominator], 1)
            reduced[name] = reduced.get(name, 0.0) + share
    return reduced


def _keep_until(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except json.JSONDecodeError:
            break  # the line a killed stage was writing
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text("".join(kept))
    unfinished.replace(path)


def _start_wandb(job: StageJob) -> Any:
    logging = job.settings.logging
    if logging.wandb == "disabled":
        return None
    import wandb

    return wandb.init(
        project=logging.project,
        group=job.settings.name,
        name=f"{job.settings.name}/{job.stage}",
        id=f"{job.settings.name}-{job.stage}-{job.attempt}".replace(".", "-"),
        mode=logging.wandb,
        dir=job.directory,
        config=job.settings.model_dump(mode="json"),
        settings=wandb.Settings(console="off", silent=True),
    )
