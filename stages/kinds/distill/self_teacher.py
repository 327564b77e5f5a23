"""The teacher `self` of a merge: an average of the student that reads a privileged context.

It grades the student's own responses after a prompt that also has, for example, the answer: what it
knows more is in the prompt, and not in the weights (SDFT, arXiv 2601.19897; SDPO, 2601.20802).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from parallel.batch import MicroBatch, RankPlace, collate
from parallel.model.kept_logits import HiddenStates
from parallel.model.policy import TrainedPolicy
from parallel.sample import Sample
from stages.data.demonstrations import conversation_index, demonstrate
from stages.data.problem import ASSISTANT, DomainError, Problem
from stages.data.prompts import row_of
from stages.data.settings import GeneratedDemonstrationSettings, template_of
from stages.data.tokenizer import Tokenizer, TokenizerError
from stages.domains import DomainSettings
from stages.kinds.distill.source_settings import CONTEXT, PROMPT, SELF, SelfTeacherSettings
from stages.objectives.groups import Group, is_right, rewarded
from stages.objectives.kl import AVERAGE, KLSettings
from stages.objectives.models import Reference
from stages.settings import StageJob


class SelfTeacher:
    """The student's average, which grades the samples of `domains` by what it reads of them."""

    def __init__(
        self,
        job: StageJob,
        student: TrainedPolicy,
        settings: SelfTeacherSettings,
        domains: Sequence[str],
        hidden_states: HiddenStates,
    ) -> None:
        """Keep what it grades in `hidden_states`, as other teachers do."""
        self._student, self._domains, self._states = student, domains, hidden_states
        self._average: Reference | None = None
        if settings.ema_decay > 0:  # at 0 the average is the student
            moving = KLSettings(reference=AVERAGE, ema_decay=settings.ema_decay)
            weights = moving if settings.ema_decay < 1 else KLSettings()
            self._average = Reference(job, student, weights, SELF)

    def grade(self, batches: list[MicroBatch]) -> None:
        """Keep its logits in the domains' micro-batches. Collective."""
        ours = [micro_batch for micro_batch in batches if micro_batch.domain in self._domains]
        if not ours:
            return
        theirs = [with_teacher_prompts(micro_batch) for micro_batch in ours]
        if self._average is None:
            logits = self._student.response_logits(theirs)
        else:
            self._average.compute_logprobs(theirs, 1.0, logits=True)
            logits = [
                micro_batch.reference for micro_batch in theirs if micro_batch.reference is not None
            ]
        # `logits` is empty except on the last pipeline stage.
        for micro_batch, prompted, head_logits in zip(ours, theirs, logits, strict=False):
            hidden = aligned(head_logits.hidden, prompted, micro_batch)
            micro_batch.teachers = [self._states.keep(replace(head_logits, hidden=hidden))]

    def update(self) -> None:
        """Move the average towards the student after an update."""
        if self._average is not None:
            self._average.update_ema()


class Contexts:
    """The privileged contexts of prompts and samples, and the teacher's prompts with them.

    Main rank only.
    """

    def __init__(
        self,
        settings: SelfTeacherSettings,
        domains: dict[str, DomainSettings],
        tokenizer: Tokenizer,
        max_tokens: int,
    ) -> None:
        """Make contexts for `domains`; no prompt with its response exceeds `max_tokens`."""
        self._settings, self._domains = settings, domains
        self._tokenizer, self._most = tokenizer, max_tokens

    def assign(self, groups: Sequence[Group]) -> dict[str, float]:
        """Set the teacher's prompt of every sample of the domains; return metrics.

        A sample that has none, since there is no context or it is too long, is masked.

        Raises:
            DomainError: a row lacks the column of the context.
            TokenizerError: a context or the template has characters without ids.
        """
        samples, missing, too_long = Counter[str](), Counter[str](), Counter[str]()
        for group in groups:
            domain = group.problem.domain
            if domain not in self._domains:
                continue
            for sample, context in zip(group.samples, self._contexts(group), strict=True):
                samples[domain] += 1
                prompt = None if context is None else self._prompt(group.problem, context)
                if prompt is not None and len(prompt) + len(sample.response) - 1 <= self._most:
                    sample.teacher_prompt = prompt
                    continue
                (missing if prompt is None else too_long)[domain] += 1
                sample.loss_mask = np.zeros(len(sample.response), bool)
        return {
            **{f"no_context/{name}": missing[name] / samples[name] for name in samples},
            **{f"context_too_long/{name}": too_long[name] / samples[name] for name in samples},
        }

    def _contexts(self, group: Group) -> list[str | None]:
        """Return the context of each sample of a group; None where it has none."""
        if self._settings.context == "sibling":
            return self._siblings(group)
        return [self._of_problem(group.problem) or None] * len(group.samples)

    def _siblings(self, group: Group) -> list[str | None]:
        """Return for each sample the next right response of its group, in a circle."""
        samples, rewards = group.samples, self._domains[group.problem.domain].rewards
        right = {id(sample) for sample in rewarded(group) if is_right(sample, rewards)}
        siblings: list[str | None] = []
        for place in range(len(samples)):
            candidates = [*samples[place + 1 :], *samples[:place]]
            sibling = next((candidate for candidate in candidates if id(candidate) in right), None)
            siblings.append(None if sibling is None else self._text(sibling))
        return siblings

    def _text(self, sample: Sample) -> str | None:
        return self._tokenizer.decode(sample.response) or None

    def _of_problem(self, problem: Problem) -> str:
        """Return the context of all samples of a problem, "" where it has none."""
        if self._settings.context == "answer":
            return problem.answer
        if self._settings.context == "demonstration":
            return self._demonstration(problem)
        column = self._settings.column
        assert column is not None
        if column not in problem.fields:
            raise DomainError(
                problem.domain,
                "prompts",
                f"the row of {problem.prompt!r} has no column {column!r}, which"
                " self_teacher.column names; columns:"
                f" {', '.join(map(repr, problem.fields)) or 'none'}",
            )
        value = problem.fields[column]
        return value if isinstance(value, str) else "" if value is None else str(value)

    def _demonstration(self, problem: Problem) -> str:
        """Return a right response that is demonstrated for the very prompt."""
        domain = self._domains[problem.domain]
        settings = domain.demonstrations
        if isinstance(settings, GeneratedDemonstrationSettings):
            return demonstrate(problem, worked=True, random=Random(0)).response
        template = template_of(domain.prompts)
        index = conversation_index(settings, problem.domain, template=template)
        for shown, tools in map(index.read, index.rows_of(problem.key).tolist()):
            if tools not in ((), problem.tools):
                continue  # it may call what this prompt does not offer
            if isinstance(shown, tuple):
                return str(shown[1])
            return next(str(turn["content"]) for turn in shown if turn["role"] == ASSISTANT)
        return ""

    def _prompt(self, problem: Problem, context: str) -> np.ndarray:
        """Return the teacher's prompt: the template, with both; of chat messages the last one."""

        def filled(prompt: str) -> str:
            # In one pass: a context may spell {prompt} itself.
            texts = {PROMPT: prompt, CONTEXT: context}
            pattern = "|".join(map(re.escape, texts))
            return re.sub(pattern, lambda match: texts[match[0]], self._settings.template)

        try:
            if problem.messages is None:
                text = filled(problem.prompt)
            else:
                *before, last = problem.messages
                messages = [*before, {**last, "content": filled(last["content"])}]
                text = self._tokenizer.render(messages, generation_prompt=True, tools=problem.tools)
            return np.array(self._tokenizer.encode(text), np.int32)
        except TokenizerError as error:
            row = row_of(problem, self._domains[problem.domain].prompts)
            raise TokenizerError(
                f"{error}; in what the teacher self of {problem.domain} reads of {row}"
            ) from error


def with_teacher_prompts(batch: MicroBatch) -> MicroBatch:
    """Return the batch as its teacher reads it, which routes by itself.

    It has the samples of `batch` in their order, and so the same responses and masks. A sample
    without a prompt for the teacher keeps its own.
    """
    samples = [
        sample
        if sample.teacher_prompt is None
        else replace(sample, prompt=sample.teacher_prompt, teacher_prompt=None)
        for sample in batch.samples
    ]
    return replace(collate(samples, RankPlace.here(), replay=False), domain=batch.domain)


def aligned(hidden: Tensor, theirs: MicroBatch, ours: MicroBatch) -> Tensor:
    """Return hidden states [n, H] at the response tokens of `ours` that this rank predicts.

    hidden [m, H] are at those that it predicts of `theirs`. Context parallelism cuts sequences by
    their length: with another prompt, another rank may predict a token. Each token is predicted by
    one rank, so that the sum over ranks is exact. Collective over the context-parallel ranks.
    """
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return hidden  # in both the tokens are in the order of the samples
    whole = hidden.new_zeros(ours.mask.numel(), hidden.shape[1])
    whole[theirs.place] = hidden
    dist.all_reduce(whole, group=group)
    return whole[ours.place]
