"""How much better a response was than the others to its prompt (algorithms, section 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stages.objectives.settings import AdvantageSettings

if TYPE_CHECKING:
    from torch import Tensor

STD_FLOOR = 1e-6


def group_advantages(rewards: Tensor, settings: AdvantageSettings) -> Tensor:
    """The advantage of every response within its group.

    `rewards` is [..., G] floating point, the last axis holding the responses to one prompt; the
    result has its shape and dtype. A zero-variance group gets exactly 0, whatever the rounding.
    """
    advantages = ADVANTAGES[settings.name](rewards, settings)
    return advantages.masked_fill(zero_variance(rewards).unsqueeze(-1), 0.0)


def zero_variance(rewards: Tensor) -> Tensor:
    """Which groups [...] of `rewards` [..., G] reward every response alike and so teach nothing."""
    return rewards.amax(-1) == rewards.amin(-1)


def grpo(rewards: Tensor, settings: AdvantageSettings) -> Tensor:
    """(R - mean) / (std + 1e-6), with the standard deviation `settings.std` (arXiv 2402.03300)."""
    centred = dr_grpo(rewards, settings)
    size = rewards.shape[-1]
    divisor = size if settings.std == "population" else max(size - 1, 1)
    std = (centred.square().sum(-1, keepdim=True) / divisor).sqrt()
    return centred / (std + STD_FLOOR)


def dr_grpo(rewards: Tensor, settings: AdvantageSettings) -> Tensor:
    """R - mean: without the division, easy and hard prompts weigh alike (arXiv 2503.20783)."""
    return rewards - rewards.mean(-1, keepdim=True)


ADVANTAGES: dict[str, Callable[[Tensor, AdvantageSettings], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
}
