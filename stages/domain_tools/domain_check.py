"""The check of a domain before any training: `python -m stages.domain_tools.domain_check JOB`.

It makes the domain's prompts and demonstrations as a stage does, and scores three responses to each
prompt: the reference answer, which should earn most, an empty one and one without an answer.
"""

from __future__ import annotations

import json
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from parallel.errors import UserError, report_error
from parallel.files import write_atomically
from parallel.sample import Sample
from parallel.settings import CHARACTERS
from stages.data.conversations import response_sample
from stages.data.demonstrations import (
    ConversationStream,
    conversation_index,
    demonstrate,
    demonstrations,
)
from stages.data.problem import DomainError, Problem
from stages.data.prompts import PromptStream, prompt_index, row_of, split_of, usable_problems
from stages.data.reasoning_gym import ReasoningGymSource, is_compact, tagged
from stages.data.settings import (
    FileDemonstrationSettings,
    PromptSettings,
    ReasoningGymPromptSettings,
    template_of,
)
from stages.data.thoughts import answer_after
from stages.data.tokenizer import (
    Tokenizer,
    TokenizerError,
    import_without_torch,
    tokenizer_named,
)
from stages.domain_tools.response_lengths import (
    ResponseLengths,
    encoded_lengths,
    longest_turn,
    response_lengths,
    spread,
)
from stages.domain_tools.row_check import MOST_SLOW, answer_report
from stages.domains import DomainSettings
from stages.rewards.kinds.math import MathReward
from stages.rewards.kinds.reasoning_gym import ReasoningGymReward
from stages.rewards.pool import RewardPool
from stages.rewards.reward import AnswerReward, Grade, Response
from stages.settings import DomainCheckJob

LOOK_SECONDS = 0.25  # between two looks at how often scoring has timed out
DRAWN = 2000  # generated problems or demonstrations: some seconds,
DRAWING_SECONDS = 20.0  # except of puzzles that are searched for
GARBAGE = "I do not know"
PURPOSE = "domain check"
REFERENCES = 64  # generated problems whose references are measured
EXAMPLES = 2


def main() -> None:
    """Run the job named by argv[1]; report errors that the user can fix on the status pipe."""
    job = DomainCheckJob.model_validate_json(Path(sys.argv[1]).read_text())
    import_without_torch(job.tokenizer)
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
    """Return the reports `lengths` and `answers`, `demonstrations` or None, and `prompts`.

    Each prompt has its `prompt`, `answer` and number of `tokens`, and the `responses` to it: `what`
    each is, its `text` and its Grade.
    """
    tokenizer = tokenizer_named(job.tokenizer, job.chat_template_arguments, job.chat_template_date)
    settings = job.settings
    lengths = length_report(settings.prompts, tokenizer, job.domain)
    answers = answer_report(settings, tokenizer, job.domain)
    stream = PromptStream(settings.prompts, tokenizer, job.domain, 0, PURPOSE)
    usable = lengths.prompts - lengths.held_out - lengths.for_gates - lengths.too_long
    pool = RewardPool({job.domain: settings.rewards}, job.pool, job.result.parent)
    with closing(pool):
        pending = []
        for problem in stream.take_distinct(min(job.prompts, max(usable, 1))):
            wrong = {"empty": "", "garbage": garbage(problem, settings)}
            stated = {"reference": reference(problem, settings), **wrong}
            texts = {what: _responding(problem, text, settings) for what, text in stated.items()}
            # All are submitted before the first result is awaited.
            graded = [
                (
                    what,
                    text,
                    pool.submit(problem, [_response(text, tokenizer, problem, settings)])[0],
                )
                for what, text in texts.items()
                if text is not None
            ]
            pending.append((problem, graded))
        _await_grades(pool, [future for _, graded in pending for _, _, future in graded])
        prompts = [
            {
                "prompt": problem.prompt,
                "answer": problem.answer,
                "tokens": len(tokenizer.encode(problem.prompt)),
                "responses": [
                    {"what": what, "text": text, **asdict(future.result())}
                    for what, text, future in graded
                ],
            }
            for problem, graded in pending
        ]
    shown = demonstration_report(settings, tokenizer, job.domain, job.max_positions)
    limit = settings.sampling.max_response_tokens
    right_texts = references(settings, tokenizer, job.domain)
    right = response_lengths(encoded_lengths(right_texts, tokenizer), limit)
    report = {"lengths": asdict(lengths), "answers": asdict(answers), "prompts": prompts}
    return {
        **report,
        "references": right and asdict(right),
        "demonstrations": shown and asdict(shown),
    }


def _await_grades(pool: RewardPool, futures: Iterable[Future[Grade]]) -> None:
    """Wait for all grades; raise RewardError where scoring times out MOST_SLOW times.

    A reward that hangs on every row would take its time limit for each of up to 192 responses.
    """
    left = {*futures}
    while left:
        left = wait(left, LOOK_SECONDS).not_done
        pool.check_timeouts(MOST_SLOW)


def reference(problem: Problem, settings: DomainSettings) -> str | None:
    """Return the response that states the problem's reference answer, or None without one."""
    if settings.prompts.source == "reasoning_gym":
        gym_rewards = (
            reward for reward in settings.rewards.values() if isinstance(reward, ReasoningGymReward)
        )
        worked = all(reward.working != "forbidden" for reward in gym_rewards)
        if not is_compact(problem):
            working = "I thought about it.\n" if worked else ""
            return tagged(problem.answer, working) if problem.answer else None
        return demonstrate(problem, worked, Random(0), right=True).response
    for reward in settings.rewards.values():
        if (response := reward.reference_response(problem)) is not None:
            return response
    boxed = any(
        isinstance(reward, MathReward) and reward.boxed for reward in settings.rewards.values()
    )
    if boxed and problem.answer and "\\boxed" not in problem.answer:
        return f"\\boxed{{{problem.answer}}}"
    return problem.answer or None


def references(settings: DomainSettings, tokenizer: Tokenizer, domain: str) -> Iterator[str]:
    """Yield the reference responses of at most DRAWN rows of files, or REFERENCES problems."""
    problems: Iterable[Problem]
    if isinstance(settings.prompts, ReasoningGymPromptSettings):
        source = ReasoningGymSource(settings.prompts, tokenizer, domain, seed=0)
        problems = map(source.problem, range(REFERENCES))
    else:
        index = prompt_index(settings.prompts, domain)
        rows = range(min(len(index.keys), DRAWN))
        problems = (problem for problem, _ in usable_problems(index, tokenizer, rows))
    for problem in problems:
        with suppress(Exception):  # a library may raise anything; the check of the answers says it
            if text := _responding(problem, reference(problem, settings), settings):
                yield text


def garbage(problem: Problem, settings: DomainSettings) -> str:
    """Return a response without an answer, in the form that the scorer reads."""
    chat = settings.prompts.source == "reasoning_gym" and not is_compact(problem)
    return tagged(GARBAGE, "I thought about it.\n") if chat else GARBAGE


def _responding(problem: Problem, answer: str | None, settings: DomainSettings) -> str | None:
    """Return the response that is this answer: it ends thoughts that the prompt has opened."""
    if not answer:
        return answer
    rewards = (r for r in settings.rewards.values() if isinstance(r, AnswerReward))
    markers = next(filter(None, (reward.thought_markers for reward in rewards)), ())
    return answer_after(problem.prompt, answer, markers)


def _response(
    text: str, tokenizer: Tokenizer, problem: Problem, settings: DomainSettings
) -> Response:
    """Return a response to a problem, its end token counted."""
    try:
        return Response(text, len(tokenizer.encode(text)) + 1)
    except TokenizerError as error:
        raise TokenizerError(
            f"domains.{problem.domain}.prompts.answer: no policy can write the reference {text!r}"
            f" of {row_of(problem, settings.prompts)}: {error}"
        ) from error


@dataclass(frozen=True)
class LengthReport:
    """Counts of rows and of the distinct usable prompts; tokens of a prompt by `spread`."""

    rows: int
    bad: int
    duplicates: int
    prompts: int
    held_out: int
    for_gates: int
    too_long: int  # with more than `max_prompt_tokens`
    tokens: dict[int, int]


def length_report(
    settings: PromptSettings, tokenizer: Tokenizer, domain: str, sample_size: int = DRAWN
) -> LengthReport:
    """Return the report on all rows of the domain's files, or on `sample_size` generated problems.

    Reads one row at a time. Raises DomainError and TokenizerError as the domain's streams do.
    """
    problems: Iterable[tuple[Problem, int]]
    if isinstance(settings, ReasoningGymPromptSettings):
        source = ReasoningGymSource(settings, tokenizer, domain, seed=0)
        deadline, generated = time.monotonic() + DRAWING_SECONDS, list[tuple[Problem, int]]()
        for number in range(sample_size):
            problem = source.problem(number)
            generated.append((problem, len(tokenizer.encode(problem.prompt))))
            if time.monotonic() > deadline:
                break
        problems = {problem.key: (problem, tokens) for problem, tokens in generated}.values()
        rows, bad, limit = len(generated), 0, None
    else:
        index = prompt_index(settings, domain)
        problems = usable_problems(index, tokenizer, range(len(index.keys)))
        rows, bad, limit = index.counts.rows, index.counts.bad, settings.max_prompt_tokens
    lengths, splits = array("L"), Counter[str]()
    for problem, tokens in problems:
        lengths.append(tokens)
        splits[split_of(problem, settings.held_out_fraction)] += 1
    counts, count = np.array(lengths), len(lengths)
    too_long = 0 if limit is None else int((counts > limit).sum())
    apart = splits["held_out"], splits["gate"]
    return LengthReport(rows, bad, rows - bad - count, count, *apart, too_long, spread(counts))


@dataclass(frozen=True)
class DemonstrationReport:
    """Counts of rows and of the distinct usable demonstrations that are not held out.

    `too_long` of these have more than `limit` tokens, where there is one; `tokens` are a
    demonstration's by `spread`. `examples` are a prompt and the assistant's first turn each.
    """

    rows: int
    bad: int
    duplicates: int
    held_out: int
    usable: int
    limit: int | None
    too_long: int
    tokens: dict[int, int]
    learned: float  # share of all tokens
    examples: list[tuple[str, str]]
    turns: ResponseLengths | None  # the longest assistant turn of each


def demonstration_report(
    settings: DomainSettings, tokenizer: Tokenizer, domain: str, positions: int | None
) -> DemonstrationReport | None:
    """Return the report on all rows of the domain's files, or on at most DRAWN generated ones.

    None where nothing generates demonstrations of the prompts and no file has them. `positions` is
    `model.max_positions`, where the model is known. Reads one row at a time. Raises DomainError and
    TokenizerError as a cold start does.
    """
    source, prompts, limit = settings.demonstrations, settings.prompts, positions
    samples: Iterator[Sample]
    if isinstance(source, FileDemonstrationSettings):
        limit = source.max_tokens or positions
        fraction = prompts.held_out_fraction
        template = template_of(prompts)
        rows = ConversationStream(
            source, tokenizer, domain, 0, fraction, limit or 0, template=template
        )
        index = conversation_index(source, domain, template=template)
        read, held_out = index.counts, len(index.keys) - rows.rows
        counts = (read.rows, read.bad, read.duplicates, held_out, rows.rows)
        samples = rows.all()
    elif isinstance(prompts, ReasoningGymPromptSettings) and prompts.form == "compact":
        fewer = source.model_copy(update={"count": min(source.count, DRAWN)})
        shown = demonstrations(fewer, PromptStream(prompts, tokenizer, domain, 0, PURPOSE), seed=0)
        counts = (fewer.count, 0, 0, 0, fewer.count)
        samples = (response_sample(tokenizer, s.problem.prompt, s.response, domain) for s in shown)
    else:
        return None
    leading = list(islice(samples, EXAMPLES))
    tokens, learned, read_tokens, turns = np.array(
        [
            (len(s.prompt) + len(s.response), len(s.learned), s.length, longest_turn(s))
            for s in chain(leading, samples)
        ]
    ).T
    too_long = 0 if limit is None else int((read_tokens > limit).sum())
    if too_long == len(tokens):
        what = f"every demonstration is longer than {limit} tokens"
        raise DomainError(domain, "demonstrations.max_tokens", what)
    share = float(learned.sum() / tokens.sum())
    examples = [(tokenizer.decode_prompt(s.prompt), tokenizer.decode(s.response)) for s in leading]
    lengths = response_lengths(turns.tolist(), settings.sampling.max_response_tokens)
    return DemonstrationReport(*counts, limit, too_long, spread(tokens), share, examples, lengths)


if __name__ == "__main__":
    main()
