"""The kinds of stages, and the names of a run's stages. Never imports torch."""

from __future__ import annotations

from typing import Literal

Kind = Literal["import", "sft", "grpo", "mixed", "distill", "gate", "evaluate", "export"]

LEAVING_CHECKPOINTS: tuple[Kind, ...] = ("import", "sft", "grpo", "mixed", "distill")
MEASURING: tuple[Kind, ...] = ("gate", "evaluate")
SAMPLING: tuple[Kind, ...] = ("grpo", "mixed", "distill", *MEASURING)

COLD_START, INITIAL = "cold_start", "initial"  # a run has one of the two, its first stage
EXPERT = "experts."
GATE = "gates."


def settings_key(stage: str) -> str:
    """Return the key of a stage's settings: `domains.A` for `round_2.experts.A`, else its name."""
    return f"domains.{stage.rpartition(EXPERT)[2]}" if EXPERT in stage else stage
