"""A tensor of another shape or dtype than the types say is caught, by its name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stages.objectives.graded import Graded, compute_advantages
from stages.objectives.kl import k3
from stages.objectives.loss import GrpoAdvantageSettings, ObjectiveSettings, Totals, policy_loss
from stages.objectives.surrogate import Tokens, sequence_means
from tests.stages.objectives.objective_cases import MASK, draws
from tests.stages.objectives.shapes import functions, hints_of


def test_the_functions_carry_shapes() -> None:
    shaped = {name for _, name, function in functions() if hints_of(function)}
    assert {"policy_loss", "token_ratio", "compute_advantages"} <= {
        name for _, name, _ in functions()
    }
    assert {"grpo", "gae", "k3", "sequence_mean", "correction_weights", "sigmoid"} <= shaped
    assert {"edge", "length_weights", "exopd", "generalised_kl"} <= shaped
    assert len(shaped) > 40


def test_another_shape_is_caught() -> None:
    values, _ = draws(2)
    with pytest.raises(TypeError, match=r"sequence_means: mask must be .*, and is torch\.bool"):
        sequence_means(values, MASK[:, :3])
    with pytest.raises(TypeError, match=r"k3: reference must be "):
        k3(values, values[0], values)


def test_another_dtype_is_caught() -> None:
    values, _ = draws(2)
    with pytest.raises(TypeError, match=r"sequence_means: mask must be .*torch\.float64 \[4, 5\]"):
        sequence_means(values, MASK.double())


def test_the_fields_of_an_argument_are_checked() -> None:
    """A mask [B] broadcasts over [B, T] where B = T, and would change the loss in silence."""
    logprobs, old, engine, advantages = draws(4)
    tokens = Tokens(logprobs, old, engine, advantages, MASK)
    policy_loss(tokens, Totals(4, 9), ObjectiveSettings(), 0.0)
    wrong = replace(tokens, advantages=advantages[:, 0])
    with pytest.raises(TypeError, match=r"policy_loss: tokens\.advantages must be "):
        policy_loss(wrong, Totals(4, 9), ObjectiveSettings(), 0.0)
    rewards, mask = torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"compute_advantages: graded\.lengths must be "):
        compute_advantages(Graded(rewards, mask, rewards), GrpoAdvantageSettings())
