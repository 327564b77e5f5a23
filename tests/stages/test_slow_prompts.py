"""Whether a prompt is trained on does not depend on how long its responses take, in any mode.

Real backlogs, collections and modes, in simulated time: a step of training takes 1, a group of
responses as long as its prompt says.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from parallel.sample import Sample
from stages.objectives.groups import Group
from stages.sampling.prompt_buffer import Backlog, Collection
from stages.sampling.rollout_modes import Continuous, OneAhead, RolloutMode
from stages.settings import RolloutSettings, RunSettings, SamplingSettings, StageJob
from tests.fake_engines import toy_domain
from tests.stages.toys import FakeRollouts

STEPS, PROMPTS = 150, 16
SLOW = 10  # every so manieth prompt


class GradedPrompt:
    """Stands for scoring: whatever is whole has earned something, unlike within a group."""

    def __init__(self, *_: Any) -> None:
        pass

    def expect(self, groups: list[Group]) -> None:
        pass

    def done(self, group: Group) -> bool:
        for number, sample in enumerate(group.samples):
            sample.reward = float(number)
        return True

    def hold_to_limit(self, failures: list[str], samples: int) -> None:
        pass


class Simulation:
    """A stage's steps, without a policy."""

    def __init__(self, short: float, long: float, settings: RolloutSettings) -> None:
        self.durations = (short, long)
        self.settings = settings
        self.now = 0.0
        self.ends: list[tuple[float, Group]] = []
        self.rollouts = FakeRollouts()
        sampling = SamplingSettings(prompts_per_step=PROMPTS, group_size=2)
        job = StageJob.model_construct(
            stage="experts.sums", directory=Path(), settings=RunSettings.model_construct(seed=0)
        )
        with (
            mock.patch("stages.sampling.prompt_buffer.Scoring", GradedPrompt),
            mock.patch.object(RunSettings, "longest_prompt", lambda *_: 40),
        ):
            self.backlog = Backlog(job, {"sums": toy_domain()}, sampling, self.rollouts)  # type: ignore[arg-type]
        stage: Any = SimpleNamespace(
            job=SimpleNamespace(settings=SimpleNamespace(engine=mock.Mock())),
            loop=SimpleNamespace(steps=STEPS),
            rollouts=self.rollouts,
            backlog=self.backlog,
            sampling=sampling,
            settings=settings,
        )
        self.mode: RolloutMode
        if settings.mode == "overlap":
            self.mode = OneAhead(stage)
        else:
            self.mode = Continuous(
                stage, ahead=settings.max_staleness if settings.mode == "async" else 0
            )
        self.drawn: list[Group] = []
        self.trained: list[Group] = []
        self.dropped = 0

    def run(self) -> None:
        """In the order of the modes' `draw`."""
        for step in range(1, STEPS + 1):
            overlaps = isinstance(self.mode, OneAhead)
            if not overlaps or step == 1:
                self.rollouts.version = step
            new = self.begin(batches=1, old=overlaps and step > 1)
            collection = Collection(self.backlog, self.settings, step)
            waited = False
            while (batch := collection.batch()) is None:
                self.note()
                waited = True
                self.wait()
            self.note()
            self.trained += batch.groups
            self.dropped += batch.too_old
            self.rollouts.version = step
            ahead = 1
            if isinstance(self.mode, Continuous):
                late = waited and not new
                ahead = self.mode.ahead if late else min(1, self.mode.ahead)
            self.begin(batches=ahead, old=True)
            self.now += 1
            self.end()

    def begin(self, **how: Any) -> int:
        with mock.patch("stages.sampling.rollout_modes.is_main", lambda: True):
            new = self.mode.begin(**how)
        self.note()
        return new

    def note(self) -> None:
        """See to it that what was asked for ends in its time."""
        for group in self.rollouts.asked:
            slow = group.problem.index % SLOW == 0
            self.drawn.append(group)
            self.ends.append((self.now + self.durations[slow], group))
        self.rollouts.asked = []

    def wait(self) -> None:
        """Until the next group is whole."""
        self.now = max(self.now, min(end for end, _ in self.ends))
        self.end()

    def end(self) -> None:
        for end, group in sorted(self.ends, key=lambda each: each[0]):
            if end <= self.now:
                self.ends.remove((end, group))
                self.rollouts.asked = [group]
                group.drawn = [sample(group) for _ in group.drawn]
                group.ended, self.rollouts.ended = self.rollouts.ended, self.rollouts.ended + 1
        self.rollouts.asked = []


def sample(group: Group) -> Sample:
    import numpy as np

    one = np.ones(1, np.int32)
    return Sample("sums", one, one, versions=np.array([group.begun], np.int32))


def share_of_slow(groups: list[Group]) -> float:
    return sum(group.problem.index % SLOW == 0 for group in groups) / len(groups)


@pytest.mark.parametrize(
    ("mode", "staleness", "oversampling", "short", "long"),
    [
        ("async", 2, 1.0, 1.5, 4),
        ("async", 2, 1.0, 1.5, 8),
        ("async", 4, 1.0, 3, 12),
        ("async", 2, 1.25, 1.5, 8),
        ("async", 1, 1.0, 1.5, 8),
        ("sync", 1, 1.25, 0.6, 2.5),
        ("sync", 1, 1.5, 1.5, 4),
        ("sync", 1, 1.5, 1.5, 8),
        ("sync", 3, 3.0, 1.5, 8),
        ("overlap", 1, 1.5, 1.5, 8),
        ("overlap", 2, 1.5, 0.5, 8),
    ],
)
def test_slow_prompts_are_trained_on_as_often_as_they_are_drawn(
    mode: str, staleness: int, oversampling: float, short: float, long: float
) -> None:
    settings = RolloutSettings.model_validate(
        {"mode": mode, "max_staleness": staleness, "oversampling": oversampling}
    )
    simulated = Simulation(short, long, settings)
    simulated.run()
    assert simulated.dropped == 0
    assert len(simulated.trained) == STEPS * PROMPTS
    left = len(simulated.drawn) - len(simulated.trained)
    assert left <= (staleness + 1) * PROMPTS
    begun = simulated.drawn[: len(simulated.trained)]
    assert abs(share_of_slow(simulated.trained) - share_of_slow(begun)) < 0.01
