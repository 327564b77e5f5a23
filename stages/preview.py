"""What a checkpoint's responses earn in one domain, before anything is trained on them."""

from __future__ import annotations

import json

from parallel import checkpoints
from parallel.distributed import is_main
from parallel.files import write_atomically
from parallel.policy import Policy
from stages.domains.prompts import PromptStream
from stages.domains.rewards.grading import solved
from stages.groups import Group, groups_of, seed_of
from stages.metrics import MetricsLog
from stages.rollout import Rollouts
from stages.scoring import Scoring
from stages.settings import DomainSettings, StageJob


def run(job: StageJob) -> None:
    """Draw one step's groups of `job.domain` from the checkpoint `job.parent`, as its expert would,
    and write what every sample earned to results.json."""
    assert job.domain is not None and job.parent is not None
    domain = job.settings.experts[job.domain]
    policy = Policy(job.settings.model, job.settings.layout)
    rollouts = Rollouts(job, policy)
    scoring = Scoring(job, {job.domain: domain}, rollouts) if is_main() else None
    checkpoints.load_weights(policy, job.parent)
    rollouts.refit(version=1)
    groups: list[Group] = []
    if scoring is not None:
        groups = _groups(job, job.domain, domain, rollouts)
        scoring.expect(groups)
        rollouts.request(groups, domain.sampling)

    def graded() -> bool | None:
        assert scoring is not None
        return all(scoring.done(group) for group in groups) or None

    rollouts.wait(graded, version=1)
    rollouts.close()
    if scoring is not None:
        scoring.close()
        _write(job, domain, groups)


def _groups(job: StageJob, name: str, domain: DomainSettings, rollouts: Rollouts) -> list[Group]:
    seed = job.settings.seed
    stream = PromptStream(domain.prompts, rollouts.tokenizer, name, seed, job.stage)
    problems = stream.take(domain.sampling.prompts_per_step)
    return groups_of(problems, domain.sampling.group_size, seed_of(seed, job.stage, name))


def _write(job: StageJob, domain: DomainSettings, groups: list[Group]) -> None:
    """Of every group, its samples; a sample whose reward failed has a reward of null."""
    samples = [
        [
            {
                "reward": sample.reward,
                "parts": sample.reward_parts,
                "solved": sample.reward is not None
                and solved(domain.rewards, sample.reward_parts or {}),
                "finished": sample.finished,
                "tokens": len(sample.response),
            }
            for sample in group.samples
        ]
        for group in groups
    ]
    failures = [failure for group in groups for failure in group.failures]
    found = {"groups": samples, "failures": failures}
    write_atomically(job.directory / "results.json", json.dumps(found) + "\n")
    earned = [each["reward"] for group in samples for each in group if each["reward"] is not None]
    log = MetricsLog(job, steps=1, start=0)
    log.write(1, {"reward": sum(earned) / max(len(earned), 1)})
    log.close()
