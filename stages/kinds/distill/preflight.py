"""A look at a merge's teachers on the student's first samples, before any update."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.core import parallel_state

from parallel.batch import Responses
from parallel.distributed import gather, is_main
from parallel.errors import report_notice
from parallel.model import vocabulary
from parallel.model.vocabulary import HeadLogits
from stages.data.tokenizer import Tokenizer
from stages.kinds.distill.settings import domain_of

NEXT_TO_NOTHING = 1e-6  # of a teacher's probability
LIKELY = 0.1  # of the student's
SHOWN = 5  # tokens in a warning


@dataclass
class _Seen:
    """The KL of the student to a teacher, in nats a token, and the tokens that it knows nothing of.

    `most` is the largest |KL| of a micro-batch's share.
    """

    kl: float = 0.0
    most: float = 0.0
    tokens: int = 0
    disjoint: Counter[int] = field(default_factory=Counter)

    def add(self, other: _Seen) -> None:
        self.kl += other.kl
        self.most = max(self.most, other.most)
        self.tokens += other.tokens
        self.disjoint += other.disjoint


class Preflight:
    """The comparison of student and teachers on the samples of the first step.

    Teachers are known by their names in metrics: DOMAIN, or DOMAIN/TEACHER of several; `models` has
    what a message calls each. It costs no forward pass: two more passes of the heads over hidden
    states that the step has anyway.
    """

    def __init__(self, stage: str, tokenizer: Tokenizer, models: Mapping[str, str]) -> None:
        self._stage, self._tokenizer, self._models = stage, tokenizer, models
        self._seen: dict[str, _Seen] = {}

    def observe(self, teacher: str, responses: Responses, logits: HeadLogits, kl: float) -> None:
        """Add a micro-batch: the `teacher` of its samples, whose logits these are, and its KL.

        `kl` is its share of the mean over the step's tokens. Collective over tensor-parallel ranks.
        """
        micro_batch = responses.batch
        if micro_batch.demonstrated:
            return
        ours = responses.logits
        student = ours if isinstance(ours, HeadLogits) else ours.detach()
        ids = micro_batch.own_targets
        log_p, log_q = vocabulary.logprobs(student, ids), vocabulary.logprobs(logits, ids)
        apart = (log_q < math.log(NEXT_TO_NOTHING)) & (log_p > math.log(LIKELY))
        seen = _Seen(kl, abs(kl), len(ids), Counter(ids[apart].tolist()))
        self._seen.setdefault(teacher, _Seen()).add(seen)

    def report(self) -> dict[str, float]:
        """Log what was seen on all ranks, warn, and return the metrics. Collective."""
        whole: dict[str, _Seen] = {}
        # Tensor-parallel ranks have seen the same tokens; a KL is one for all context-parallel.
        first_tensor_rank = parallel_state.get_tensor_model_parallel_rank() == 0
        first_context_rank = parallel_state.get_context_parallel_rank() == 0
        for rank_seen in gather((first_tensor_rank, first_context_rank, self._seen)):
            of_tokens, of_kl, teachers = rank_seen
            for teacher, seen in teachers.items() if of_tokens else ():
                kl = seen.kl if of_kl else 0.0
                counted = _Seen(kl, seen.most, seen.tokens, seen.disjoint)
                whole.setdefault(teacher, _Seen()).add(counted)
        self._seen = {}
        whole = {teacher: seen for teacher, seen in sorted(whole.items()) if seen.tokens}
        if is_main() and whole:
            self._log(whole)
        return {
            **{f"preflight_kl/{teacher}": seen.kl for teacher, seen in whole.items()},
            **{
                f"disjoint_tokens/{teacher}": seen.disjoint.total() / seen.tokens
                for teacher, seen in whole.items()
            },
        }

    def _log(self, whole: dict[str, _Seen]) -> None:
        kls = ", ".join(f"{name} {seen.kl:.4g} nats" for name, seen in whole.items())
        print(f"{self._stage}: KL of the student to its teachers, by domain: {kls}", flush=True)
        for teacher, seen in whole.items():
            domain, model = domain_of(teacher), self._models[teacher]
            who = f"stages.{self._stage}: the teacher of {domain}, {model},"
            if seen.most == 0:
                report_notice(
                    f"{who} equals the student, and teaches nothing; name another one, or see why "
                    "its training changed nothing: no reward, or none that differ"
                )
            if seen.disjoint:
                common = seen.disjoint.most_common(SHOWN)
                tokens = ", ".join(f"{self._shown(token)} {n} times" for token, n in common)
                report_notice(
                    f"{who} gives less than {NEXT_TO_NOTHING:g} to {seen.disjoint.total()} of"
                    f" {seen.tokens} tokens that the student sampled with more than {LIKELY:g}:"
                    f" {tokens}; their supports are disjoint: check its tokenizer, its chat"
                    " template and its prompts"
                )

    def _shown(self, token: int) -> str:
        text = repr(self._tokenizer.decode_prompt([token]))
        return f"the end token {text}" if token in self._tokenizer.end_tokens else text
