"""The accuracy of checkpoints on domains' held-out problems, with 95 % intervals.

The stage `evaluate` measures every model on every domain, a gate the models that it compares.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from parallel.checkpoint import load
from parallel.distributed import broadcast, is_main
from parallel.files import keep_steps, write_atomically
from parallel.mismatch import bounds_of
from parallel.model.policy import Policy
from parallel.sample import Sample
from stages.data.problem import Problem, seed_of
from stages.data.prompts import held_out_problems
from stages.directory import file_name
from stages.domains import SamplingSettings
from stages.metrics import MetricsLog
from stages.objectives.groups import Group, groups_of, is_right, rewarded
from stages.sampling.engines import StageEngines
from stages.sampling.logprob_check import check_samples
from stages.sampling.recording import record
from stages.settings import StageJob
from stages.statistics import of_problems

PROBLEMS_A_CALL = 500  # small enough to log progress, large enough to fill the engine
CHECKED = 64  # samples whose log-probabilities are compared


def run(job: StageJob) -> None:
    """Evaluate every model of the job that has no result yet, then write results.json."""
    evaluation = Evaluation(job)
    for version, (name, checkpoint) in enumerate(job.models.items(), start=1):
        if not broadcast(evaluation.has(name)):
            evaluation.evaluate(name, checkpoint, version)
    evaluation.finish()


class Evaluation:
    """The evaluation of several checkpoints in turn, with one policy and its engines."""

    def __init__(self, job: StageJob) -> None:
        self.job = job
        self.settings = job.settings.evaluation
        self.domains = {
            domain: settings
            for domain, settings in job.settings.domains.items()
            if any(domain in self.domains_of(name) for name in job.models)
        }
        self.policy = Policy(job.settings.model, job.settings.layout)
        self.engines = StageEngines(job, self.policy, self.domains)
        self.version = 0  # of the checkpoint that the engines have
        if is_main():
            problems = self.settings.problems
            problem_counts = {name: problems * len(self.domains_of(name)) for name in job.models}
            self.answered = sum(problem_counts[name] for name in job.models if self.has(name))
            keep_steps(job.files.metrics, self.answered)
            self.log = MetricsLog(job, sum(problem_counts.values()))
            self.problems = {
                domain: held_out_problems(
                    settings.prompts,
                    self.engines.tokenizer,
                    domain,
                    problems,
                    job.settings.longest_prompt(settings.sampling),
                    "gate" if job.kind == "gate" else "held_out",
                )
                for domain, settings in self.domains.items()
            }
            keys = {
                name: [problem.key for problem in domain_problems]
                for name, domain_problems in self.problems.items()
            }
            write_atomically(job.files.problems, json.dumps(keys))

    def domains_of(self, name: str) -> list[str]:
        """Return the domains that a model is measured on."""
        return self.job.evaluated_on.get(name, self.job.domains)

    def has(self, name: str) -> bool:
        """Return whether a model already has its result."""
        return self._result_file(name).exists()

    def evaluate(self, name: str, checkpoint: Path, version: int) -> None:
        """Measure one checkpoint on its domains. Collective.

        Raises MismatchError when the engine's log-probabilities differ from the checkpoint's.
        """
        load.weights(self.policy, checkpoint)
        self.version = version
        self.engines.sync_weights(version)
        bounds = bounds_of(self.job.settings.model, self.job.settings.engine)
        check_samples(self.policy, self._draw_checked, 1.0, bounds)
        if self.engines.version is None:
            self.engines.sync_weights(version)
        solved = {domain: self._solved(name, domain) for domain in self.domains_of(name)}
        if is_main():
            write_atomically(self.job.files.solved / f"{file_name(name)}.json", json.dumps(solved))
            samples = self.settings.samples_per_problem
            scores = {name: asdict(of_problems(right, samples)) for name, right in solved.items()}
            for domain, right in solved.items() if samples > 1 else ():
                scores[domain]["samples_per_problem"] = samples
                scores[domain]["pass_at_k"] = sum(map(bool, right)) / len(right)
            # Last: a model that has its result is not evaluated again.
            write_atomically(self._result_file(name), json.dumps(scores, indent=2))
        self.engines.sleep()

    def _draw_checked(self, attempt: int) -> list[Sample]:
        """Return responses whose log-probabilities are compared. Collective."""
        if self.engines.version is None:
            self.engines.sync_weights(self.version)
        groups: list[Group] = []
        if is_main():
            domain, problems = next(iter(self.problems.items()))
            purpose = f"check, attempt {attempt}" if attempt else "check"
            groups = self._request(domain, problems[:CHECKED], purpose)
        samples = self.engines.wait_for(groups, self.version)
        # On shared devices, so that the policy has room for the pass that compares.
        self.engines.sleep()
        return samples

    def finish(self) -> None:
        """Gather the models' results into results.json."""
        if is_main():
            files = {name: self._result_file(name) for name in self.job.models}
            models = {name: json.loads(file.read_text()) for name, file in files.items()}
            results = json.dumps({"models": models}, indent=2)
            write_atomically(self.job.files.results, results)
            self.log.close()
        self.engines.close()

    def _solved(self, name: str, domain: str) -> list[int]:
        """Return the number of right answers to each problem; the seeds are equal for all models.

        Collective.
        """
        solved: list[int] = []
        for start in range(0, self.settings.problems, PROBLEMS_A_CALL):
            right, counted = self._solved_from(name, domain, start)
            solved += right
            if is_main():
                self.answered += len(right)
                share = sum(solved) / (len(solved) * self.settings.samples_per_problem)
                metrics = {"accuracy": share, **counted}
                self.log.write(self.answered, metrics, model=name, domain=domain)
        return solved

    def _solved_from(
        self, name: str, domain: str, start: int
    ) -> tuple[list[int], dict[str, float]]:
        """Request answers to the problems of a call, from number `start`. Collective.

        Returns the right answers to each, and the call's counts for the metrics. An answer without
        a reward counts as wrong: its text may be the cause. Raises RewardError where too many have
        none.
        """
        groups: list[Group] = []
        if is_main():
            problems = self.problems[domain][start : start + PROBLEMS_A_CALL]
            purpose = f"{self.settings.sampling_seed}/{start}"
            samples = self.settings.samples_per_problem
            groups = self._request(domain, problems, purpose, samples)

        def counted() -> tuple[list[int], dict[str, float]] | None:
            if not all(self.engines.rewards.graded(group) for group in groups):
                return None
            failures = [failure for group in groups for failure in group.failures]
            self.engines.rewards.check_failures(failures, sum(len(group.slots) for group in groups))
            answers = [sample for group in groups for sample in group.samples]
            counts = {
                "sampled_tokens": sum(len(sample.response) for sample in answers),
                "reward_failures": len(failures),
                "watch_failures": sum(len(group.watch_failures) for group in groups),
            }
            path = self.job.files.samples / file_name(name) / f"{domain}_{start:06d}.parquet"
            graded_by, auditable = self.engines.graded_by, self.job.settings.logging.auditable
            # Without versions: a problem's number is no training step that weights could be behind.
            answered = [replace(sample, versions=None) for sample in answers]
            record(path, start, [answered], self.engines.tokenizer, graded_by, auditable)
            rewards = self.domains[domain].rewards
            solved = [
                sum(is_right(sample, rewards) for sample in rewarded(group)) for group in groups
            ]
            return solved, {metric: float(value) for metric, value in counts.items()}

        return self.engines.wait(counted, self.version)

    def _request(
        self, domain: str, problems: list[Problem], purpose: str, size: int = 0
    ) -> list[Group]:
        """Request answers to problems, `size` to each for grading.

        Without `size` one is sampled from the model's own distribution, and is not graded.
        """
        seed = seed_of(self.job.settings.seed, self.job.seeded_as, domain, purpose)
        groups = groups_of(problems, size or 1, seed)
        if size:
            self.engines.rewards.expect(groups)
        sampling = self.job.settings.answer_sampling(domain)
        if not size:
            sampling = SamplingSettings(max_response_tokens=sampling.max_response_tokens)
        self.engines.request(groups, sampling)
        return groups

    def _result_file(self, name: str) -> Path:
        return self.job.files.measured / f"{file_name(name)}.json"
