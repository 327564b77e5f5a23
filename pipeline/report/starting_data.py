"""The rows of a new run's domains: whether stages can read them, and rewards their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

from parallel.errors import UserError
from pipeline.config.rows import row_report
from pipeline.launch import one_off
from pipeline.text import shown, visible
from stages.data.settings import FilePromptSettings
from stages.domains import DomainSettings
from stages.rewards.reward import RewardPoolSettings

MOST_ROWS = 100_000  # read before anything is written: a second
SCORED = 64  # prompts whose answers the rewards score
SHOWN_ROWS = 3
LONGEST = 60  # characters of a text in a message


@dataclass(frozen=True)
class StartingData:
    """A domain's distinct rows by their use, and the tokens of its longest prompt."""

    rows: int
    trained: int
    held_out: int
    longest: int


def read_rows(name: str, source: FilePromptSettings) -> tuple[int, bool] | None:
    """Return the number of a domain's rows, and whether some prompts are chat messages.

    None of Parquet, which takes a library that is slow to import; the rewards' check reads it.

    Raises:
        UserError: no file is there, or rows have no prompt or answer, with the first of them.
    """
    files = source.files()
    if not files:
        raise UserError(f"domains.{name}: no such file: {shown(source.path)}")
    if source.source != "jsonl":
        return None
    report, where = row_report(source, most=MOST_ROWS), shown(source.path)
    if not report.checked:
        raise UserError(f"domains.{name}: {where} has no rows")
    if report.unusable:
        raise UserError(
            f"domains.{name}: {report.described(report.unusable)}; fix the rows, or remove them"
        )
    return report.checked, report.chats


def scored_data(
    name: str, domain: DomainSettings, tokenizer: str, pool: RewardPoolSettings
) -> StartingData:
    """Return a domain's counts, after its rewards have scored the answers of SCORED prompts.

    The check of `braid domain check` does both, in a process of its own.

    Raises:
        UserError: a prompt or answer cannot be read, or earns no more than a wrong response.
    """
    job = {
        "domain": name,
        "settings": domain.model_dump(mode="json"),
        "tokenizer": tokenizer,
        "pool": pool.model_dump(mode="json"),
        "prompts": SCORED,
    }
    with redirect_stdout(StringIO()):  # its notices repeat what is in the message below
        found = one_off.answer_of(f"the check of {name}", "stages.domain_check", job)
    prompts, lengths = found["prompts"], found["lengths"]
    if bad := [f"{_row(each)}: {why}" for each in prompts if (why := _misread(each))]:
        raise UserError(
            f"domains.{name}: the rewards cannot use {len(bad)} of the {len(prompts)} rows that "
            f"they were tried on; fix such rows, or remove them. "
            f"The first:\n{_listed(bad)}"
        )
    held_out, gates = lengths["held_out"], lengths["for_gates"]
    trained = lengths["prompts"] - held_out - gates
    return StartingData(lengths["rows"], trained, held_out, lengths["tokens"]["100"])


def _misread(prompt: Mapping[str, Any]) -> str | None:
    """Return why rewards cannot use a prompt's row; None where a right answer earns most."""
    responses = {each["what"]: each for each in prompt["responses"]}
    if failed := next((each["failure"] for each in responses.values() if each["failure"]), None):
        return str(failed)
    if (right := responses.pop("reference", None)) is None:
        return None
    wrong = max(each["reward"] for each in responses.values())
    if right["reward"] > wrong:
        return None
    return f"its answer earns {right['reward']:g}, no more than a wrong one"


def _row(prompt: Mapping[str, Any]) -> str:
    asked, answer = (_short(str(prompt[key])) for key in ("prompt", "answer"))
    return f"{asked}, answer {answer}" if prompt["answer"] else asked


def _short(text: str) -> str:
    return repr(text if len(text) <= LONGEST else f"{text[:LONGEST]}…")


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"  {visible(each)}" for each in lines[:SHOWN_ROWS])
