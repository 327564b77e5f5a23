"""The sequences that a merge trains on beside the student's own samples (GKD, arXiv 2306.13649)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from parallel.batch import MicroBatch
from parallel.distributed import is_main, sum_over_data
from parallel.sample import Sample
from stages.data.demonstrations import ConversationStream
from stages.data.problem import seed_of
from stages.data.settings import CollectedFileSettings
from stages.data.tokenizer import load_tokenizer
from stages.kinds.distill.settings import DistillSettings
from stages.kinds.distill.source_settings import given_prompts
from stages.kinds.mixture_stage import SequenceSource, collected, demonstrated
from stages.settings import StageJob


class MergeData:
    """The demonstrations of a step, or what other stages collected, and the loss on them.

    They take the place of whole prompt groups of each domain. Main rank draws.
    """

    def __init__(self, job: StageJob, settings: DistillSettings) -> None:
        self._count = (
            given_prompts(settings.data_share, settings.sampling) * settings.sampling.group_size
        )
        self._sources: dict[str, SequenceSource] = {}
        if self._count and is_main():
            tokenizer = load_tokenizer(job.settings.model)
            self._sources = {
                name: _collected(job, name, tokenizer)
                if name in settings.data
                else demonstrated(job, name, tokenizer)
                for name in job.domains
            }
        self.drawn: list[Sample] = []  # of the present step
        self._too_long: dict[str, float] = {}
        self._losses = dict.fromkeys(job.domains, 0.0)  # of the present update, on this rank

    def draw(self, step: int) -> None:
        """Draw a step's sequences, once: a step that is tried again has the same."""
        before = {name: source.too_long for name, source in self._sources.items()}
        self.drawn = [
            replace(sample, domain=name, demonstrated=True)
            for name, source in self._sources.items()
            for sample in source.draw(step, self._count)
        ]
        self._too_long = {
            f"data_too_long/{name}": float(source.too_long - before[name])
            for name, source in self._sources.items()
        }

    @property
    def too_long(self) -> Mapping[str, float]:
        """The metrics of what the step's draw skipped."""
        return self._too_long

    def observe(self, micro_batch: MicroBatch, loss: float) -> None:
        """Add a micro-batch's share of its domain's loss, if it has data."""
        if micro_batch.demonstrated:
            self._losses[micro_batch.domain] += loss

    def metrics(self, samples: Iterable[Sample], losses: Mapping[str, float]) -> dict[str, float]:
        """Return loss and token share of data and samples, given the domains' losses. Collective.

        A domain's loss is the mean over the tokens of both.

        Example: a domain with 100 tokens of data and 300 sampled; its loss of 0.5 is 0.2 of data:
            data_loss     0.2 x 400 / 100 = 0.8    data_token_share     0.25
            sampled_loss  0.3 x 400 / 300 = 0.4    sampled_token_share  0.75
        """
        if not self._count:
            return {}
        of_data, self._losses = sum_over_data(self._losses), dict.fromkeys(self._losses, 0.0)
        tokens = {True: Counter[str](), False: Counter[str]()}
        for sample in samples:
            tokens[sample.demonstrated][sample.domain] += len(sample.learned)
        metrics = {}
        for name, loss in losses.items():
            data_tokens, sampled_tokens = tokens[True][name], tokens[False][name]
            both = data_tokens + sampled_tokens
            metrics[f"data_loss/{name}"] = of_data[name] * both / max(data_tokens, 1)
            metrics[f"sampled_loss/{name}"] = (loss - of_data[name]) * both / max(sampled_tokens, 1)
            metrics[f"data_token_share/{name}"] = data_tokens / max(both, 1)
            metrics[f"sampled_token_share/{name}"] = sampled_tokens / max(both, 1)
        return metrics

    def state(self) -> dict[str, Any]:
        """Return every source's cursor; nothing without data."""
        cursors = {name: source.cursor for name, source in self._sources.items()}
        return {"data": cursors} if self._sources else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        for name, source in self._sources.items():
            source.cursor = state["data"][name]


def _collected(job: StageJob, domain: str, tokenizer: Any) -> ConversationStream:
    """Return the source of a domain's responses in what a stage collected."""
    model, fraction = job.settings.model, job.settings.domains[domain].prompts.held_out_fraction
    rows = CollectedFileSettings(path=collected(job, domain), domain=domain, on_bad_row="skip")
    return ConversationStream(
        rows,
        tokenizer,
        domain,
        seed_of(job.settings.seed, job.seeded_as, domain, "data"),
        fraction,
        model.max_positions,
        key=f"stages.{job.block}.data.{domain}",
    )
