"""A prompt is trained on however long its responses take, in every mode.

Real buffers, collections and prefetching, in simulated time: a step of training takes 1, a group of
responses as long as its prompt says.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from parallel.sample import Sample
from stages.domains import RolloutSettings, SamplingSettings
from stages.objectives.groups import Group
from stages.sampling.prompt_buffer import Prefetcher, PromptBuffer
from stages.settings import RunSettings, StageJob
from tests.fake_engines import toy_domain
from tests.stages.toys import FakeEngines

STEPS, PROMPTS = 150, 16
SLOW = 10  # every so manieth prompt


class GradedPrompt:
    """Rewards that grade whatever is whole at once, and every sample of a group differently."""

    def expect(self, groups: list[Group]) -> None:
        pass

    def graded(self, group: Group) -> bool:
        for number, sample in enumerate(group.samples):
            sample.reward = float(number)
        return True

    def check_failures(self, failures: list[str], samples: int) -> None:
        pass


class Simulation:
    """A stage's steps, without a policy."""

    def __init__(self, short: float, long: float, settings: RolloutSettings) -> None:
        self.durations = (short, long)
        self.settings = settings
        self.now = 0.0
        self.ends: list[tuple[float, Group]] = []
        self.engines = FakeEngines()
        self.engines.rewards = GradedPrompt()
        sampling = SamplingSettings(prompts_per_step=PROMPTS, group_size=2)
        job = StageJob.model_construct(
            stage="experts.sums", directory=Path(), settings=RunSettings.model_construct(seed=0)
        )
        with mock.patch.object(RunSettings, "longest_prompt", lambda *_: 40):
            buffer = PromptBuffer(job, {"sums": toy_domain()}, sampling, self.engines)  # type: ignore[arg-type]
        self.prefetcher = Prefetcher(buffer, settings, STEPS)
        self.drawn: list[Group] = []
        self.trained: list[Group] = []
        self.dropped = 0

    def run(self) -> None:
        """Run all steps in the order of `OnPolicyStage._step`."""
        for step in range(1, STEPS + 1):
            if not self.settings.collects_before_sync or step == 1:
                self.engines.version = step
            self.prefetcher.start(step)
            self.note()
            while (batch := self.prefetcher.collect()) is None:
                self.note()
                self.wait()
            self.note()
            self.trained += batch.groups
            self.dropped += batch.too_old
            self.engines.version = step
            self.prefetcher.prefetch(step)
            self.note()
            self.now += 1
            self.end()

    def note(self) -> None:
        """See to it that what was asked for ends in its time."""
        for group in self.engines.asked:
            slow = group.problem.index % SLOW == 0
            self.drawn.append(group)
            self.ends.append((self.now + self.durations[slow], group))
        self.engines.asked = []

    def wait(self) -> None:
        """Until the next group is whole."""
        self.now = max(self.now, min(end for end, _ in self.ends))
        self.end()

    def end(self) -> None:
        for end, group in sorted(self.ends, key=lambda each: each[0]):
            if end <= self.now:
                self.ends.remove((end, group))
                self.engines.asked = [group]
                group.slots = [sample(group) for _ in group.slots]
                group.ended, self.engines.ended = self.engines.ended, self.engines.ended + 1
        self.engines.asked = []


def sample(group: Group) -> Sample:
    import numpy as np

    one = np.ones(1, np.int32)
    return Sample("sums", one, one, versions=np.array([group.dispatch_version], np.int32))


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
def test_slow_prompts_are_trained_on_as_often_as_they_are_sampled(
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


def test_the_first_step_of_one_ahead_is_oversampled_as_any_other() -> None:
    """It is collected from weights that it also starts with, so it may draw for a later step."""
    simulated = Simulation(0, 0, RolloutSettings(max_steps_ahead=1, oversampling=1.5))
    simulated.prefetcher.start(1)
    simulated.note()
    assert len(simulated.drawn) == 1.5 * PROMPTS


def test_no_more_than_a_step_is_prefetched_once_the_engines_keep_up_again() -> None:
    simulated = Simulation(0, 0, RolloutSettings(max_steps_ahead=3))
    prefetcher, requested = simulated.prefetcher, []
    for step, late in ((1, False), (2, True), (3, False), (4, False), (5, False)):
        simulated.engines.version = step
        prefetcher.start(step)
        if late:
            assert prefetcher.collect() is None
        simulated.note()
        simulated.end()
        assert prefetcher.collect() is not None
        before = len(simulated.drawn)
        prefetcher.prefetch(step)
        simulated.note()
        requested.append(len(simulated.drawn) - before)
    # Step 2 is late: three steps are in flight after it, which last until step 5.
    assert requested == [PROMPTS, 3 * PROMPTS, 0, 0, PROMPTS]
