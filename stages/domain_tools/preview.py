"""The preview of a domain: the rewards of a checkpoint's responses, before any training."""

from __future__ import annotations

import json

from parallel.checkpoint import load
from parallel.distributed import is_main
from parallel.files import write_atomically
from parallel.mismatch import bounds_of
from parallel.model.policy import Policy
from parallel.sample import Sample
from stages.data.problem import seed_of
from stages.data.prompts import PromptStream
from stages.domains import DomainSettings
from stages.objectives.groups import Group, groups_of, is_right
from stages.sampling.engines import StageEngines
from stages.sampling.logprob_check import check_samples
from stages.settings import StageJob


def run(job: StageJob) -> None:
    """Sample a step of `job.domain` from the checkpoint `job.parent`, as its expert would.

    Writes every sample's reward to results.json.
    """
    name = job.domain
    assert name is not None and job.parent is not None
    domain = job.settings.domains[name]
    sampling, seed = domain.sampling, job.settings.seed
    policy = Policy(job.settings.model, job.settings.layout)
    engines = StageEngines(job, policy, {name: domain})
    load.weights(policy, job.parent)
    groups: list[Group] = []  # of the last attempt; main rank only

    def graded() -> list[Sample] | None:
        if not all(engines.rewards.graded(group) for group in groups):
            return None
        return [sample for group in groups for sample in group.samples]

    def draw(attempt: int) -> list[Sample]:
        # A repeated attempt samples from the weights that are already there.
        if engines.version is None:
            engines.sync_weights(version=1)
        if is_main():
            stream = PromptStream(
                domain.prompts,
                engines.tokenizer,
                name,
                seed,
                job.stage,
                longest=job.settings.longest_prompt(sampling),
            )
            problems = stream.take(sampling.prompts_per_step)
            again = (f"attempt {attempt}",) if attempt else ()
            first_seed = seed_of(seed, job.stage, name, *again)
            groups[:] = groups_of(problems, sampling.group_size, first_seed)
            engines.rewards.expect(groups)
            engines.request(groups, sampling)
        samples = engines.wait(graded, version=1)
        engines.sleep()
        return samples

    bounds = bounds_of(job.settings.model, job.settings.engine)
    budget, replay = domain.loop.micro_batch_tokens, domain.routing.replay == "r3"
    check_samples(policy, draw, sampling.temperature, bounds, budget, replay)
    engines.close()
    if is_main():
        _write(job, domain, groups, engines)


def _write(
    job: StageJob, domain: DomainSettings, groups: list[Group], engines: StageEngines
) -> None:
    """Write every group's samples; the reward of one whose reward failed is null."""
    samples = [
        [
            {
                "prompt": group.problem.prompt,
                "response": engines.tokenizer.decode(sample.response),
                "reward": sample.reward,
                "parts": sample.reward_parts,
                "solved": sample.reward is not None and is_right(sample, domain.rewards),
                "finished": sample.finished,
                "tokens": len(sample.response),
            }
            for sample in group.samples
        ]
        for group in groups
    ]
    failures = [failure for group in groups for failure in group.failures]
    watch_failures = [failure for group in groups for failure in group.watch_failures]
    report = {"groups": samples, "failures": failures, "watch_failures": watch_failures}
    write_atomically(job.files.results, json.dumps(report) + "\n")
