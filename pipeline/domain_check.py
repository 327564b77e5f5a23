"""`braid domain check`: a domain's prompts, and whether its rewards tell right from wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parallel.files import write_atomically
from pipeline.config import dump_differing
from pipeline.errors import BraidError
from pipeline.processes import Child, kill, python_module, wait_for_all
from pipeline.report import plain_table
from pipeline.violations import shown
from stages.domains.sources.settings import ReasoningGymPromptSettings
from stages.settings import DomainCheckJob, DomainSettings

SHOWN_CHARACTERS = 60
MODULE = "stages.domain_check"


def check(job: DomainCheckJob, console: Console) -> list[str]:
    """Show a domain and what its rewards make of its references; returns what is wrong.

    Raises BraidError where the domain cannot be used at all.
    """
    differing = [f"  {line}" for line in dump_differing(job.settings).splitlines()]
    _print(console, "what differs from the defaults:", *differing)
    found = _looked_at(job, console)
    _print(console, "", *described(job.settings, found["lengths"]))
    for number, prompt in enumerate(found["prompts"], start=1):
        asked, answer = _short(prompt["prompt"]), _short(prompt["answer"])
        _print(console, "", f"{number}. {asked}, {prompt['tokens']} tokens; answer {answer}")
        console.print(_table(prompt))
    _print(console, "")
    for note in notes(job.domain, job.settings, found["prompts"]):
        console.print(Text.assemble(("· ", "yellow"), note))
    return list(faults(job.domain, job.settings, found["prompts"]))


def _looked_at(job: DomainCheckJob, console: Console) -> dict[str, Any]:
    """What `stages.domain_check.checked` returns, from a process that may import everything."""
    folder = job.result.parent
    path = folder / "job.json"
    write_atomically(path, job.model_dump_json(indent=2) + "\n")
    child = Child("the check", python_module(MODULE, path), folder / "log", {})
    try:
        wait_for_all([child], math.inf)
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
    train = lengths["prompts"] - lengths["held_out"]
    yield (
        f"  {lengths['duplicates']} repeated, {lengths['bad']} unusable: {train} to train on, "
        f"{lengths['held_out']} held out; {lengths['too_long']} of all are too long"
    )
    tokens = {int(percent): count for percent, count in lengths["tokens"].items()}
    spread = ", ".join(f"{count} ({percent} %)" for percent, count in tokens.items())
    yield f"  tokens of a prompt, by percentile: {spread}"
    response = settings.sampling.max_response_tokens
    yield (
        f"  the longest prompt and sampling.max_response_tokens = {response} are "
        f"{tokens[100] + response} tokens; engine.max_model_tokens must hold them"
    )


def faults(domain: str, settings: DomainSettings, prompts: list[dict[str, Any]]) -> Iterator[str]:
    """Rewards that fail, and those that judge answers and do not tell right from wrong."""
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
        below = [
            (prompt, score)
            for prompt, score in scores
            if "reference" in score and score["reference"] <= _best_wrong(score)
        ]
        if below:
            prompt, score = below[0]
            text = next(e["text"] for e in prompt["responses"] if e["what"] == "reference")
            yield (
                f"experts.{domain}.rewards.{name}: the reference scores {score['reference']:g}, no "
                f"more than a wrong response, on {len(below)} of {len(prompts)} prompts; the first "
                f"is {_short(prompt['prompt'])} with {_short(text)}"
            )
        for wrong in ("empty", "garbage"):
            if all(score.get(wrong, 0.0) >= 1 for _, score in scores) and not below:
                yield (
                    f"experts.{domain}.rewards.{name}: the {wrong} response scores 1 on every "
                    "prompt, as a right answer should"
                )


def notes(domain: str, settings: DomainSettings, prompts: list[dict[str, Any]]) -> Iterator[str]:
    """What is worth knowing and no fault."""
    if not any(each["what"] == "reference" for prompt in prompts for each in prompt["responses"]):
        yield "there are no reference answers: whether a right answer earns anything was not tried"
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
                f"experts.{domain}.rewards.{name}: the reference scores {partly[0]:g} on "
                f"{len(partly)} of {len(prompts)} prompts, and evaluation counts only 1 as solved"
            )


def _judging(settings: DomainSettings) -> list[str]:
    """The rewards whose 1 says that a problem is solved."""
    return [n for n, each in settings.rewards.items() if each.judges_answer and each.weight > 0]


def _scores(prompt: dict[str, Any], name: str) -> dict[str, float]:
    """What a reward gave each of the responses that it did not fail on."""
    return {e["what"]: e["parts"][name] for e in prompt["responses"] if name in e["parts"]}


def _best_wrong(score: dict[str, float]) -> float:
    return max(score.get("empty", 0.0), score.get("garbage", 0.0))


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
        cells = [each["what"], _short(each["text"]), *parts, total]
        table.add_row(*map(Text, cells))
    return table


def _short(text: str) -> str:
    """Text as a literal on one line, its middle left out where it is long."""
    half = SHOWN_CHARACTERS // 2
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}")
