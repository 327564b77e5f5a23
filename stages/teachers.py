"""The teachers of a merge: the models that grade the student's samples, domain by domain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from parallel.batch import MicroBatch
from parallel.checkpoint import load
from parallel.model.policy import Policy, TrainedPolicy
from stages.settings import StageJob


class Teachers:
    """The teacher of each domain; a checkpoint that teaches several is loaded once."""

    def __init__(self, job: StageJob, student: TrainedPolicy) -> None:
        self._checkpoints: Mapping[str, Path] = job.teachers  # by domain
        self._policies: dict[Path, Policy] = {}
        for checkpoint in job.teachers.values():
            if checkpoint in self._policies:
                continue
            self._policies[checkpoint] = teacher = Policy(job.settings.model, job.settings.layout)
            student.residency.share.add(teacher.residency)
            load.weights(teacher, checkpoint)

    def of(self, domain: str) -> Policy:
        """Return the teacher of a domain."""
        return self._policies[self._checkpoints[domain]]

    def grade(self, batches: list[MicroBatch]) -> None:
        """Set every micro-batch's teacher logits. Collective."""
        for domain in self._checkpoints:  # they choose their own routes
            parts = [part for part in batches if part.domain == domain]
            logits = self.of(domain).response_logits([part.without_routes() for part in parts])
            # `logits` is empty except on the last pipeline stage.
            for part, theirs in zip(parts, logits, strict=False):
                part.teacher = theirs
