"""Toy experts, samples and links to the engines that several tests of stages use."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from parallel.checkpoint import load
from parallel.engine.wire import Prompt
from parallel.model.policy import Policy
from parallel.sample import Sample
from parallel.settings import EngineSettings
from stages.data.tokenizer import CharacterTokenizer
from stages.domains import DomainSettings, SamplingSettings
from stages.kinds.grpo.work import GrpoStage
from stages.objectives.domain_objective import DomainObjective
from stages.objectives.groups import Batch, Group
from stages.rewards.reward import RewardPoolSettings
from stages.sampling.engines import RewardDispatcher
from stages.sampling.logprob_check import Mismatch
from stages.sampling.prompt_buffer import Collection, PromptBuffer
from stages.sampling.sample_files import read_samples
from stages.settings import RunSettings, StageJob
from tests.awaiting import PATIENCE_SECONDS
from tests.fake_engines import FakeEngine, RefittedFleet, toy_domain, toy_job, toy_run
from tests.stages.conftest import OPENED


class FakeEngines:
    """A link to engines that records the requested groups; a test ends them."""

    tokenizer = CharacterTokenizer()

    def __init__(
        self, decode: Callable[[np.ndarray], str] = lambda tokens: "x" * len(tokens)
    ) -> None:
        self._decode = decode
        self.asked: list[Group] = []
        self.version = 1
        self.ended = 0
        self.wake = threading.Event()
        self.rewards: Any = None

    def grade(self, job: StageJob, domains: Mapping[str, DomainSettings]) -> None:
        """Start the workers that grade what ends."""
        tokenizer: Any = SimpleNamespace(decode=self._decode)
        rewards = {name: each.rewards for name, each in domains.items()}
        self.rewards = RewardDispatcher(job, rewards, tokenizer, self.wake.set)
        OPENED.append(self.rewards)

    def request(
        self, groups: list[Group], sampling: SamplingSettings, at_once: bool = False
    ) -> None:
        self.asked += groups

    def batch(self, collection: Collection) -> Batch | None:
        """Return what the collection has once all that was requested is graded."""
        while True:
            self.wake.clear()
            more = self.rewards.pending
            found = collection.batch()
            if found is not None or not (more or self.rewards.pending):
                return found
            assert self.wake.wait(PATIENCE_SECONDS)

    def end(self, group: Group, lengths: tuple[int, int] = (1, 2), version: int = 1) -> None:
        for index, length in enumerate(lengths):
            sample = Sample(
                domain=group.problem.domain,
                prompt=np.ones(2, np.int32),
                response=np.ones(length, np.int32),
                versions=np.arange(version, version + length, dtype=np.int32),
            )
            self.rewards.dispatch(group, index, sample)
            group.slots[index] = sample
        group.ended = self.ended
        self.ended += 1
        self.asked.remove(group)

    def end_all(self, **how: Any) -> None:
        for group in list(self.asked):
            self.end(group, **how)


def prompt_buffer(engines: FakeEngines, **blocks: dict[str, Any]) -> PromptBuffer:
    """Return a buffer of domains of short sums, 3 prompts a step and 2 responses to each."""
    common = {
        "prompts": {"dataset": "chain_sum"},
        "optimizer": {"learning_rate": 1.0},
        "loop": {"steps": 5},
    }
    domains = {n: DomainSettings.model_validate({**common, **b}) for n, b in blocks.items()}
    pool = RewardPoolSettings(workers=1, timeout_seconds=1, max_failed_fraction=0.5)
    settings = RunSettings.model_construct(seed=0, rewards=pool)
    job = StageJob.model_construct(stage="experts.sums", directory=Path(), settings=settings)
    engines.grade(job, domains)
    sampling = SamplingSettings(prompts_per_step=3, group_size=2)
    return PromptBuffer(job, domains, sampling, engines)  # type: ignore[arg-type]


def indices(groups: list[Group]) -> list[int]:
    return [group.problem.index for group in groups]


@torch.no_grad()
def start_elsewhere(policy: Policy, _checkpoint: Path, head: bool = True) -> None:
    """Stands for loading a checkpoint."""
    policy.residency.hold()
    weight = policy.chunks[-1].output_layer.weight
    before = weight.clone()
    policy.start_fresh(seed=1)
    if not head:
        weight.copy_(before)
        policy.weights_changed()


@contextmanager
def measuring(*largest: float, share: float = 0.0) -> Iterator[None]:
    """Have the checks of log-probabilities, of 1,000 tokens each, find what is given."""
    left = iter(largest)

    def measured(*_: Any) -> Mismatch:
        metrics = {"mismatch_max": next(left), "mismatch_mean": 0.0, "high_ratio": share}
        return Mismatch(1000, metrics)

    with mock.patch("stages.sampling.logprob_check.measure_mismatch", measured):
        yield
    assert not list(left)


@contextmanager
def faked() -> Iterator[None]:
    """Give stages fake engines, and other weights in place of a checkpoint's."""
    with (
        mock.patch("stages.sampling.engines.Fleet", RefittedFleet),
        mock.patch.object(load, "weights", start_elsewhere),
    ):
        yield


def opened(job: StageJob) -> GrpoStage:
    """Return an expert on fake engines that its test need not close."""
    with faked():
        stage = GrpoStage(job)
    OPENED.append(stage)
    return stage


def expert(
    directory: Path,
    objective: dict[str, Any],
    steps: int = 3,
    updates: int = 2,
    engine: EngineSettings | None = None,
    **given: Any,
) -> GrpoStage:
    domain = toy_domain(
        optimizer={"learning_rate": 1e-2},
        objective=objective,
        updates_per_rollout=updates,
        loop={"steps": steps, "micro_batch_tokens": 256},
        **given,
    )
    settings = toy_run(sums=domain)
    if engine is not None:
        settings = settings.model_copy(update={"engine": engine})
    stage = opened(toy_job(directory, settings, models={"sums": directory}))
    stage.policy.start_fresh(0)
    return stage


def only(stage: GrpoStage) -> DomainObjective:
    """Return the objective that all domains of a stage share."""
    [found] = stage.objectives
    return found


def drawn(lengths: list[int], groups: list[int] | None = None) -> list[Sample]:
    draw = np.random.default_rng(0)
    return [
        Sample(
            domain="sums",
            prompt=np.array([2, 3], np.int32),
            response=draw.integers(2, 70, length).astype(np.int32),
            logprobs=-draw.random(length).astype(np.float32),
            versions=np.full(length, number, np.int32),
            group=groups[number] if groups else 0,
            advantage=1.0 + number,
        )
        for number, length in enumerate(lengths)
    ]


def group(samples: list[Sample], rewards: list[float | None]) -> Group:
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward
    return Group(mock.Mock(), 0, list(samples), ended=0)


def trained(directory: Path) -> list[list[str]]:
    """Return the recorded prompts of every step, one for each sample."""
    files = sorted((directory / "rollouts").glob("step_*.parquet"))
    return [[each["prompt"] for each in read_samples(file)] for file in files]


class Killed(Exception):
    """Stands for the end of the process."""


def after(answers: int) -> Any:
    """Return trouble that kills after N answers."""
    left = [answers]

    def trouble(_: Prompt) -> None:
        if left[0] == 0:
            raise Killed
        left[0] -= 1

    return trouble


def asked(engine: FakeEngine) -> Counter[int]:
    return Counter(prompt.seed for request in engine.requests for prompt in request.prompts)
