"""The settings of a teacher that is the student itself, and what it can teach with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from parallel.settings import Fraction, Settings
from stages.data.settings import (
    FilePromptSettings,
    GeneratedDemonstrationSettings,
    ReasoningGymPromptSettings,
)
from stages.kinds.distill.teaching import MethodBase
from stages.kinds.kind import Found, RunBlocks
from stages.kinds.rules import At

SELF = "self"  # in place of a teacher's name
PROMPT, CONTEXT = "{prompt}", "{context}"  # in a template


class SelfTeacherSettings(Settings):
    """The teacher `self`: an average of the student that reads more than the student does."""

    ema_decay: Fraction = Field(
        default=0.99,
        description="weight of the old average of the student's weights at every update. 0: the"
        " student itself, without a second model; 1: what the stage starts from, for ever",
    )
    context: Literal["answer", "demonstration", "sibling", "column"] = Field(
        default="answer",
        description="what it reads with the prompt. answer: the reference answer. demonstration: a"
        " right response to the prompt, of the domain's `demonstrations`. sibling: another right"
        " response of the group, by the domain's rewards. column: a column of the prompt's row",
    )
    column: str | None = Field(default=None, description="the column of `context: column`")
    template: str = Field(
        default=f"Right answer: {CONTEXT} Problem: {PROMPT}",
        description="text that it reads instead of the prompt; of chat messages, instead of the"
        " last one's content",
    )


def self_teacher_rules(
    at: At,
    teacher: SelfTeacherSettings,
    method: MethodBase,
    group_size: int,
    run: RunBlocks,
    taught: Sequence[str],
) -> Found:
    """Check the teacher of the domains that the student itself teaches.

    Of a block with for_each, `taught` are those of one stage.
    """
    block = at("self_teacher")
    for placeholder in (PROMPT, CONTEXT):
        if placeholder not in teacher.template:
            yield f"{block}.template", f"must contain {placeholder}"
    if teacher.context == "column" and teacher.column is None:
        yield f"{block}.column", "required with context: column"
    if teacher.context != "column" and teacher.column is not None:
        why = f"only read with context: column, and this is {teacher.context}; use null"
        yield f"{block}.column", why
    if not taught:
        return
    if teacher.context == "sibling" and group_size < 2:
        why = "a response alone in its group has no sibling to learn from; use 2 or more"
        yield at("sampling.group_size"), why
    if method.needs_rewards:
        yield (
            at("method.name"),
            f"{method.name} adds rewards, but a response without a context for the teacher self is"
            " masked, and would lose its reward too; use a method without rewards",
        )
    if method.start_model is not None:
        yield (
            at("method.name"),
            f"{method.name} extrapolates what teachers learned since their start, and the teacher"
            " self has learned nothing that the student has not: it only reads more; use another"
            " method",
        )
    for domain in taught:
        yield from _context_rules(block, teacher, run, domain)


def _context_rules(block: str, teacher: SelfTeacherSettings, run: RunBlocks, domain: str) -> Found:
    """Check that a domain can have contexts."""
    of = run.domains[domain]
    prompts, generated = of.prompts, isinstance(of.prompts, ReasoningGymPromptSettings)
    if teacher.context == "answer" and isinstance(prompts, FilePromptSettings):
        if prompts.answer is None:
            yield (
                f"{block}.context",
                f"answer, but domains.{domain}.prompts.answer is null: no row has one; name its"
                " column, or use another context",
            )
    elif teacher.context == "column" and generated:
        yield (
            f"{block}.context",
            f"column, but the prompts of domains.{domain} are generated, and have no columns; use"
            " another context",
        )
    elif teacher.context == "demonstration":
        demonstrates = isinstance(of.demonstrations, GeneratedDemonstrationSettings)
        if demonstrates and not generated:
            yield (
                f"{block}.context",
                f"demonstration, but domains.{domain}.demonstrations are generated, which requires"
                f" prompts.source: reasoning_gym, not {prompts.source}; use demonstrations of"
                " source jsonl or parquet, or another context",
            )
