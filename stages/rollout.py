"""A stage's rollouts: bring the weights to the engine, sample, grade, and keep what was drawn."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

from parallel.distributed import barrier, is_main
from parallel.files import write_atomically
from parallel.policy import Policy
from parallel.rollout.client import EngineClient, prompts_of
from parallel.rollout.wire import Generate
from parallel.sample import Sample
from parallel.settings import END_TOKEN
from stages.domains.problem import DomainError, Problem
from stages.domains.rewards import Reward, grade
from stages.settings import SamplingSettings, StageJob
from stages.tokenizer import CharacterTokenizer


class Rollouts:
    """The stage's link to the engine, held by the main rank; only `refit` is collective."""

    def __init__(self, job: StageJob) -> None:
        self.job = job
        self.tokenizer = CharacterTokenizer()
        self._client: EngineClient | None = None

    @property
    def client(self) -> EngineClient:
        """Connected on first use, so that the engine and the ranks can start side by side."""
        if self._client is None:
            address = self.job.engine_addresses[0]
            self._client = EngineClient(address, self.job.settings.engine)
        return self._client

    def refit(self, policy: Policy, version: int) -> None:
        """Bring the policy's weights to the engine. Collective."""
        if is_main():
            self.client.refit(policy.weights(), version)
        else:
            for _ in policy.weights():  # every rank takes part in the gathering
                pass
        barrier()

    def sample(
        self, domain: str, problems: list[Problem], sampling: SamplingSettings, purpose: str
    ) -> list[Sample]:
        """`group_size` responses to every problem, in order, drawn with seeds of `purpose`.

        Raises DomainError when a prompt leaves no room for a response.
        """
        prompts = prompts_of(
            [self._encode(problem, sampling) for problem in problems],
            sampling.group_size,
            _seed(self.job.settings.seed, self.job.stage, domain, purpose),
        )
        limit = sampling.max_response_tokens
        request = Generate(prompts, sampling.temperature, limit, END_TOKEN)
        return self.client.generate(domain, request)

    def grade(self, samples: list[Sample], problems: list[Problem], reward: Reward) -> None:
        """Add each sample's reward; `problems` holds one problem for every group of samples."""
        group = len(samples) // len(problems)
        for index, sample in enumerate(samples):
            text = self.tokenizer.decode(sample.response)
            sample.reward = grade(reward, problems[index // group], text, sample.finished)

    def record(self, samples: list[Sample], step: int) -> None:
        """Write the step's samples as JSON lines: tokens to replay them, and text to read."""
        decode = self.tokenizer.decode
        lines = [
            {
                "domain": sample.domain,
                "prompt": decode(sample.prompt),
                "response": decode(sample.response),
                "reward": sample.reward,
                "advantage": sample.advantage,
                "finished": sample.finished,
                "weight_version": sample.weight_version,
                "prompt_tokens": sample.prompt.tolist(),
                "response_tokens": sample.response.tolist(),
                "logprobs": [] if sample.logprobs is None else sample.logprobs.tolist(),
            }
            for sample in samples
        ]
        path = self.job.directory / "rollouts" / f"step_{step:06d}.jsonl"
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))

    def _encode(self, problem: Problem, sampling: SamplingSettings) -> list[int]:
        tokens = self.tokenizer.encode(problem.prompt)
        limit = self.job.settings.engine.max_model_tokens
        if len(tokens) + sampling.max_response_tokens > limit:
            raise DomainError(
                problem.domain,
                "prompts.config",
                f"the {len(tokens)} tokens of {problem.prompt!r} leave no room for"
                f" {sampling.max_response_tokens} tokens of response within"
                f" engine.max_model_tokens = {limit}",
            )
        return tokens


@contextmanager
def stopwatch(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the time a block took to `seconds`."""
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def _seed(*parts: object) -> int:
    """A seed below 2^62 that no other purpose shares."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8]) >> 2
