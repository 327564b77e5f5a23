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
    """A domain's rows by their use, the tokens of its longest prompt and of its right answers.

    `right` has the tokens of all but the longest 5 % of these with an end token, and of the
    longest; None where no reference answer or no tokenizer is there. `repeated` rows have the
    prompt of an earlier one. `passes` are how often the domain's own stage samples each row that is
    `trained`, once its steps are known.
    """

    rows: int
    trained: int
    held_out: int
    for_gates: int
    repeated: int
    unusable: int
    longest: int
    right: tuple[int, int] | None = None
    passes: float | None = None

    def described(self) -> str:
        """Return the rows by their use, in a line."""
        uses = {
            "held out": self.held_out,
            "for gates": self.for_gates,
            "repeated": self.repeated,
            "unusable": self.unusable,
        }
        listed = "".join(f", {count:,} {use}" for use, count in uses.items() if count)
        passes = "" if self.passes is None else f"; each trained on {self.passes:,.1f} times"
        return f"{self.rows:,} rows: {self.trained:,} to train on{listed}{passes}"


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
    if fix := report.columns_fix(f"domains.{name}.prompts", source):
        raise UserError(f"domains.{name}: {fix}")
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
        checked = one_off.answer_of(f"the check of {name}", "stages.domain_tools.domain_check", job)
    prompts, lengths = checked["prompts"], checked["lengths"]
    if bad := [f"{_row(prompt)}: {why}" for prompt in prompts if (why := _misread(prompt))]:
        raise UserError(
            f"domains.{name}: the rewards cannot use {len(bad)} of the {len(prompts)} rows that "
            f"they were tried on; fix such rows, or remove them. "
            f"The first:\n{_listed(bad)}"
        )
    held_out, gates = lengths["held_out"], lengths["for_gates"]
    trained = lengths["prompts"] - held_out - gates
    references = checked["references"]
    right = references and (references["tokens"]["95"], references["tokens"]["100"])
    return StartingData(
        rows=lengths["rows"],
        trained=trained,
        held_out=held_out,
        for_gates=gates,
        repeated=lengths["duplicates"],
        unusable=lengths["bad"],
        longest=lengths["tokens"]["100"],
        right=right,
    )


def estimated_data(rows: int, fraction: float, for_evaluation: float) -> StartingData:
    """Return the likely counts of rows of which a share is held out, without a tokenizer."""
    apart = round(fraction * rows)
    held_out = round(for_evaluation * apart)
    return StartingData(rows, rows - apart, held_out, apart - held_out, 0, 0, longest=0)


def _misread(prompt: Mapping[str, Any]) -> str | None:
    """Return why rewards cannot use a prompt's row; None where a right answer earns most."""
    responses = {response["what"]: response for response in prompt["responses"]}
    if failed := next(
        (response["failure"] for response in responses.values() if response["failure"]), None
    ):
        return str(failed)
    if (right := responses.pop("reference", None)) is None:
        return None
    wrong = max(response["reward"] for response in responses.values())
    if right["reward"] > wrong:
        return None
    return f"its answer earns {right['reward']:g}, no more than a wrong one"


def _row(prompt: Mapping[str, Any]) -> str:
    question, answer = (_short(str(prompt[key])) for key in ("prompt", "answer"))
    return f"{question}, answer {answer}" if prompt["answer"] else question


def _short(text: str) -> str:
    return repr(text if len(text) <= LONGEST else f"{text[:LONGEST]}…")


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"  {visible(line)}" for line in lines[:SHOWN_ROWS])
