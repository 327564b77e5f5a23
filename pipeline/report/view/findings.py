"""Findings on a run's health, as `braid look`, the report and the end of a run show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Word = Literal[
    "learns",
    "is solved",
    "too short to say",
    "does not learn",
    "cannot learn",
    "does harm",
    "failed",
]


@dataclass(frozen=True)
class Symptom:
    """A stage's metric or state that is not as it should be: an alarm, or advice.

    `word` is the verdict on the stage that follows from it, if any; `command` shows the cause.
    """

    stage: str
    what: str
    remedy: str
    command: str
    alarm: bool = True
    word: Word | None = None

    def __str__(self) -> str:
        said = f"{self.word}: {self.what}" if self.word else self.what
        remedy = f"{self.remedy}; " if self.remedy else ""
        return f"{self.stage}: {said}; {remedy}next: {self.command}"


@dataclass(frozen=True)
class StageVerdict:
    """The verdict on a stage's training: its effect on the model in a word, and the evidence."""

    stage: str
    word: Word
    evidence: str
    alarm: bool = False

    @property
    def is_good(self) -> bool:
        """True where the stage is known to learn."""
        return self.word in ("learns", "is solved")

    def __str__(self) -> str:
        return f"{self.stage} {self.word}: {self.evidence}"


@dataclass(frozen=True)
class Health:
    """A run's symptoms, alarms first, and the verdict on each of its stages that has trained."""

    symptoms: Sequence[Symptom]
    verdicts: Sequence[StageVerdict]

    @property
    def is_well(self) -> bool:
        """True where nothing is out of its range, and every stage so far is known to learn."""
        return not self.symptoms and all(verdict.is_good for verdict in self.verdicts)
