"""How sampling and training take turns: in turn, one step ahead, or all the time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from parallel import batch
from parallel.distributed import is_main
from parallel.packing import RankPlace
from stages.objectives.groups import Group
from stages.sampling.engines import stopwatch
from stages.sampling.logprob_check import MismatchError, measure_mismatch
from stages.sampling.prompt_buffer import Collection

if TYPE_CHECKING:
    from stages.sampling.step import OnPolicyStage, Prepared, Rollout

ATTEMPTS = 2
PROBES_AN_ENGINE, PROBE_TOKENS = 4, 8  # responses that show whether a refit was right


@dataclass
class Drawn:
    """One step's samples on every rank, and what this rank has made of them."""

    rollout: Rollout
    prepared: Prepared
    metrics: dict[str, float]


class RolloutMode(ABC):
    """Has a step's samples drawn, and holds engine and trainer to the same log-probabilities.

    The policy's weights at the beginning of step v are version v.
    """

    # Whether a stage that resumes does its steps over as they were, on samples of the same weights,
    # and holds them to the policy. Else the weights are others after its first step.
    repeats: ClassVar[bool] = False

    def __init__(self, stage: OnPolicyStage) -> None:
        self.stage = stage
        self.rollouts = stage.rollouts
        self.bound = stage.job.settings.engine.max_logprob_difference
        # Of the last `collect`; main rank only.
        self.taken: list[Group] = []
        self.waited = False  # whether some of them were not whole when they were asked for

    @abstractmethod
    def draw(self, step: int, seconds: dict[str, float]) -> Drawn:
        """The samples to train on in this step. Collective.

        Raises MismatchError when engine and trainer disagree twice. Once may be rounding: among a
        million tokens a few are so ill-conditioned that fp32 cannot tell them better. A wrong refit
        is wrong again.
        """

    def begin(self, batches: int, *, old: bool) -> int:
        """Have so many steps' prompts under way; returns how many are new, on the main rank.

        Never more than steps have room for before they are too old: as many as `max_staleness`, and
        one more unless they are `old`, which is to say a step behind when the first is trained on.
        """
        if not is_main():
            return 0
        per_step, settings = self.stage.sampling.prompts_per_step, self.stage.settings
        steps = settings.max_staleness + (not old)
        count = min(math.ceil(batches * per_step * settings.oversampling), steps * per_step)
        return self.stage.backlog.begin(dict.fromkeys(self.stage.backlog.domains, count))

    def collect(self, step: int, seconds: dict[str, float]) -> Rollout:
        """Wait for the step's batch; on every rank. Collective."""
        collection = (
            Collection(self.stage.backlog, self.stage.settings, step, self.stage.is_flat)
            if is_main()
            else None
        )

        def ready() -> Rollout | None:
            assert collection is not None
            found = collection.batch()
            if found is None:
                self.waited = True
                return None
            self.taken = found.groups
            return self.stage.compose(found, step)

        self.waited = False
        with stopwatch(seconds, "seconds_wait"):
            return self.rollouts.wait(ready, step)

    def refit(self, step: int, seconds: dict[str, float]) -> dict[str, float]:
        """Bring the engines the weights that the step begins with. Collective."""
        with stopwatch(seconds, "seconds_refit"):
            return self.rollouts.refit(step)

    def probe(self, step: int, seconds: dict[str, float]) -> dict[str, float]:
        """Refit, and hold a few responses of every engine to the trainer's log-probabilities.
        Collective."""
        for attempt in range(ATTEMPTS):
            measured = self.refit(step, seconds)
            with stopwatch(seconds, "seconds_rollout"):
                groups: list[Group] = []
                if is_main():
                    count = PROBES_AN_ENGINE * len(self.rollouts.fleet.live())
                    purpose = f"probe {step}, attempt {attempt}"
                    groups = self.stage.backlog.probes(count, purpose, PROBE_TOKENS)
                samples = self.rollouts.whole(groups, step)
            with stopwatch(seconds, "seconds_train"):
                budget = self.stage.loop.micro_batch_tokens
                parts = batch.split(samples, RankPlace.here(), budget, self.stage.replay)
                temperature = self.stage.sampling.temperature
                mismatch = measure_mismatch(self.stage.policy, parts, temperature)
            if mismatch["mismatch_max"] <= self.bound:
                return {**measured, **mismatch}
        raise MismatchError(mismatch["mismatch_max"], self.bound)

    def drawn_before(
        self, rollout: Rollout, step: int, measured: dict[str, float], seconds: dict[str, float]
    ) -> Drawn:
        """Samples of older weights: what they differ by from the policy is drift, not mismatch."""
        with stopwatch(seconds, "seconds_train"):
            prepared = self.stage.prepare(rollout, step)
        differences = prepared.differences.items()
        drift = {f"drift_{name.removeprefix('mismatch_')}": value for name, value in differences}
        return Drawn(rollout, prepared, {**measured, **drift})


class InTurn(RolloutMode):
    """Refit, sample, train. The batch itself shows whether the refit was right, and whether what
    the log has of it was drawn by the policy."""

    repeats = True

    def draw(self, step: int, seconds: dict[str, float]) -> Drawn:
        attempt, attempts = 0, ATTEMPTS
        while attempt < attempts:
            measured = self.refit(step, seconds)
            with stopwatch(seconds, "seconds_rollout"):
                if attempt == 0:
                    self.begin(batches=1, old=False)
                elif is_main():
                    self.stage.backlog.again(self.taken, attempt)
                rollout = self.collect(step, seconds)
            with stopwatch(seconds, "seconds_train"):
                prepared = self.stage.prepare(rollout, step)
            mismatch = prepared.differences
            if mismatch["mismatch_max"] <= self.bound:
                self.rollouts.drawn(step)
                return Drawn(rollout, prepared, {**measured, **mismatch})
            # What came from the log says nothing of this refit: that was not an attempt at it.
            attempts += self.rollouts.forget(step)
            attempt += 1
        raise MismatchError(mismatch["mismatch_max"], self.bound)


class OneAhead(RolloutMode):
    """While a step trains, the next one's samples are drawn with the weights it began with."""

    def draw(self, step: int, seconds: dict[str, float]) -> Drawn:
        if self.rollouts.version is None:
            self.refit(step, seconds)
        with stopwatch(seconds, "seconds_rollout"):
            self.begin(batches=1, old=step > 1)
            rollout = self.collect(step, seconds)
        measured = self.probe(step, seconds)
        self.begin(batches=min(1, self.stage.loop.steps - step), old=True)
        return self.drawn_before(rollout, step, measured, seconds)


class Continuous(RolloutMode):
    """Samples are always under way and go on under new weights.

    `ahead` steps' worth of them at most, and where the engines keep up with the trainer no more
    than one: what is drawn early only waits and grows old.
    """

    def __init__(self, stage: OnPolicyStage, ahead: int) -> None:
        super().__init__(stage)
        self.ahead = ahead

    def draw(self, step: int, seconds: dict[str, float]) -> Drawn:
        measured = self.probe(step, seconds)
        with stopwatch(seconds, "seconds_rollout"):
            new = self.begin(batches=1, old=False)
            rollout = self.collect(step, seconds)
        late = self.waited and not new
        ahead = self.ahead if late else min(1, self.ahead)
        self.begin(batches=min(ahead, self.stage.loop.steps - step), old=True)
        return self.drawn_before(rollout, step, measured, seconds)


def mode_of(stage: OnPolicyStage) -> RolloutMode:
    """The mode that the stage's settings name."""
    settings = stage.settings
    if settings.mode == "overlap":
        return OneAhead(stage)
    if settings.mode == "async":
        return Continuous(stage, ahead=settings.max_staleness)
    if settings.oversampling > 1:  # what is not taken is left for the next step
        return Continuous(stage, ahead=0)
    return InTurn(stage)
