"""The one loop body: resume, step, log, save, stop. A stage supplies only its step."""

from __future__ import annotations

import math
import signal
from typing import Any, Protocol

from parallel import checkpoints
from parallel.distributed import is_main, max_over_ranks
from parallel.files import whole_checkpoints
from parallel.policy import TrainedPolicy
from stages.metrics import MetricsLog
from stages.settings import LoopSettings, StageJob


class TrainingStage(Protocol):
    """What differs between the stages that train."""

    policy: TrainedPolicy

    def step(self, step: int) -> dict[str, float]:
        """Do optimizer step `step`, counted from 1; returns its metrics, alike on every rank."""

    def state(self) -> dict[str, Any]:
        """What a resumed stage needs beside the policy, as JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""


class NotFiniteError(RuntimeError):
    """A loss or gradient became NaN or infinite; the message says on which samples."""


class StageStopped(Exception):
    """SIGTERM (the launcher's or Slurm's) came; the stage has saved and can be resumed."""


def train(stage: TrainingStage, job: StageJob, loop: LoopSettings) -> None:
    """Run the stage from its newest whole checkpoint, or from its parent, to its last step."""
    directory = job.directory / "checkpoints"
    start = _load(stage, job)
    log = MetricsLog(job, loop.steps, start) if is_main() else None
    stop = _StopSignal()
    for step in range(start + 1, loop.steps + 1):
        metrics = stage.step(step)
        if log is not None:
            log.write(step, metrics)
        if not all(math.isfinite(value) for value in metrics.values()):
            raise NotFiniteError(_not_finite(job, step, metrics))
        stopping = stop.requested()
        if stopping or step % loop.checkpoint_every == 0 or step == loop.steps:
            checkpoints.save(stage.policy, directory, step, stage.state(), loop.keep_last)
        if stopping and step < loop.steps:
            raise StageStopped(f"{job.stage} saved step {step} and stopped")
    if log is not None:
        log.close()


def _load(stage: TrainingStage, job: StageJob) -> int:
    saved = whole_checkpoints(job.directory / "checkpoints")
    if saved:
        state = checkpoints.load_training(stage.policy, saved[-1].path)
        stage.restore(state)
        return state["step"]
    if job.parent is not None:
        checkpoints.load_weights(stage.policy, job.parent)
    else:
        stage.policy.start_fresh(job.settings.seed)
    return 0


def _not_finite(job: StageJob, step: int, metrics: dict[str, float]) -> str:
    values = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    rollouts = job.directory / "rollouts" / f"step_{step:06d}.jsonl"
    samples = f" on the samples in {rollouts}" if rollouts.exists() else ""
    return f"step {step} of {job.stage} is not finite{samples}: {values}; nothing of it was saved"


class _StopSignal:
    """SIGTERM on any rank stops all of them after the same step."""

    def __init__(self) -> None:
        self._received = False
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, *_: object) -> None:
        self._received = True

    def requested(self) -> bool:
        return max_over_ranks(float(self._received)) > 0
