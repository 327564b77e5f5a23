"""`braid domain check`: a domain's prompts and demonstrations, and whether its rewards tell right
from wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parallel.files import write_atomically
from pipeline.config.validate import dump_differing
from pipeline.config.violations import shown
from pipeline.errors import BraidError
from pipeline.launch.processes import Child, Signals, kill, python_module, wait_for_all
from pipeline.report.domain_preview import short
from pipeline.report.tables import plain_table
from stages.data.sources.settings import FileDemonstrationSettings, ReasoningGymPromptSettings
from stages.settings import DomainCheckJob, DomainSettings

MODULE = "stages.domain_check"
LOOK_SECONDS = 0.5  # between two looks for a signal
AS_IT_STANDS = (
    ". The reference of a row is its answer as it stands: where a reward wants more of a response, "
    "such as a format, have the column hold a whole one"
)


def check(job: DomainCheckJob, console: Console, signals: Signals) -> list[str]:
    """Show a domain and what its rewards make of its references; returns what is wrong.

    Raises:
        BraidError: the domain cannot be used at all.
        Stopped: a signal asked for it.
    """
    differing = [f"  {line}" for line in dump_differing(job.settings).splitlines()]
    _print(console, "what differs from the defaults:", *differing)
    found = _looked_at(job, console, signals)
    _print(console, "", *described(job.settings, found["lengths"]))
    for number, prompt in enumerate(found["prompts"], start=1):
        asked, answer = short(prompt["prompt"]), short(prompt["answer"])
        _print(console, "", f"{number}. {asked}, {prompt['tokens']} tokens; answer {answer}")
        console.print(_table(prompt))
    _print(console, "", *demonstrated(job.settings, found["demonstrations"]))
    _print(console, "")
    for note in notes(job.domain, job.settings, found["prompts"]):
        console.print(Text.assemble(("· ", "yellow"), note))
    return list(faults(job.domain, job.settings, found["prompts"]))


def _looked_at(job: DomainCheckJob, console: Console, signals: Signals) -> dict[str, Any]:
    """What `stages.domain_check.checked` returns, from a process that may import everything."""
    folder = job.result.parent
    path = folder / "job.json"
    write_atomically(path, job.model_dump_json(indent=2) + "\n")
    child = Child("the check", python_module(MODULE, path), folder / "log", {})
    try:
        while child.status() is None:
            signals.check()
            wait_for_all([child], LOOK_SECONDS)
        _print(console, *child.notices())
        if child.status():
            failure = child.failure()
            raise BraidError("\n".join([failure.cause, *failure.tail]))
        found: dict[str, Any] = json.loads(job.result.read_text())
        return found
    finally:
        kill([child])


def described(settings: DomainSettings, lengths: dict[str, Any]) -> Iterator[str]:
    """Where the prompts come from, how many there are, and how long they are."""
    prompts = settings.prompts
    if isinstance(prompts, ReasoningGymPromptSettings):
        yield f"prompts: reasoning-gym's {prompts.dataset}, without end; {lengths['rows']} drawn"
    else:
        files = prompts.files()
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        yield f"prompts: {shown(files[0])}{more}, {lengths['rows']} rows"
    held_out, for_gates = lengths["held_out"], lengths["for_gates"]
    yield (
        f"  {lengths['duplicates']} repeated, {lengths['bad']} unusable: "
        f"{lengths['prompts'] - held_out - for_gates} to train on, {held_out} held out, {for_gates}"
        f" for gates; {lengths['too_long']} of all are too long"
    )
    if not isinstance(prompts, ReasoningGymPromptSettings):
        yield f"  evaluation.problems of a run may be {held_out} at most, gate.problems {for_gates}"
    yield f"  tokens of a prompt, by percentile: {_spread(lengths['tokens'])}"
    response = settings.sampling.max_response_tokens
    yield (
        f"  the longest prompt and sampling.max_response_tokens = {response} are "
        f"{lengths['tokens']['100'] + response} tokens; engine.max_model_tokens must hold them"
    )


def demonstrated(settings: DomainSettings, report: dict[str, Any] | None) -> Iterator[str]:
    """What a cold start would be shown: how much, how long, and a few of them."""
    source = settings.demonstrations
    if report is None:
        yield "demonstrations: none; a run with a cold start needs them from files"
        return
    if isinstance(source, FileDemonstrationSettings):
        files = source.files()
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        yield f"demonstrations: {shown(files[0])}{more}, {report['rows']} rows"
    else:
        yield f"demonstrations: generated, {source.count} in a run; {report['rows']} looked at"
    yield (
        f"  {report['duplicates']} repeated, {report['bad']} unusable: {report['usable']} to learn "
        f"from, {report['held_out']} whose prompts are held out"
    )
    if report["limit"] is None:
        yield "  too long are those of more tokens than model.max_positions, which a run says"
    else:
        yield f"  {report['too_long']} of these are too long: of more than {report['limit']} tokens"
    yield f"  tokens of a demonstration, by percentile: {_spread(report['tokens'])}"
    yield f"  learned are {100 * report['learned']:.0f} % of the tokens: what the assistant says"
    for asked, answered in report["examples"]:
        yield f"  {short(asked)} is answered {short(answered)}"


def _spread(tokens: dict[str, int]) -> str:
    return ", ".join(f"{count} ({percent} %)" for percent, count in tokens.items())


def faults(domain: str, settings: DomainSettings, prompts: list[dict[str, Any]]) -> Iterator[str]:
    """Rewards that fail, and those that do not tell right from wrong: one that judges answers,
    where the sum of all does not either, or, where none judges, the sum."""
    failed = [
        response["failure"]
        for prompt in prompts
        for response in prompt["responses"]
        if response["failure"]
    ]
    if failed:
        yield f"a reward failed on {len(failed)} responses, which then have none; {failed[0]}"
    for name in _judging(settings):
        scores = [(prompt, _scores(prompt, name)) for prompt in prompts]
        below = [(p, score) for p, score in scores if _is_below(score) and _is_below(_sums(p))]
        if below:
            where = f"domains.{domain}.rewards.{name}: the reference scores"
            yield f"{where} {_told(below, len(prompts))}{AS_IT_STANDS}"
        if any("reference" in score for _, score in scores):
            continue
        for wrong in ("empty", "garbage"):
            if all(score.get(wrong, 0.0) >= 1 for _, score in scores):
                yield (
                    f"domains.{domain}.rewards.{name}: the {wrong} response scores 1 on every "
                    "prompt, as a right answer should"
                )
    sums = [(prompt, _sums(prompt)) for prompt in prompts if _is_below(_sums(prompt))]
    if sums and not _judging(settings):
        yield (
            f"domains.{domain}.rewards: none of them judges the answer, and the reference earns "
            f"{_told(sums, len(prompts))}. Naming rewards leaves out the default one, which may be "
            "named with them: exact: {kind: reasoning_gym}"
        )


def notes(domain: str, settings: DomainSettings, prompts: list[dict[str, Any]]) -> Iterator[str]:
    """What is worth knowing and no fault."""
    responses = [response for prompt in prompts for response in prompt["responses"]]
    if failed := [each["watch_failures"] for each in responses if each["watch_failures"]]:
        yield (
            f"rewards of weight 0 failed on {len(failed)} responses, which keep what the others "
            f"give; the first: {failed[0][0]}"
        )
    if not any(each["what"] == "reference" for prompt in prompts for each in prompt["responses"]):
        yield "there are no reference answers: whether a right answer earns anything was not tried"
    for name in _judging(settings):
        alone = [p for p in prompts if _is_below(_scores(p, name)) and not _is_below(_sums(p))]
        if alone:
            yield (
                f"domains.{domain}.rewards.{name}: by itself it does not tell right from wrong on "
                f"{len(alone)} of {len(prompts)} prompts; the sum of all rewards does"
            )
    if not _judging(settings):
        yield "no reward judges the answer: evaluation counts as solved where every one is 1"
    for name in _judging(settings):
        partly = [
            score["reference"]
            for score in (_scores(prompt, name) for prompt in prompts)
            if _best_wrong(score) < score.get("reference", 1.0) < 1
        ]
        if partly:
            yield (
                f"domains.{domain}.rewards.{name}: the reference scores {partly[0]:g} on "
                f"{len(partly)} of {len(prompts)} prompts, and evaluation counts only 1 as solved"
            )


def _judging(settings: DomainSettings) -> list[str]:
    """The rewards whose 1 says that a problem is solved."""
    return [n for n, each in settings.rewards.items() if each.judges_answer and each.weight > 0]


def _scores(prompt: dict[str, Any], name: str) -> dict[str, float]:
    """What a reward gave each of the responses that it did not fail on."""
    return {e["what"]: e["parts"][name] for e in prompt["responses"] if name in e["parts"]}


def _sums(prompt: dict[str, Any]) -> dict[str, float]:
    """What each of the responses earned in all, where no reward failed on it."""
    return {e["what"]: e["reward"] for e in prompt["responses"] if e["reward"] is not None}


def _is_below(score: dict[str, float]) -> bool:
    """Whether the reference, if there is one, is worth no more than a wrong response."""
    return "reference" in score and score["reference"] <= _best_wrong(score)


def _told(below: list[tuple[dict[str, Any], dict[str, float]]], of: int) -> str:
    prompt, score = below[0]
    text = next(e["text"] for e in prompt["responses"] if e["what"] == "reference")
    return (
        f"{score['reference']:g}, no more than a wrong response, on {len(below)} of {of} prompts; "
        f"the first is {short(prompt['prompt'])} with {short(text)}"
    )


def _best_wrong(score: dict[str, float]) -> float:
    return max((score[what] for what in ("empty", "garbage") if what in score), default=0.0)


def _print(console: Console, *lines: str) -> None:
    """Lines as they are, whatever stands in them and however long they are."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(prompt: dict[str, Any]) -> Table:
    """What each response to a prompt earned, reward by reward."""
    table = plain_table("")
    names = list(dict.fromkeys(n for each in prompt["responses"] for n in each["parts"]))
    for heading in ("", "response", *names, "reward"):
        table.add_column(heading)
    for each in prompt["responses"]:
        parts = [f"{each['parts'][n]:g}" if n in each["parts"] else "failed" for n in names]
        total = "failed" if each["reward"] is None else f"{each['reward']:g}"
        cells = [each["what"], short(each["text"]), *parts, total]
        table.add_row(*map(Text, cells))
    return table
