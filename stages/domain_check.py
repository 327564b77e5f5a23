"""The check of a domain before any training: `python -m stages.domain_check JOB`.

It makes the domain's prompts and demonstrations as a stage does, and scores three responses to each
prompt: the reference answer, which should earn most, an empty one and one without an answer.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from parallel.errors import UserError, report_error
from parallel.files import CHARACTERS, write_atomically
from parallel.sample import Sample
from stages.data.demonstrations import (
    ConversationStream,
    conversation_index,
    demonstrate,
    demonstrations,
    response_sample,
)
from stages.data.formats import FORMATS
from stages.data.problem import DomainError, Problem
from stages.data.prompts import PromptStream, problem_at, prompt_index, split_of
from stages.data.reasoning_gym import ReasoningGymSource
from stages.data.settings import (
    FileDemonstrationSettings,
    GeneratedDemonstrationSettings,
    PromptSettings,
    ReasoningGymPromptSettings,
)
from stages.data.tokenizer import Tokenizer, TokenizerError, tokenizer_named
from stages.rewards.grading import Grade
from stages.rewards.kinds.math import MathReward
from stages.rewards.pool import RewardPool
from stages.rewards.reward import Response
from stages.settings import DomainCheckJob, DomainSettings

DRAWN = 2000  # generated problems or demonstrations: some seconds
GARBAGE = "I do not know"
PURPOSE = "domain check"
PERCENTILES = (0, 50, 90, 95, 99, 100)
EXAMPLES = 2


def main() -> None:
    """Run the job named by argv[1]; report errors that the user can fix on the status pipe."""
    job = DomainCheckJob.model_validate_json(Path(sys.argv[1]).read_text())
    try:
        write_atomically(job.result, json.dumps(checked(job)) + "\n")
    except TokenizerError as error:
        hint = "; name the model's tokenizer: --tokenizer DIRECTORY"
        report_error(f"{error}{hint if job.tokenizer == CHARACTERS else ''}")
        sys.exit(1)
    except (UserError, OSError) as error:
        report_error(str(error))
        sys.exit(1)


def checked(job: DomainCheckJob) -> dict[str, Any]:
    """Return `lengths`, a LengthReport; `demonstrations`, a DemonstrationReport or None; `prompts`.

    Each prompt has its `prompt`, `answer` and number of `tokens`, and the `responses` to it: `what`
    each is, its `text` and its Grade.
    """
    tokenizer = tokenizer_named(job.tokenizer)
    prompts = job.settings.prompts
    lengths = length_report(prompts, tokenizer, job.domain, DRAWN)
    problems = _problems(job, tokenizer, lengths)
    pool = RewardPool({job.domain: job.settings.rewards}, job.pool, job.result.parent)
    try:
        submitted = [_submit(problem, job.settings, tokenizer, pool) for problem in problems]
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
            for problem, responses in zip(problems, submitted, strict=True)
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
    """Return the response that states the problem's reference answer, or None without one."""
    if problem.fields.get("dataset") in FORMATS and settings.prompts.source == "reasoning_gym":
        return demonstrate(problem, worked=True, random=Random(0)).response
    boxed = any(isinstance(each, MathReward) and each.boxed for each in settings.rewards.values())
    if boxed and problem.answer and "\\boxed" not in problem.answer:
        return f"\\boxed{{{problem.answer}}}"
    return problem.answer or None


def _problems(job: DomainCheckJob, tokenizer: Tokenizer, lengths: LengthReport) -> list[Problem]:
    """Return problems that training would sample: `job.prompts` of them, or all there are."""
    stream = PromptStream(job.settings.prompts, tokenizer, job.domain, 0, PURPOSE)
    usable = lengths.prompts - lengths.held_out - lengths.for_gates - lengths.too_long
    return stream.take_distinct(min(job.prompts, max(usable, 1)))


def _submit(
    problem: Problem, settings: DomainSettings, tokenizer: Tokenizer, pool: RewardPool
) -> list[tuple[str, str, Future[Grade]]]:
    """Submit every response to a problem; return each one's kind, its text and its future grade."""
    texts = {"reference": reference(problem, settings), "empty": "", "garbage": GARBAGE}
    submitted = []
    for what, text in texts.items():
        if text is not None:
            response = Response(text, _tokens(text, tokenizer, problem.domain))
            [future] = pool.submit(problem, [response])
            submitted.append((what, text, future))
    return submitted


def _tokens(text: str, tokenizer: Tokenizer, domain: str) -> int:
    """Return the number of tokens of a response of this text, its end token included."""
    try:
        return len(tokenizer.encode(text)) + 1
    except TokenizerError as error:
        raise TokenizerError(
            f"domains.{domain}.prompts.answer: no policy can write the reference {text!r}: {error}"
        ) from error


@dataclass(frozen=True)
class LengthReport:
    """Counts of rows, and of the distinct usable prompts among them, and how long those are.

    `too_long` have more than `max_prompt_tokens`; `tokens` maps each of `PERCENTILES` to a prompt's
    tokens.
    """

    rows: int
    bad: int
    duplicates: int
    prompts: int
    held_out: int
    for_gates: int
    too_long: int
    tokens: dict[int, int]


def length_report(
    settings: PromptSettings, tokenizer: Tokenizer, domain: str, drawn: int = DRAWN
) -> LengthReport:
    """Return the report on all rows of the domain's files, or on `drawn` generated problems.

    Reads one row at a time. Raises DomainError and TokenizerError as the domain's streams do.
    """
    if isinstance(settings, ReasoningGymPromptSettings):
        problems = _distinct(ReasoningGymSource(settings, domain, seed=0), drawn)
        rows, bad, limit = drawn, 0, None
    else:
        index = prompt_index(settings, domain)
        places = range(len(index.keys))
        problems = (problem_at(index, tokenizer, row, row) for row in places)
        rows, bad, limit = index.counts.rows, index.counts.bad, settings.max_prompt_tokens
    lengths, splits = array("L"), Counter[str]()
    for problem in problems:
        lengths.append(len(tokenizer.encode(problem.prompt)))
        splits[split_of(problem, settings.held_out_fraction)] += 1
    counts = np.frombuffer(lengths, np.dtype(f"u{lengths.itemsize}"))
    found = np.percentile(counts, PERCENTILES, method="higher").tolist()
    return LengthReport(
        rows=rows,
        bad=bad,
        duplicates=rows - bad - len(counts),
        prompts=len(counts),
        held_out=splits["held_out"],
        for_gates=splits["gate"],
        too_long=0 if limit is None else int((counts > limit).sum()),
        tokens=dict(zip(PERCENTILES, found, strict=True)),
    )


def _distinct(source: ReasoningGymSource, drawn: int) -> Iterator[Problem]:
    seen: set[str] = set()
    for index in range(drawn):
        problem = source.problem(index)
        if problem.key not in seen:
            seen.add(problem.key)
            yield problem


@dataclass(frozen=True)
class DemonstrationReport:
    """Counts of rows, and of the distinct usable demonstrations among them that are not held out.

    `too_long` of these have more than `limit` tokens, where there is one; `tokens` maps each of
    PERCENTILES to a demonstration's tokens, and `learned` is the share of all tokens that are
    learned. `examples` are texts, each a prompt and the assistant's first turn.
    """

    rows: int
    bad: int
    duplicates: int
    held_out: int
    usable: int
    limit: int | None
    too_long: int
    tokens: dict[int, int]
    learned: float
    examples: list[tuple[str, str]]


def demonstration_report(
    settings: DomainSettings, tokenizer: Tokenizer, domain: str, positions: int | None
) -> DemonstrationReport | None:
    """Return the report on all rows of the domain's files, or on at most DRAWN generated ones.

    None where prompts are of files and demonstrations are not. `positions` is
    `model.max_positions`, where the model is known. Reads one row at a time. Raises DomainError and
    TokenizerError as a cold start does.
    """
    wanted = settings.demonstrations
    if isinstance(wanted, FileDemonstrationSettings):
        limit = wanted.max_tokens or positions
        fraction = settings.prompts.held_out_fraction
        stream = ConversationStream(wanted, tokenizer, domain, 0, fraction, limit or 0)
        index = conversation_index(wanted, domain)
        held_out = len(index.keys) - stream.rows
        found = _measured(stream.all(), tokenizer, domain, limit)
        counts = index.counts
        return DemonstrationReport(
            counts.rows, counts.bad, counts.duplicates, held_out, stream.rows, limit, *found
        )
    if not isinstance(settings.prompts, ReasoningGymPromptSettings):
        return None
    generated = _generated(wanted, settings, tokenizer, domain)
    count = min(wanted.count, DRAWN)
    found = _measured(generated, tokenizer, domain, positions)
    return DemonstrationReport(count, 0, 0, 0, count, positions, *found)


def _generated(
    wanted: GeneratedDemonstrationSettings,
    settings: DomainSettings,
    tokenizer: Tokenizer,
    domain: str,
) -> Iterator[Sample]:
    fewer = wanted.model_copy(update={"count": min(wanted.count, DRAWN)})
    prompts = PromptStream(settings.prompts, tokenizer, domain, 0, PURPOSE)
    for shown in demonstrations(fewer, prompts, seed=0):
        yield response_sample(tokenizer, shown.problem.prompt, shown.response, domain)


def _measured(
    samples: Iterator[Sample], tokenizer: Tokenizer, domain: str, limit: int | None
) -> tuple[int, dict[int, int], float, list[tuple[str, str]]]:
    """Return `too_long`, `tokens`, `learned` and `examples` of a report."""
    first = list(islice(samples, EXAMPLES))
    examples = [(tokenizer.decode(s.prompt), tokenizer.decode(s.response)) for s in first]
    sizes = [
        (len(sample.prompt) + len(sample.response), len(sample.learned), sample.length)
        for sample in chain(first, samples)
    ]
    tokens, learned, read = np.array(sizes).T
    too_long = 0 if limit is None else int((read > limit).sum())
    if too_long == len(sizes):
        raise DomainError(
            domain,
            "demonstrations.max_tokens",
            f"every demonstration is longer than {limit} tokens",
        )
    percentiles = np.percentile(tokens, PERCENTILES, method="higher").tolist()
    spread = dict(zip(PERCENTILES, percentiles, strict=True))
    return too_long, spread, float(learned.sum() / tokens.sum()), examples


if __name__ == "__main__":
    main()
