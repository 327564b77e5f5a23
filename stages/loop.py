"""The one loop body: resume, step, log, save, stop. A stage supplies only its step."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any, Protocol

from parallel.checkpoint import load
from parallel.checkpoint.save import Saver
from parallel.distributed import any_rank, broadcast, is_main
from parallel.files import ENDED, STATE
from parallel.model.policy import TrainedPolicy
from parallel.status_pipe import report_notice
from stages.guards.watch import GuardMonitor, StepVerdict
from stages.metrics import MetricsLog
from stages.settings import LoopSettings, StageJob


class TrainingStage(Protocol):
    """The part of a training stage that differs between kinds."""

    policy: TrainedPolicy

    def step(self, step: int) -> dict[str, float]:
        """Do optimizer step `step`, counted from 1; returns its metrics, alike on every rank."""

    def score(self, metrics: dict[str, float]) -> float:
        """Return how good the policy of a step is, by the step's metrics; higher is better."""

    def state(self) -> dict[str, Any]:
        """Return what a resumed stage needs beside the policy, as JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""


class NotFiniteError(RuntimeError):
    """A loss or gradient became NaN or infinite; the message says on which samples."""


class GuardStopped(RuntimeError):
    """A guard's metric stayed beyond its threshold; the stage has saved and can be resumed."""


class StageStopped(Exception):
    """The launcher or Slurm asked for it; the stage has saved and can be resumed."""


def train(
    stage: TrainingStage, job: StageJob, loop: LoopSettings, watch: GuardMonitor | None = None
) -> None:
    """Run the stage from its newest whole checkpoint, or from its parent, to its last step, or to
    the step at which `watch` says that it is done.

    Raises GuardStopped where `watch` says that it should not go on.
    """
    directory = job.directory / "checkpoints"
    resumed = _load(stage, job, directory)
    start = resumed["step"]
    steps = start if ENDED in resumed else loop.steps
    saver = Saver(directory, loop.keep_last, loop.keep_best, loop.async_checkpoints)
    log = MetricsLog(job, loop.steps, start) if is_main() else None
    stop = _StopSignal()
    for step in range(start + 1, steps + 1):
        metrics = stage.step(step)
        verdict = watch.observe(step, metrics) if watch is not None and is_main() else StepVerdict()
        if log is not None:
            log.write(step, {**metrics, **verdict.metrics})
        stopping, writing, stopped, ended = any_rank(
            stop.received, saver.writing, verdict.stop is not None, verdict.end is not None
        )
        finite = all(math.isfinite(value) for value in metrics.values())
        if not (writing and finite):
            saver.finish()
        if not finite:
            raise NotFiniteError(_not_finite(job, step, metrics))
        last = ended or step == loop.steps
        if stopping or stopped or last or step % loop.checkpoint_every == 0:
            state = stage.state() | ({ENDED: verdict.end} if verdict.end else {})
            saver.begin(stage.policy, step, state, stage.score(metrics))
        if stopped:
            saver.finish()
            raise GuardStopped(broadcast(verdict.stop))
        if last:
            break
        if stopping:
            saver.finish()
            raise StageStopped(f"{job.stage} saved step {step} and stopped")
    saver.finish()
    if log is not None:
        log.close()


def _load(stage: TrainingStage, job: StageJob, directory: Path) -> dict[str, Any]:
    """The state to go on from, whose `step` is the last one done."""
    saved, faults = load.newest_verified(directory)
    if faults and is_main():
        origin = saved.name if saved else job.parent or "the beginning"
        report_notice(f"{'; '.join(faults)}; {job.stage} goes on from {origin}")
    if saved:
        state = load.training(stage.policy, saved)
        try:
            stage.restore(state)
        except KeyError as error:
            raise load.CheckpointError(
                f"{saved} is of another version of Braid: its {STATE} has no {error}; go on with "
                f"that version, or make the stage anew: braid resume {job.directory.parents[1]} "
                f"--from {job.stage}"
            ) from error
        return state
    if job.parent is not None:
        load.weights(stage.policy, job.parent)
    else:
        stage.policy.start_fresh(job.settings.seed)
    return {"step": 0}


def _not_finite(job: StageJob, step: int, metrics: dict[str, float]) -> str:
    values = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    rollouts = job.directory / "rollouts" / f"step_{step:06d}.jsonl"
    samples = f" on the samples in {rollouts}" if rollouts.exists() else ""
    return f"step {step} of {job.stage} is not finite{samples}: {values}; nothing of it was saved"


class _StopSignal:
    """A signal on any rank stops all of them after the same step: the launcher's SIGTERM, or
    SIGUSR1, which is what srun passes on."""

    def __init__(self) -> None:
        self.received = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._receive)

    def _receive(self, *_: object) -> None:
        self.received = True
