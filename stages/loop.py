"""The loop of every training stage: resume, step, log, save, stop. A stage supplies its step."""

from __future__ import annotations

import math
import signal
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, Protocol

from parallel.checkpoint import load
from parallel.checkpoint.save import Saver
from parallel.distributed import any_rank, broadcast, is_main
from parallel.errors import UserError, report_notice
from parallel.files import ENDED, STATE, CheckpointError, keep_steps
from parallel.model.policy import TrainedPolicy
from parallel.timeline import phase
from stages.domains import LoopSettings
from stages.guards.watch import GuardMonitor, StepVerdict
from stages.metrics import MetricsLog
from stages.sampling.sample_files import samples_file
from stages.settings import StageJob


class TrainingStage(Protocol):
    """The part of a training stage that differs between kinds.

    Example: a step of GRPO, rank 0 and the others:
        rank 0   step: samples, trains    observe, log    any_rank    checkpoint
        others   step: wait, train                        any_rank    checkpoint
    In `step` the others wait for rank 0's samples, in `any_rank` for its guards and its log, and
    in a checkpoint all wait for the slowest, or with async_checkpoints for its copy alone.
    """

    policy: TrainedPolicy

    def step(self, step: int) -> dict[str, float]:
        """Run step `step`, counted from 1; return its metrics, equal on all ranks. Collective."""

    def score(self, metrics: dict[str, float]) -> float:
        """Return the score of a step's policy from the step's metrics; higher is better."""

    def state(self) -> dict[str, Any]:
        """Return the state that is saved beside the policy, as JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""


class NotFiniteError(UserError):
    """A NaN or infinite loss or gradient; the message names the step's samples."""


class GuardStopped(UserError):
    """A stop by a guard, after a checkpoint: its metric stayed beyond its threshold."""


class StageStopped(Exception):
    """A stop by a signal of the launcher or Slurm, after a checkpoint."""


def train(
    stage: TrainingStage, job: StageJob, loop: LoopSettings, watch: GuardMonitor | None = None
) -> None:
    """Run a stage from its newest complete checkpoint, or its parent, to its last step. Collective.

    The main rank's `watch` may end it earlier as done.

    Raises:
        GuardStopped: `watch` stopped the stage.
        NotFiniteError: a metric is not finite; the step is not saved.
        StageStopped: a rank received a signal.
    """
    directory = job.files.checkpoints
    with phase("load"):
        resumed = _load(stage, job, directory)
    start = resumed["step"]
    steps = start if ENDED in resumed else loop.steps
    saver = Saver(directory, loop.keep_last, loop.keep_best, loop.async_checkpoints)
    log = None
    if is_main():
        keep_steps(job.files.metrics, start)  # later steps run again
        log = MetricsLog(job, loop.steps)
    with nullcontext() if log is None else closing(log):
        _run_steps(stage, job, loop, watch, saver, log, range(start + 1, steps + 1))


def _run_steps(
    stage: TrainingStage,
    job: StageJob,
    loop: LoopSettings,
    watch: GuardMonitor | None,
    saver: Saver,
    log: MetricsLog | None,
    steps: range,
) -> None:
    """Run the steps; only the main rank has a log. Collective; raises as `train`."""
    received = []  # SIGTERM, from the launcher, or SIGUSR1, which srun passes on
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: received.append(True))
    for step in steps:
        with phase("step", step=step):
            metrics = stage.step(step)
        verdict = watch.observe(step, metrics) if watch is not None and is_main() else StepVerdict()
        if log is not None:
            with phase("log"):
                log.write(step, {**metrics, **verdict.metrics})
        # A signal or a guard of one rank stops all: the others would wait in their next collective.
        stopping, writing, stopped, ended = any_rank(
            bool(received), saver.writing, verdict.stop is not None, verdict.end is not None
        )
        # `finish` is collective: all ranks call it once none still writes, or before they raise.
        finite = all(math.isfinite(value) for value in metrics.values())
        if not (writing and finite):
            with phase("finish checkpoint"):
                saver.finish()
        if not finite:
            values = {name: value for name, value in metrics.items() if not math.isfinite(value)}
            rollouts = samples_file(job.files.rollouts, step)
            samples = f" (samples: {rollouts})" if rollouts.exists() else ""
            raise NotFiniteError(
                f"non-finite metrics at step {step} of {job.stage}{samples}: {values};"
                " the step was not saved"
            )
        last = ended or step == loop.steps
        if stopping or stopped or last or step % loop.checkpoint_every == 0:
            state = stage.state() | ({ENDED: verdict.end} if verdict.end else {})
            with phase("checkpoint"):
                saver.begin(stage.policy, step, state, stage.score(metrics))
            if log is not None:
                log.saved(step)
        if stopped:
            saver.finish()
            raise GuardStopped(broadcast(verdict.stop))
        if last:
            break
        if stopping:
            saver.finish()
            raise StageStopped(f"{job.stage} saved step {step} and stopped")
    saver.finish()


def _load(stage: TrainingStage, job: StageJob, directory: Path) -> dict[str, Any]:
    """Load the weights to start from; return the saved state, `step` being the last one done."""
    saved, errors = load.newest_intact(directory)
    if errors and is_main():
        origin = saved.name if saved else job.parent or "the beginning"
        report_notice(f"{'; '.join(errors)}; {job.stage} continues from {origin}")
    if saved:
        state = load.training_state(stage.policy, saved)
        try:
            stage.restore(state)
        except KeyError as error:
            raise CheckpointError(
                f"{saved}: another version of Braid wrote it: {STATE} has no {error}; resume with "
                f"that version, or rerun the stage: braid resume {job.directory.parents[1]} "
                f"--from {job.stage}"
            ) from error
        return state
    if job.parent is not None:
        load.weights(stage.policy, job.parent)
    else:
        stage.policy.start_fresh(job.settings.seed)
    return {"step": 0}
