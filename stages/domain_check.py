"""A domain before anything is trained on it: `python -m stages.domain_check JOB`.

Makes its prompts and demonstrations as a stage would, and has its rewards score what should earn
most and what should earn nothing: the reference answers, an empty response, and one that answers
nothing.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from parallel.files import CHARACTERS, write_atomically
from parallel.status_pipe import report_error
from stages.data.demonstration_report import demonstration_report
from stages.data.demonstrations import demonstrate
from stages.data.formats import FORMATS
from stages.data.problem import DomainError, Problem
from stages.data.prompts import PromptStream
from stages.data.sources.length_report import LengthReport, length_report
from stages.data.tokenizer import Tokenizer, TokenizerError, tokenizer_named
from stages.rewards.grading import Grade
from stages.rewards.kinds.math import MathReward
from stages.rewards.pool import RewardPool
from stages.rewards.reward import Response, RewardError
from stages.settings import DomainCheckJob, DomainSettings

DRAWN = 2000  # problems of a source without end: some seconds
GARBAGE = "I do not know"
PURPOSE = "domain check"


def main() -> None:
    """Run the job named by argv[1]; what a person has to mend is the last word."""
    job = DomainCheckJob.model_validate_json(Path(sys.argv[1]).read_text())
    try:
        write_atomically(job.result, json.dumps(checked(job)) + "\n")
    except TokenizerError as error:
        hint = "; name the model's tokenizer: --tokenizer FOLDER"
        report_error(f"{error}{hint if job.tokenizer == CHARACTERS else ''}")
        sys.exit(1)
    except (DomainError, OSError, RewardError) as error:
        report_error(str(error))
        sys.exit(1)


def checked(job: DomainCheckJob) -> dict[str, Any]:
    """`lengths`, a LengthReport; `demonstrations`, a DemonstrationReport or None; and `prompts`.

    Each of these has its `prompt`, `answer` and number of `tokens`, and the `responses` to it:
    `what` each is, its `text` and its Grade.
    """
    tokenizer = tokenizer_named(job.tokenizer)
    prompts = job.settings.prompts
    lengths = length_report(prompts, tokenizer, job.domain, DRAWN)
    problems = _problems(job, tokenizer, lengths)
    pool = RewardPool({job.domain: job.settings.rewards}, job.pool, job.result.parent)
    try:
        begun = [_begun(problem, job.settings, tokenizer, pool) for problem in problems]
        found = [
            {
                "prompt": problem.prompt,
                "answer": problem.answer,
                "tokens": len(tokenizer.encode(problem.prompt)),
                "responses": [
                    {"what": what, "text": text, **asdict(future.result())}
                    for what, text, future in responses
                ],
            }
            for problem, responses in zip(problems, begun, strict=True)
        ]
    finally:
        pool.close()
    shown = demonstration_report(job.settings, tokenizer, job.domain, job.max_positions)
    return {
        "lengths": asdict(lengths),
        "prompts": found,
        "demonstrations": shown and asdict(shown),
    }


def reference(problem: Problem, settings: DomainSettings) -> str | None:
    """The response that the domain's own reference is, or None where there is none."""
    if problem.fields.get("dataset") in FORMATS and settings.prompts.source == "reasoning_gym":
        return demonstrate(problem, worked=True, random=Random(0)).response
    boxed = any(isinstance(each, MathReward) and each.boxed for each in settings.rewards.values())
    if boxed and problem.answer and "\\boxed" not in problem.answer:
        return f"\\boxed{{{problem.answer}}}"
    return problem.answer or None


def _problems(job: DomainCheckJob, tokenizer: Tokenizer, lengths: LengthReport) -> list[Problem]:
    """Problems that training would draw, as many as are asked for where there are so many."""
    stream = PromptStream(job.settings.prompts, tokenizer, job.domain, 0, PURPOSE)
    usable = lengths.prompts - lengths.held_out - lengths.for_gates - lengths.too_long
    return stream.take_distinct(min(job.prompts, max(usable, 1)))


def _begun(
    problem: Problem, settings: DomainSettings, tokenizer: Tokenizer, pool: RewardPool
) -> list[tuple[str, str, Future[Grade]]]:
    """Have every response to a problem scored; what it is, its text, and its grade to come."""
    texts = {"reference": reference(problem, settings), "empty": "", "garbage": GARBAGE}
    begun = []
    for what, text in texts.items():
        if text is not None:
            response = Response(text, _tokens(text, tokenizer, problem.domain))
            [future] = pool.submit(problem, [response])
            begun.append((what, text, future))
    return begun


def _tokens(text: str, tokenizer: Tokenizer, domain: str) -> int:
    """How many a response of this text would have, its end token included."""
    try:
        return len(tokenizer.encode(text)) + 1
    except TokenizerError as error:
        raise TokenizerError(
            f"domains.{domain}.prompts.answer: no policy can write the reference {text!r}: {error}"
        ) from error


if __name__ == "__main__":
    main()
