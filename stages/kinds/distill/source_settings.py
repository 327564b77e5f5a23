"""The sources of a merge beside its teachers: the student itself as one, and sequences as data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from parallel.settings import Fraction, Settings
from stages.data.settings import (
    FilePromptSettings,
    GeneratedDemonstrationSettings,
    ReasoningGymPromptSettings,
)
from stages.domains import SamplingSettings
from stages.kinds.distill.teaching import MethodBase
from stages.kinds.kind import RunBlocks, Violations
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
) -> Violations:
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


def _context_rules(
    block: str, teacher: SelfTeacherSettings, run: RunBlocks, domain: str
) -> Violations:
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


class CollectedDataSettings(Settings):
    """The responses to a domain's prompts that a stage collected."""

    stage: str = Field(
        description="a stage that collects responses, or the path of its directory in another run"
    )


def given_prompts(share: float, sampling: SamplingSettings) -> int:
    """Return how many of a step's prompt groups of a domain are data instead of samples."""
    return round(share * sampling.prompts_per_step)


def merge_data_rules(
    at: At,
    share: float,
    data: Mapping[str, CollectedDataSettings],
    method: MethodBase,
    sampling: SamplingSettings,
    run: RunBlocks,
    domains: Sequence[str],
    self_taught: Sequence[str],
) -> Violations:
    """Check the share of data, and what each domain takes it from."""
    if not share:
        if data:
            yield at("data"), "only read with data_share above 0; set that, or delete it"
        return
    per_step, data_prompts = sampling.prompts_per_step, given_prompts(share, sampling)
    whole = math.isclose(share * per_step, data_prompts, abs_tol=1e-6)
    if not whole or not 0 < data_prompts < per_step:
        yield (
            at("data_share"),
            f"{share:g} x {at('sampling.prompts_per_step')} = {per_step} must be a whole number of"
            f" a step's groups, from 1 to {per_step - 1}; change either",
        )
    if method.samples:
        yield (
            at("data_share"),
            f"method {method.name} estimates a gradient from what the student samples, which data"
            " is not; use a method over the vocabulary, or 0",
        )
    for name in self_taught:
        yield (
            at("data_share"),
            f"the teacher of {name} is self, which grades the student's own samples: a"
            " demonstration would be graded by a teacher that reads it; name another teacher, or"
            " use 0",
        )
    for name in domains:
        of = run.domains[name]
        generated = isinstance(of.demonstrations, GeneratedDemonstrationSettings)
        if name in data or not generated or isinstance(of.prompts, ReasoningGymPromptSettings):
            continue
        yield (
            at("data_share"),
            f"domains.{name}.demonstrations are generated, which requires prompts.source:"
            f" reasoning_gym, not {of.prompts.source}; use source jsonl or parquet there, or name"
            f" a stage in data.{name}",
        )
