"""Accuracy of several checkpoints on every domain's held-out problems, with 95 % intervals."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel import batch, checkpoints
from parallel.distributed import broadcast, is_main
from parallel.policy import Policy, data_rank
from parallel.sample import Sample
from stages.domains.problem import Problem
from stages.domains.prompts import held_out_problems
from stages.domains.rewards import Reward, load_reward
from stages.metrics import MetricsLog
from stages.rollout import Rollouts, add_old_logprobs
from stages.settings import SamplingSettings, StageJob
from stages.statistics import wilson

PROBLEMS_A_CALL = 500  # small enough for progress, large enough to fill the engine
CHECKED_SAMPLES, CHECKED_TOKENS = 64, 4096


def run(job: StageJob) -> None:
    """Evaluate every model of the job that has no result yet, then write results.json."""
    evaluation = Evaluation(job)
    for version, (name, checkpoint) in enumerate(job.models.items(), start=1):
        if not evaluation.result_file(name).exists():
            evaluation.evaluate(name, checkpoint, version)
        broadcast(None)
    if is_main():
        results = {
            name: json.loads(evaluation.result_file(name).read_text()) for name in job.models
        }
        _write(job.directory / "results.json", {"models": results})


class Evaluation:
    """One policy and one engine, given each checkpoint's weights in turn."""

    def __init__(self, job: StageJob) -> None:
        self.job = job
        self.settings = job.settings.evaluation
        self.policy = Policy(job.settings.model)
        self.rollouts = Rollouts(job)
        self.problems: dict[str, list[Problem]] = {}
        self.rewards: dict[str, Reward] = {}
        total = self.settings.problems * len(job.settings.experts) * len(job.models)
        if is_main():
            self.log = MetricsLog(job, total, start=total)
            measured = sum(self.result_file(name).exists() for name in job.models)
            self.answered = measured * self.settings.problems * len(job.settings.experts)
            for domain, settings in job.settings.experts.items():
                self.problems[domain] = held_out_problems(
                    settings.prompts, domain, self.settings.problems
                )
                self.rewards[domain] = load_reward(domain, settings.reward)

    def result_file(self, name: str) -> Path:
        """Where a model's accuracies stand once all of them are measured."""
        return self.job.directory / "models" / f"{name}.json"

    def evaluate(self, name: str, checkpoint: Path, version: int) -> None:
        """Measure one checkpoint on every domain. Collective."""
        checkpoints.load_weights(self.policy, checkpoint)
        self.rollouts.refit(self.policy, version)
        self._check_engine()
        if is_main():
            result = {domain: self._accuracy(name, domain) for domain in self.problems}
            _write(self.result_file(name), result)

    def _check_engine(self) -> None:
        """Hold the engine to the checkpoint's own log-probabilities on a first batch."""
        samples: list[Sample] = []
        if is_main():
            domain, problems = next(iter(self.problems.items()))
            first = {domain: problems[:CHECKED_SAMPLES]}
            samples = self.rollouts.sample(first, self._sampling(domain, 1.0), "check")
        samples = broadcast(samples)
        batches = batch.split(samples, *data_rank(), CHECKED_TOKENS, replay=True)
        add_old_logprobs(self.policy, batches, 1.0, self.job.settings.engine.max_logprob_difference)

    def _accuracy(self, name: str, domain: str) -> dict[str, Any]:
        """Main rank only: one sample a problem, the same seeds for every model."""
        problems = self.problems[domain]
        sampling = self._sampling(domain, self.settings.temperature)
        correct = 0
        for start in range(0, len(problems), PROBLEMS_A_CALL):
            asked = problems[start : start + PROBLEMS_A_CALL]
            purpose = f"{self.settings.sampling_seed}/{start}"
            samples = self.rollouts.sample({domain: asked}, sampling, purpose)
            self.rollouts.grade(samples, asked, self.rewards[domain])
            correct += sum(sample.reward == 1.0 for sample in samples)
            self.answered += len(asked)
            accuracy = correct / (start + len(asked))
            self.log.write(self.answered, {"accuracy": accuracy}, model=name, domain=domain)
        return asdict(wilson(correct, len(problems)))

    def _sampling(self, domain: str, temperature: float) -> SamplingSettings:
        limit = self.job.settings.experts[domain].sampling.max_response_tokens
        return SamplingSettings.model_construct(
            group_size=1, temperature=temperature, max_response_tokens=limit
        )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content, indent=2))
    unfinished.rename(path)
