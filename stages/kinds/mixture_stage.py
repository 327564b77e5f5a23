"""The sources of sequences, and a stage that trains on several: its draws, its state, its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Protocol

from parallel.batch import MicroBatch
from parallel.distributed import is_main
from parallel.model.policy import TrainedPolicy
from parallel.sample import Sample
from stages.data.conversations import response_sample
from stages.data.demonstrations import ConversationStream, demonstrations
from stages.data.mixture import Mixture
from stages.data.problem import seed_of
from stages.data.prompts import PromptStream
from stages.data.settings import GeneratedDemonstrationSettings, template_of
from stages.data.tokenizer import Tokenizer, load_tokenizer
from stages.directory import StageDirectory
from stages.kinds.mixture_settings import MixtureStageSettings
from stages.metrics import token_efficiency, trained_tokens
from stages.sampling.recording import record
from stages.sampling.sample_files import samples_file
from stages.settings import StageJob


class SourceStream[Drawn](Protocol):
    """An endless stream of samples or of pairs of them.

    `cursor` is its whole state, `too_long` counts what it skipped.
    """

    cursor: int
    too_long: int

    def draw(self, step: int, count: int) -> Sequence[Drawn]:
        """Return the next `count` of its sequences or pairs, for a step."""


class MixtureStage[Drawn]:
    """A stage whose main rank draws every step from `sources`, dealt by the weights in `data`.

    A subclass opens the sources on the main rank and builds the policy.
    """

    policy: TrainedPolicy

    def __init__(self, job: StageJob, stage_settings: MixtureStageSettings) -> None:
        self.job, self.settings = job, job.settings
        self.tokenizer = load_tokenizer(job.settings.model)
        self.sources: dict[str, SourceStream[Drawn]] = {}
        self.mixture = Mixture(
            {name: source.weight for name, source in stage_settings.data.items()}
        )
        self.per_step: int = getattr(stage_settings, stage_settings.counted)

    def counts(self) -> dict[str, int]:
        """Return how much of each source is in the next step."""
        return self.mixture.deal(self.per_step)

    def draw(self, step: int) -> tuple[list[Drawn], float]:
        """Return what a step trains on, and the number skipped as too long. Main rank only."""
        before = sum(source.too_long for source in self.sources.values())
        counts = self.counts()
        examples = [
            example
            for name, source in self.sources.items()
            for example in source.draw(step, counts[name])
        ]
        return examples, float(sum(source.too_long for source in self.sources.values()) - before)

    def finish_step(
        self,
        step: int,
        batches: Sequence[MicroBatch],
        samples: Sequence[Sample],
        rows: Sequence[int] = (),
    ) -> dict[str, float]:
        """Update the policy by its gradients; return the metrics that all losses have. Collective.

        With `logging.auditable` the step's samples are written, with their `rows` in the sources.
        """
        # Before the step, which moves the schedule on.
        rate = self.policy.learning_rate
        norm = self.policy.step()
        if is_main() and self.settings.logging.auditable:
            path = samples_file(self.job.files.samples, step)
            record(path, step, [samples], self.tokenizer, {}, auditable=True, rows=rows)
        return {
            **self.policy.routing_metrics(),
            **token_efficiency(batches),
            "trained_tokens": trained_tokens(samples),
            "gradient_norm": norm,
            "learning_rate": rate,
        }

    def score(self, metrics: dict[str, float]) -> float:
        """Return minus the loss."""
        return -metrics["loss"]

    def state(self) -> dict[str, Any]:
        """Return every source's cursor, and what was dealt; the main rank's state is saved."""
        cursors = {name: source.cursor for name, source in self.sources.items()}
        dealt = {"dealt": self.mixture.dealt} if self.mixture.dealt else {}
        return {"cursors": cursors, **dealt}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        for name, source in self.sources.items():
            source.cursor = state["cursors"][name]
        if self.mixture.dealt:
            self.mixture.dealt = dict(state["dealt"])


def collected(job: StageJob, name: str) -> Path:
    """Return the file of the responses that the stage of a source collected.

    Raises:
        UserError: it is damaged.
    """
    path = job.data[name]
    StageDirectory(path.parent).check_collected()
    return path


class GeneratedPool:
    """A pool of generated demonstrations, sampled with replacement; else a ConversationStream."""

    cursor = 0  # no state: a step's choice depends on its number alone
    too_long = 0

    def __init__(self, samples: list[Sample], domain: str, seed: int) -> None:
        self._samples, self._domain, self._seed = samples, domain, seed

    def draw(self, step: int, count: int) -> list[Sample]:
        """Return `count` demonstrations for a step."""
        return Random(f"{self._seed}/{self._domain}/{step}").choices(self._samples, k=count)


SequenceSource = ConversationStream | GeneratedPool


def demonstrated(job: StageJob, domain: str, tokenizer: Tokenizer) -> SequenceSource:
    """Return the source of a domain's demonstrations."""
    seed, settings = job.settings.seed, job.settings.domains[domain]
    source = settings.demonstrations
    if isinstance(source, GeneratedDemonstrationSettings):
        prompts = PromptStream(settings.prompts, tokenizer, domain, seed, job.seeded_as)
        samples = [
            response_sample(tokenizer, shown.problem.prompt, shown.response, domain)
            for shown in demonstrations(source, prompts, seed)
        ]
        return GeneratedPool(samples, domain, seed)
    order, fraction = seed_of(seed, domain, "demonstrations"), settings.prompts.held_out_fraction
    most = source.max_tokens or job.settings.model.max_positions
    template = template_of(settings.prompts)
    return ConversationStream(source, tokenizer, domain, order, fraction, most, template=template)
