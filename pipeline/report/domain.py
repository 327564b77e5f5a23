"""`braid domain`: a starter file, and a check of a domain's data and rewards before training."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from parallel.files import write_atomically
from pipeline.config.validate import dump_differing
from pipeline.errors import BraidError
from pipeline.launch.processes import Signals
from pipeline.report.audit import answer_of
from pipeline.report.tables import table
from pipeline.text import say, shown, visible
from stages.data.settings import (
    FileDemonstrationSettings,
    FilePromptSettings,
    ReasoningGymPromptSettings,
)
from stages.settings import DomainCheckJob, DomainSettings

MODULE = "stages.domain_check"
DIRECTORY = Path("configs/domains")
WRONG = ("empty", "garbage")
EXAMPLES, CHARACTERS = 5, 60  # responses shown, and the most characters of each
RANGES = 10  # of a distribution with more values than this
AS_IT_STANDS = (
    ". The reference of a row is its answer as it stands: where a reward wants more of a response, "
    "such as a format, have the column hold a whole one"
)
Source = Literal["reasoning_gym", "jsonl", "parquet"]
Prompts = Sequence[dict[str, Any]]
Groups = list[list[dict[str, Any]]]

HEADING = """\
# The domain {name}. Every key and its default: docs/reference/domain.md. Check it with
#
#     braid domain check {path}
#
# and add it to a run with
#
#     domains:
#       {name}:
#         extends: domains/{name}.yaml
"""
REASONING_GYM = """\
# Only what differs from _base.yaml: sampling, optimizer, steps.
extends: _base.yaml

prompts:
  source: reasoning_gym
  dataset: chain_sum       # or spell_backward, number_sorting
  config: {min_terms: 2, max_terms: 3, min_digits: 1, max_digits: 1}  # the dataset's own options

rewards:                   # a sample earns the sum of weight x reward: docs/reference/rewards.md
  exact: {kind: reasoning_gym}

objective:                 # docs/explanation/objectives.md
  kl: {coefficient: 0.0}   # 0.001 pulls back to the cold start
"""
FILES = """\
prompts:
  source: {source}
  path: ../../data/{name}.{source}  # FILL IN: file, pattern or directory, relative to this file
  prompt: prompt           # column of the prompt: text, or a list of chat messages
  answer: answer           # column of the reference answer; null if no reward needs one
  held_out_fraction: 0.25  # the same in every domain of a run

rewards:                   # a sample earns the sum of weight x reward: docs/reference/rewards.md
  right: {{kind: math}}      # or instruction, json_schema, code, judge, python
  # brief: {{kind: overlong, max_tokens: 2048, buffer_tokens: 512, weight: 0.5}}

demonstrations:            # for the cold start, if the run has one: docs/explanation/data.md
  source: {source}
  path: ../../data/{name}_demonstrations.{source}  # FILL IN
  messages: messages       # column of whole conversations
  sequences_per_step: 32

sampling: {{prompts_per_step: 32, group_size: 8, temperature: 1.0, max_response_tokens: 2048}}

objective:                 # docs/explanation/objectives.md
  advantage: {{name: grpo}}
  ratio: {{name: sequence}}
  kl: {{coefficient: 0.0}}

optimizer: {{algorithm: adam, learning_rate: 1.0e-6, warmup_steps: 5}}
loop: {{steps: 100, checkpoint_every: 20}}
"""


def write_starter(name: str, source: Source) -> Path:
    """Write configs/domains/NAME.yaml; raise BraidError if it exists or NAME is not a name."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise BraidError(f"{name!r} is not a domain's name: use letters, digits, _ and -")
    path = DIRECTORY / f"{name}.yaml"
    body = REASONING_GYM if source == "reasoning_gym" else FILES.format(name=name, source=source)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(f"{HEADING.format(name=name, path=path)}{body}")
    except FileExistsError:
        raise BraidError(f"{shown(path)} exists already; it was not changed") from None
    return path


def check(job: DomainCheckJob, signals: Signals) -> list[str]:
    """Print a domain and its rewards' scores of its references; return the errors.

    Raises:
        BraidError: the domain cannot be used at all.
        Stopped: a signal stopped the check.
    """
    settings = job.settings
    differing = (f"  {line}" for line in dump_differing(settings).splitlines())
    say("settings that differ from the defaults:", *differing)
    path = job.result.with_name("job.json")
    write_atomically(path, job.model_dump_json(indent=2) + "\n")
    found = answer_of("the check", MODULE, path, job.result, signals)
    say("", *described(settings, found["lengths"]))
    for number, prompt in enumerate(found["prompts"], start=1):
        asked, answer = short(prompt["prompt"]), short(prompt["answer"])
        say("", f"{number}. {asked}, {prompt['tokens']} tokens; answer {answer}")
        print(_scored("", ((each["what"], each) for each in prompt["responses"]), "text"))
    say("", *demonstrated(settings, found["demonstrations"]), "")
    for note in notes(job.domain, settings, found["prompts"]):
        say(f"· {note}")
    return list(errors(job.domain, settings, found["prompts"]))


def described(settings: DomainSettings, lengths: dict[str, Any]) -> Iterator[str]:
    """Yield the source of the prompts, their counts and their lengths."""
    prompts, response = settings.prompts, settings.sampling.max_response_tokens
    held_out, for_gates, spread = lengths["held_out"], lengths["for_gates"], lengths["tokens"]
    if isinstance(prompts, ReasoningGymPromptSettings):
        yield f"prompts: reasoning-gym's {prompts.dataset}, without end; {lengths['rows']} sampled"
    else:
        yield f"prompts: {_files(prompts)}, {lengths['rows']} rows"
    yield (
        f"  {lengths['duplicates']} repeated, {lengths['bad']} unusable: "
        f"{lengths['prompts'] - held_out - for_gates} to train on, {held_out} held out, {for_gates}"
        f" for gates; {lengths['too_long']} of all are too long"
    )
    if not isinstance(prompts, ReasoningGymPromptSettings):
        yield f"  a run's evaluation.problems is at most {held_out}, gate.problems {for_gates}"
    yield f"  tokens of a prompt, by percentile: {_spread(spread)}"
    yield (
        f"  the longest prompt and sampling.max_response_tokens = {response} are "
        f"{spread['100'] + response} tokens; engine.max_model_tokens must allow them"
    )


def demonstrated(settings: DomainSettings, report: dict[str, Any] | None) -> Iterator[str]:
    """Yield the source of a cold start's demonstrations, their counts, lengths and examples."""
    source = settings.demonstrations
    if report is None:
        yield "demonstrations: none; a run with a cold start needs them from files"
        return
    if isinstance(source, FileDemonstrationSettings):
        yield f"demonstrations: {_files(source)}, {report['rows']} rows"
    else:
        yield f"demonstrations: generated, {source.count} in a run; {report['rows']} checked"
    yield (
        f"  {report['duplicates']} repeated, {report['bad']} unusable: {report['usable']} to learn "
        f"from, {report['held_out']} whose prompts are held out"
    )
    if report["limit"] is None:
        yield "  those above model.max_positions tokens are too long; the run sets it"
    else:
        yield f"  {report['too_long']} of these are too long: more than {report['limit']} tokens"
    yield f"  tokens of a demonstration, by percentile: {_spread(report['tokens'])}"
    yield f"  {100 * report['learned']:.0f} % of tokens are trained on: the assistant's"
    for asked, answered in report["examples"]:
        yield f"  {short(asked)} is answered {short(answered)}"


def errors(domain: str, settings: DomainSettings, prompts: Prompts) -> Iterator[str]:
    """Yield rewards that fail, and those that do not score right answers above wrong ones.

    A reward that judges answers may do so together with the others, by their sum; where none
    judges, the sum must.
    """
    where, judging = f"domains.{domain}.rewards", _judging(settings)
    responses = [each for prompt in prompts for each in prompt["responses"]]
    if failed := [each["failure"] for each in responses if each["failure"]]:
        yield f"a reward failed on {len(failed)} responses, which then have none; {failed[0]}"
    sums = [prompt for prompt in prompts if _is_below(_scores(prompt))]
    for name in judging:
        if below := [prompt for prompt in sums if _is_below(_scores(prompt, name))]:
            score = _no_more(below, len(prompts), name)
            yield f"{where}.{name}: the reference scores {score}{AS_IT_STANDS}"
        scores = [_scores(prompt, name) for prompt in prompts]
        for wrong in WRONG if not any("reference" in score for score in scores) else ():
            if all(score.get(wrong, 0.0) >= 1 for score in scores):
                yield (
                    f"{where}.{name}: the {wrong} response scores 1 on every prompt, as a right "
                    "answer should"
                )
    if sums and not judging:
        yield (
            f"{where}: none of them judges the answer, and the reference earns "
            f"{_no_more(sums, len(prompts))}. Naming rewards drops the default one, which may be "
            "named with them: exact: {kind: reasoning_gym}"
        )


def notes(domain: str, settings: DomainSettings, prompts: Prompts) -> Iterator[str]:
    """Yield what is worth knowing and not an error."""
    where, judging, count = f"domains.{domain}.rewards", _judging(settings), len(prompts)
    responses = [each for prompt in prompts for each in prompt["responses"]]
    if failed := [each["watch_failures"] for each in responses if each["watch_failures"]]:
        yield (
            f"rewards of weight 0 failed on {len(failed)} responses, which keep the others' "
            f"rewards; the first: {failed[0][0]}"
        )
    if not any(each["what"] == "reference" for each in responses):
        yield "there are no reference answers: whether a right answer earns anything is untested"
    if not judging:
        yield "no reward judges the answer: evaluation counts as solved where every one is 1"
    for name in judging:
        scores = [(_scores(prompt, name), _scores(prompt)) for prompt in prompts]
        if alone := [score for score, total in scores if _is_below(score) and not _is_below(total)]:
            yield (
                f"{where}.{name}: by itself it does not tell right from wrong on {len(alone)} of "
                f"{count} prompts; the sum of all rewards does"
            )
        right = [(score.get("reference", 1.0), _best_wrong(score)) for score, _ in scores]
        if partly := [score for score, wrong in right if wrong < score < 1]:
            yield (
                f"{where}.{name}: the reference scores {partly[0]:g} on {len(partly)} of {count} "
                "prompts, and evaluation counts only 1 as solved"
            )


def previewed(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a checkpoint's responses: examples, what the groups teach, and rewards' distributions.

    `found` is the results.json of `stages.preview`.
    """
    groups: Groups = found["groups"]
    firsts = [group[0] for group in groups[:EXAMPLES]]
    yield _scored("prompt", ((short(each["prompt"]), each) for each in firsts), "response")
    yield ""
    samples = [sample for group in groups for sample in group]
    rewarded = [sample for sample in samples if sample["reward"] is not None]
    earned = [{each["reward"] for each in group if each["reward"] is not None} for group in groups]
    flat = [group for group, each in zip(groups, earned, strict=True) if len(each) <= 1]
    right = sum(all(sample["solved"] for sample in group) for group in flat)
    wrong = sum(not any(sample["solved"] for sample in group) for group in flat)
    truncated = sum(not sample["finished"] for sample in samples)
    tokens = sum(sample["tokens"] for sample in samples)
    yield f"{len(samples)} responses to {len(groups)} prompts"
    yield f"  zero-variance groups, which teach nothing: {_share(len(flat), len(groups))}"
    yield f"    all right: {_share(right, len(groups))}; all wrong: {_share(wrong, len(groups))}"
    yield f"  truncated at sampling.max_response_tokens: {_share(truncated, len(samples))}"
    yield f"  tokens of a response: {tokens / len(samples):.1f} on average"
    if failures := found["failures"]:
        share = _share(len(failures), len(samples))
        yield f"  without a reward: {share}; the first: {visible(failures[0])}"
    if failures := found["watch_failures"]:
        first = visible(failures[0])
        yield f"  a reward of weight 0 failed {len(failures)} times; the first: {first}"
    values = {"reward": [sample["reward"] for sample in rewarded]}
    for sample in rewarded:
        for name, value in sample["parts"].items():
            values.setdefault(f"reward/{name}", []).append(value)
    for name, each in values.items():
        if each:
            shares = (f"{label}: {_share(n, len(each))}" for label, n in binned(each).items())
            yield f"  {name}: {sum(each) / len(each):.4g} on average; {', '.join(shares)}"


def binned(values: list[float]) -> dict[str, int]:
    """Return the counts of values, lowest first; by `RANGES` equal ranges if there are more."""
    if len(single := Counter(values)) <= RANGES:
        return {f"{value:g}": single[value] for value in sorted(single)}
    lowest, highest = min(values), max(values)
    width = (highest - lowest) / RANGES
    counts = Counter(min(int((value - lowest) / width), RANGES - 1) for value in values)
    edges = [lowest + width * place for place in range(RANGES + 1)]
    return {f"{edges[b]:.3g} to {edges[b + 1]:.3g}": counts[b] for b in range(RANGES)}


def short(text: str) -> str:
    """Return text as a literal on one line, its middle left out where it is long."""
    half = CHARACTERS // 2
    return repr(text if len(text) <= CHARACTERS else f"{text[:half]} … {text[-half:]}")


def _scored(heading: str, responses: Iterable[tuple[str, dict[str, Any]]], key: str) -> str:
    """Return a table of labelled responses: each with its text, at `key`, and its rewards."""
    rows = [(label, each, each["parts"] or {}) for label, each in responses]
    names = list(dict.fromkeys(name for *_, parts in rows for name in parts))
    cells = [
        (label, short(each[key]), *(_number(parts.get(n)) for n in names), _number(each["reward"]))
        for label, each, parts in rows
    ]
    return table("", (heading, "response", *names, "reward"), cells)


def _judging(settings: DomainSettings) -> list[str]:
    """Return the rewards whose 1 means that a problem is solved."""
    return [n for n, each in settings.rewards.items() if each.judges_answer and each.weight > 0]


def _scores(prompt: dict[str, Any], name: str | None = None) -> dict[str, float]:
    """Return each response's score by a reward, or by the sum; none where it failed."""
    found = {
        each["what"]: each["reward"] if name is None else each["parts"].get(name)
        for each in prompt["responses"]
    }
    return {what: score for what, score in found.items() if score is not None}


def _is_below(score: dict[str, float]) -> bool:
    """Return whether the reference, if there is one, is worth no more than a wrong response."""
    return "reference" in score and score["reference"] <= _best_wrong(score)


def _best_wrong(score: dict[str, float]) -> float:
    return max((score[what] for what in WRONG if what in score), default=0.0)


def _no_more(below: Prompts, count: int, name: str | None = None) -> str:
    prompt = below[0]
    text = next(each["text"] for each in prompt["responses"] if each["what"] == "reference")
    score = _scores(prompt, name)["reference"]
    return (
        f"{score:g}, no more than a wrong response, on {len(below)} of {count} prompts; the first "
        f"is {short(prompt['prompt'])} with {short(text)}"
    )


def _files(source: FilePromptSettings | FileDemonstrationSettings) -> str:
    first, *others = source.files()
    return f"{shown(first)} and {len(others)} more" if others else shown(first)


def _spread(tokens: dict[str, int]) -> str:
    return ", ".join(f"{count} ({percent} %)" for percent, count in tokens.items())


def _number(value: float | None) -> str:
    return "failed" if value is None else f"{value:g}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %"
