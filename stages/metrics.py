"""metrics.jsonl and Weights & Biases: what a stage logs, and the sums its metrics come from."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from parallel.batch import MicroBatch, token_counts
from parallel.distributed import sum_over_data
from parallel.files import naming, write_atomically
from stages.metric_definitions import METRICS
from stages.objectives.aggregation import Totals
from stages.objectives.loss import MetricSum
from stages.settings import StageJob


class MetricsLog:
    """metrics.jsonl, one line a step, and the same numbers in Weights & Biases."""

    def __init__(self, job: StageJob, steps: int, start: int) -> None:
        """Continue after step `start`; lines of later steps, soon repeated, are dropped."""
        self.path = job.directory / "metrics.jsonl"
        self.steps = steps
        _keep_until(self.path, start)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()  # the launcher sees that the model is loaded
        self._starting = _wandb_starting(job)

    def write(self, step: int, metrics: dict[str, float], **labels: str) -> None:
        """Append one line. Raises KeyError for a metric that is not in METRICS."""
        if undeclared := sorted(name for name in metrics if _declared_as(name) not in METRICS):
            raise KeyError(f"undeclared metrics: {undeclared}")
        line = {"step": step, "steps": self.steps, "time": time.time(), **labels, **metrics}
        with naming(self.path), self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._to_wandb(lambda run: run.log({**labels, **metrics}, step=step))

    def close(self) -> None:
        """Flush what Weights & Biases still holds."""
        self._to_wandb(lambda run: run.finish())

    def _to_wandb(self, send: Callable[[Any], None]) -> None:
        """Training does not depend on it: when its service dies, metrics.jsonl goes on alone. One
        that did not start raises what it raised."""
        if self._starting is None:
            return
        run = self._starting.result()
        try:
            send(run)
        except Exception as error:
            print(f"Weights & Biases stopped ({error!r}); {self.path} goes on", flush=True)
            self._starting = None


def reduce_sums(sums: Sequence[dict[str, MetricSum]], totals: Totals) -> dict[str, float]:
    """This rank's share of each metric: the sum over micro-batches over the step's global count."""
    learned = totals.sequences if totals.learned is None else totals.learned
    counts = {"sequences": learned, "tokens": totals.tokens}
    reduced: dict[str, float] = {}
    for metrics in sums:
        for name, part in metrics.items():
            share = part.total.item() / max(counts[part.denominator], 1)
            reduced[name] = reduced.get(name, 0.0) + share
    return reduced


def token_efficiency(batches: Sequence[MicroBatch]) -> dict[str, float]:
    """The share of the tokens that the ranks computed which are not padding. Collective."""
    sums = sum_over_data(token_counts(batches))
    return {"token_efficiency": sums["real"] / sums["computed"]}


def _declared_as(name: str) -> str:
    """There is one staleness for every number of steps, one agreement for every layer, one reward
    for every name, and one KL to the teacher for every domain."""
    numbered = re.sub(r"^(staleness|(?:drift_)?router_agreement)_\d+$", r"\1_N", name)
    return re.sub(r"^(reward|teacher_kl|token_share)/.+$", r"\1/NAME", numbered)


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
    write_atomically(path, "".join(kept))


def _wandb_starting(job: StageJob) -> Future[Any] | None:
    """Its run, in 1.5 to 2 s, which the first step does not wait for."""
    if job.settings.logging.wandb == "disabled":
        return None
    return ThreadPoolExecutor(1, "wandb").submit(_start_wandb, job)


def _start_wandb(job: StageJob) -> Any:
    import wandb

    logging = job.settings.logging
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
