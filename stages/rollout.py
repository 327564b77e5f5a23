"""Rollouts of a stage: refit the engine, sample, and hold both to the same log-probabilities."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

from parallel.batch import MicroBatch
from parallel.distributed import broadcast, is_main, max_over_ranks, sum_over_data
from parallel.policy import Policy
from parallel.rollout.client import EngineClient, prompts_of
from parallel.rollout.wire import Generate
from parallel.sample import Sample
from stages.domains.problem import DomainError, Problem
from stages.domains.rewards import Reward, grade
from stages.settings import SamplingSettings, StageJob
from stages.tokenizer import CharacterTokenizer


class MismatchError(RuntimeError):
    """The engine and the trainer disagree about the same tokens under the same weights."""


class Rollouts:
    """The stage's link to the engine. The main rank holds it; the methods are collective."""

    def __init__(self, job: StageJob) -> None:
        self.job = job
        self.tokenizer = CharacterTokenizer()
        self._client: EngineClient | None = None

    @property
    def client(self) -> EngineClient:
        """Connected on first use, so that the engine and the ranks can start side by side."""
        if self._client is None:
            assert self.job.engine_address is not None
            self._client = EngineClient(self.job.engine_address, self.job.settings.engine)
        return self._client

    def refit(self, policy: Policy, version: int) -> None:
        """Bring the policy's weights to the engine."""
        if is_main():
            self.client.refit(policy.weights(), version)
        else:
            for _ in policy.weights():  # every rank takes part in the gathering
                pass
        broadcast(None)

    def sample(
        self, problems: dict[str, list[Problem]], sampling: SamplingSettings, purpose: str
    ) -> list[Sample]:
        """`group_size` responses to every problem, domain by domain. Main rank only.

        Raises DomainError when a prompt leaves no room for a response.
        """
        samples = []
        for domain, asked in problems.items():
            request = Generate(
                prompts=prompts_of(
                    [self._encode(problem, sampling) for problem in asked],
                    sampling.group_size,
                    _seed(self.job.settings.seed, self.job.stage, domain, purpose),
                ),
                temperature=sampling.temperature,
                max_tokens=sampling.max_response_tokens,
                end_token=self.tokenizer.end_id,
            )
            samples += self.client.generate(domain, request)
        return samples

    def _encode(self, problem: Problem, sampling: SamplingSettings) -> list[int]:
        tokens = self.tokenizer.encode(problem.prompt)
        limit = self.job.settings.engine.max_model_tokens
        if len(tokens) + sampling.max_response_tokens > limit:
            raise DomainError(
                problem.domain,
                "sampling.max_response_tokens",
                f"{sampling.max_response_tokens} and the {len(tokens)} tokens of the prompt"
                f" {problem.prompt!r} exceed engine.max_model_tokens = {limit}",
            )
        return tokens

    def grade(self, samples: list[Sample], problems: list[Problem], reward: Reward) -> None:
        """Add each sample's reward; `problems` holds one problem for every group of samples."""
        group = len(samples) // len(problems)
        for index, sample in enumerate(samples):
            text = self.tokenizer.decode(sample.response)
            sample.reward = grade(reward, problems[index // group], text, sample.finished)

    def record(self, samples: list[Sample], step: int) -> None:
        """Write the step's rollouts as JSON lines. Main rank only."""
        path = self.job.directory / "rollouts" / f"step_{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        decode = self.tokenizer.decode
        with path.open("w") as file:
            for sample in samples:
                line = {
                    "domain": sample.domain,
                    "prompt": decode(sample.prompt),
                    "response": decode(sample.response),
                    "reward": sample.reward,
                    "advantage": sample.advantage,
                    "finished": sample.finished,
                    "weight_version": sample.weight_version,
                }
                file.write(json.dumps(line) + "\n")


def add_old_logprobs(
    policy: Policy, batches: list[MicroBatch], temperature: float, bound: float
) -> dict[str, float]:
    """Recompute log pi_old for every batch and hold it against the engine's mu. Collective.

    Returns the mismatch metrics (section 4 of the algorithms).
    Raises MismatchError when any token differs by more than `bound` nats.
    """
    largest = total = high = tokens = 0.0
    for batch, logprobs in zip(batches, policy.target_logprobs(batches, temperature), strict=True):
        batch.old_logprobs = logprobs
        difference = (batch.engine_logprobs - logprobs).masked_fill(~batch.mask, 0.0).abs()
        largest = max(largest, difference.max().item())
        total += difference.sum().item()
        high += (difference > LOG_TWO).sum().item()
        tokens += batch.mask.sum().item()
    largest = max_over_ranks(largest)
    sums = sum_over_data({"total": total, "high": high, "tokens": tokens})
    if not largest <= bound:
        raise MismatchError(
            f"after a refit the engine's log-probabilities differ from the trainer's by up to "
            f"{largest:.3g} nats; engine.max_logprob_difference allows {bound:g}"
        )
    return {
        "mismatch_max": largest,
        "mismatch_mean": sums["total"] / sums["tokens"],
        "high_ratio": sums["high"] / sums["tokens"],
    }


LOG_TWO = 0.6931471805599453


@contextmanager
def stopwatch(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds a block took to `metrics`."""
    start = time.perf_counter()
    yield
    metrics[name] = metrics.get(name, 0.0) + time.perf_counter() - start


def _seed(*parts: object) -> int:
    """A seed below 2^62 that no other purpose shares."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8]) >> 2
