"""The rewards of recorded samples, again: `python -m stages.domain_tools.regrade JOB`."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel.errors import UserError, report_error
from parallel.files import write_atomically
from stages.data.problem import SPLIT_DIGITS, Problem
from stages.data.prompts import PromptStream, Split, prompt_index, usable_problems
from stages.data.settings import ReasoningGymPromptSettings
from stages.data.tokenizer import Tokenizer, import_without_torch, tokenizer_named
from stages.domains import DomainSettings
from stages.rewards.pool import RewardPool
from stages.rewards.reward import Response
from stages.settings import RegradeJob

MOST_DRAWN = 50_000  # problems of a generated stream that are looked at: half a minute
# An evaluation's problems, and a gate's, are of streams that all runs share.
SHARED: tuple[Split, ...] = ("held_out", "gate")


def main() -> None:
    """Run the job named by argv[1]; report errors that the user can fix on the status pipe."""
    job = RegradeJob.model_validate_json(Path(sys.argv[1]).read_text())
    import_without_torch(job.tokenizer)
    try:
        write_atomically(job.result, json.dumps(regraded(job)) + "\n")
    except (UserError, OSError) as error:
        report_error(str(error))
        sys.exit(1)


def regraded(job: RegradeJob) -> list[dict[str, Any]]:
    """Return the grade of every sample of a job, in their order."""
    tokenizer = tokenizer_named(job.tokenizer, job.chat_template_arguments, job.chat_template_date)
    problems_by_domain = {}
    for domain, settings in job.domains.items():
        keys = {sample.problem for sample in job.samples if sample.domain == domain}
        problems_by_domain[domain] = problems(job, domain, settings, tokenizer, keys)
    rewards = {domain: settings.rewards for domain, settings in job.domains.items()}
    with closing(RewardPool(rewards, job.pool, job.result.parent)) as pool:
        grades = []
        for sample in job.samples:
            response = Response(sample.response, sample.tokens, sample.finished)
            grades += pool.submit(problems_by_domain[sample.domain][sample.problem], [response])
        return [asdict(grade.result()) for grade in grades]


def problems(
    job: RegradeJob,
    domain: str,
    settings: DomainSettings,
    tokenizer: Tokenizer,
    keys: Collection[str],
) -> dict[str, Problem]:
    """Return a domain's problems of these keys.

    Raises:
        UserError: one is not in the domain's data, or not among the first that a stage draws.
    """
    by_key: dict[str, Problem] = {}
    for problem in _candidates(job, domain, settings, tokenizer, keys):
        # An older version recorded the key of the question alone, of the first row that asks it.
        for key in (problem.key, problem.question_key):
            if key in keys:
                by_key.setdefault(key, problem)
        if len(by_key) == len(keys):
            return by_key
    missing = next(key for key in keys if key not in by_key)
    generated = isinstance(settings.prompts, ReasoningGymPromptSettings)
    where = (
        f"among the first {MOST_DRAWN:,} that it generates for {job.stage}, an evaluation or a gate"
        if generated
        else "in its data any more"
    )
    raise UserError(f"domains.{domain}.prompts: problem {missing[:12]} is not {where}")


def _candidates(
    job: RegradeJob,
    domain: str,
    settings: DomainSettings,
    tokenizer: Tokenizer,
    keys: Collection[str],
) -> Iterator[Problem]:
    prompts = settings.prompts
    if not isinstance(prompts, ReasoningGymPromptSettings):
        index = prompt_index(prompts, domain)
        leading = {int(key[:SPLIT_DIGITS], 16) for key in keys}
        rows = (row for row, key in enumerate(index.keys.tolist()) if key in leading)
        return (problem for problem, _ in usable_problems(index, tokenizer, rows))
    streams = [PromptStream(prompts, tokenizer, domain, job.seed, job.stage)]
    streams += [PromptStream(prompts, tokenizer, domain, 0, "evaluate", split) for split in SHARED]
    return (stream.take(1)[0] for stream in streams for _ in range(MOST_DRAWN))


if __name__ == "__main__":
    main()
