"""Advantages against vectors computed by hand, and inputs they ignore."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from stages.objectives.graded import Graded, compute_advantages, constant
from stages.objectives.loss import AdvantageSettings
from stages.objectives.registry import ADVANTAGES
from tests.stages.objectives.objective_cases import assert_close, real

VECTOR_1 = [1, 0, 1, 0.5]
WITHOUT_A_CRITIC = [name for name in ADVANTAGES if name != "gae"]
OF_GROUPS = [name for name in WITHOUT_A_CRITIC if name != "reinforce_pp"]


def settings(name: str, **more: Any) -> AdvantageSettings:
    return TypeAdapter(AdvantageSettings).validate_python({"name": name, **more})


def graded(rewards: list[list[float]], **more: Any) -> Graded:
    """Return graded responses of lengths 1, 2, ... in every group.

    The rewards are their only part, and every response is one step.
    """
    values = real(rewards)
    lengths = torch.arange(1, values.shape[1] + 1).expand(values.shape)
    fields: dict[str, Any] = {
        "rewards": values,
        "mask": torch.ones(values.shape, dtype=torch.bool),
        "lengths": lengths,
        "part_rewards": values.unsqueeze(-1),
        "weights": real([1.0]),
        "step_rewards": values.unsqueeze(-1),
        "step_ends": (lengths - 1).unsqueeze(-1),
    }
    return Graded(**{**fields, **more})


def of_responses(advantages: Tensor) -> Tensor:
    """Return [groups, G]: the advantage of a response, or of its first token."""
    return advantages[..., 0]


@pytest.mark.parametrize(
    ("name", "std", "expected"),
    [
        ("grpo", "population", [0.904534, -1.507557, 0.904534, -0.301511]),
        ("grpo", "sample", [0.783349, -1.305582, 0.783349, -0.261116]),
        ("dr_grpo", None, [0.375, -0.625, 0.375, -0.125]),  # v32
        ("rloo", None, [0.5, -0.833333, 0.5, -0.166667]),
    ],
)
def test_vector_1(name: str, std: str | None, expected: list[float]) -> None:
    advantages = compute_advantages(
        graded([VECTOR_1]), settings(name, **({"std": std} if std else {}))
    )
    # Adding 1e-6 to the standard deviation moves the fifth digit of the vector's values.
    assert_close(of_responses(advantages), [expected], tolerance=5e-6)


def test_vector_12() -> None:
    part_rewards = real([[1.0, 0.1], [0.0, 0.2], [1.0, 0.3], [0.0, 0.4]]).unsqueeze(0)
    batch = graded([[1.1, 0.2, 1.3, 0.4]], part_rewards=part_rewards, weights=real([1.0, 1.0]))
    expected = [-0.3416, -1.4472, 1.4472, 0.3416]
    advantages = compute_advantages(batch, settings("mo_grpo", std="population"))
    assert_close(of_responses(advantages), [expected], tolerance=5e-5)
    # GDPO divides by their deviation: the mean of the squares is (.3416^2 + 1.4472^2) / 2.
    divisor = ((0.3416**2 + 1.4472**2) / 2) ** 0.5
    advantages = compute_advantages(batch, settings("gdpo", std="population"))
    assert_close(
        of_responses(advantages), [[value / divisor for value in expected]], tolerance=5e-5
    )


def test_parts_are_weighted_after_they_are_standardised() -> None:
    part_rewards = real([[1.0, 100.0], [0.0, 300.0]]).unsqueeze(0)
    batch = graded([[0.0, 1.0]], part_rewards=part_rewards, weights=real([2.0, 0.5]))
    advantages = compute_advantages(batch, settings("mo_grpo", std="population"))
    assert_close(of_responses(advantages), [[1.5, -1.5]], tolerance=5e-6)


def test_the_baseline_of_reinforce_pp_is_the_whole_batch() -> None:
    rewards = [[1.0, 0.0, 1.0], [4.0, 4.0, 4.0]]
    flat = [value for group in rewards for value in group]
    mean, deviation = statistics.mean(flat), statistics.stdev(flat)
    advantages = compute_advantages(graded(rewards), settings("reinforce_pp"))
    expected = [[(value - mean) / deviation for value in group] for group in rewards]
    assert_close(of_responses(advantages), expected, tolerance=5e-6)
    centred = [1 / 3, -2 / 3, 1 / 3, 0, 0, 0]
    deviation = statistics.stdev(centred)
    advantages = compute_advantages(graded(rewards), settings("reinforce_pp_baseline"))
    assert_close(
        of_responses(advantages).flatten(), [c / deviation for c in centred], tolerance=5e-6
    )


@pytest.mark.parametrize("std", ["sample", "population"])
def test_reinforce_pp_over_tokens_counts_a_response_by_its_length(std: str) -> None:
    batch = graded([[1.0, 0.0, 1.0], [4.0, 2.0, 9.0]])  # of 1, 2 and 3 tokens
    useful = torch.tensor([[True, True, True], [True, True, False]])
    batch = replace(batch, mask=useful)
    tokens = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 4.0, 2.0, 2.0]
    mean = statistics.mean(tokens)
    deviation = {"sample": statistics.stdev, "population": statistics.pstdev}[std](tokens)
    expected = [[(value - mean) / deviation for value in (1, 0, 1)]]
    expected += [[(4 - mean) / deviation, (2 - mean) / deviation, 0.0]]
    advantages = compute_advantages(batch, settings("reinforce_pp", over="tokens", std=std))
    assert_close(of_responses(advantages), expected, tolerance=5e-6)


@pytest.mark.parametrize("std", ["sample", "population"])
def test_reinforce_pp_baseline_over_tokens_whitens_as_verl(std: str) -> None:
    """verl: scores less their group's mean, tiled over tokens, masked_whiten (mean and std)."""
    batch = graded([[1.0, 0.0, 1.0], [4.0, 2.0, 9.0], [3.0, 3.0, 3.0]])  # of 1, 2 and 3 tokens
    useful = torch.ones(3, 3, dtype=torch.bool)
    useful[1, 2] = False
    batch = replace(batch, mask=useful)
    scores = [[1 / 3, -2 / 3, 1 / 3], [1.0, -1.0], [0.0, 0.0, 0.0]]
    tokens = [
        score
        for group_scores in scores
        for n, score in enumerate(group_scores, 1)
        for _ in range(n)
    ]
    mean = statistics.mean(tokens)
    deviation = {"sample": statistics.stdev, "population": statistics.pstdev}[std](tokens)
    expected = [[(score - mean) / deviation for score in group_scores] for group_scores in scores]
    expected[1].append(0.0)  # not graded
    how = settings("reinforce_pp_baseline", over="tokens", std=std)
    advantages = of_responses(compute_advantages(batch, how))
    assert_close(advantages, expected, tolerance=5e-6)
    assert advantages[2].all()  # tokens of unlike length give a zero-variance group an advantage
    assert how.zero_variance_teaches


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "reinforce_pp_baseline", "gdpo"])
def test_group_advantages_sum_to_zero(name: str) -> None:
    rewards = torch.rand(5, 8, generator=torch.Generator().manual_seed(0)).tolist()
    advantages = of_responses(compute_advantages(graded(rewards), settings(name)))
    assert_close(advantages.sum(-1), [0.0] * 5, tolerance=1e-12)


@pytest.mark.parametrize("name", OF_GROUPS)
def test_a_zero_variance_group_gets_exactly_zero(name: str) -> None:
    batch = graded([[0.1] * 7, [0.3] * 7, [1.0] * 6 + [0.0]])
    assert constant(batch.rewards, batch.mask).flatten().tolist() == [True, True, False]
    advantages = compute_advantages(
        batch, settings(name, **({"keep": 7} if name == "gfpo" else {}))
    )
    assert not advantages[:2].any()
    assert of_responses(advantages)[2].all()


@pytest.mark.parametrize("name", WITHOUT_A_CRITIC)
def test_ungraded_responses_change_nothing(name: str) -> None:
    whole = graded([[1.0, 0.0, 0.5], [0.0, 1.0, 0.0]])
    mask = torch.tensor([[True, True, True, False], [False, True, True, True]])
    nan = float("nan")
    rewards = real([[1.0, 0.0, 0.5, nan], [nan, 0.0, 1.0, 0.0]])
    lengths = torch.tensor([[1, 2, 3, 1], [1, 1, 2, 3]])
    holes = graded(
        rewards.tolist(), mask=mask, lengths=lengths, step_ends=(lengths - 1).unsqueeze(-1)
    )
    advantages = compute_advantages(holes, settings(name))
    assert not advantages[~mask].any()
    assert_close(
        advantages[mask], compute_advantages(whole, settings(name)).flatten(0, 1), tolerance=1e-14
    )


def test_reinforce_pp_needs_no_second_response_to_a_prompt() -> None:
    advantages = of_responses(
        compute_advantages(graded([[1.0], [0.0], [1.0]]), settings("reinforce_pp"))
    )
    deviation = statistics.stdev([1, 0, 1])
    assert_close(
        advantages.flatten(), [x / deviation for x in (1 / 3, -2 / 3, 1 / 3)], tolerance=5e-6
    )


@pytest.mark.parametrize("name", OF_GROUPS)
def test_a_single_graded_response_has_no_advantage(name: str) -> None:
    mask = torch.tensor([[True, False], [True, True], [False, False]])
    batch = graded([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], mask=mask)
    advantages = compute_advantages(batch, settings(name))
    assert not advantages[0].any()
    assert advantages[1].any()
    assert not advantages[2].any()
    assert batch.comparable.tolist() == [False, True, False]
    nobody = graded([[1.0, 0.0]], mask=torch.zeros(1, 2, dtype=torch.bool))
    assert compute_advantages(nobody, settings(name)).tolist() == [[[0.0], [0.0]]]


def test_gfpo_learns_only_from_kept_responses() -> None:
    batch = graded([[1.0, 0.0, 1.0, 0.0]], lengths=torch.tensor([[9, 5, 5, 4]]))
    shortest = compute_advantages(batch, settings("gfpo", keep=3, std="population"))
    # Kept are rewards 0, 1, 0, of mean 1/3 and deviation sqrt(2)/3.
    expected = [0.0, -(0.5**0.5), 2**0.5, -(0.5**0.5)]
    assert_close(of_responses(shortest), [expected], tolerance=5e-6)
    densest = compute_advantages(batch, settings("gfpo", keep=2, by="reward_per_token"))
    assert not of_responses(densest).any()  # both kept are right
    everything = compute_advantages(batch, settings("gfpo", keep=99))
    assert_close(
        of_responses(everything), of_responses(compute_advantages(batch, settings("grpo")))
    )


def test_a_token_gets_the_rewards_of_its_step_and_later_ones() -> None:
    steps = real([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 0.0], [7.0, 7.0]]])
    ends = torch.tensor([[[1, 3], [0, -1]], [[-1, -1], [0, 2]]])
    batch = graded(
        [[0.5, 1.0], [0.0, 7.0]],  # the means of the steps
        lengths=torch.tensor([[5, 2], [1, 3]]),
        step_rewards=steps,
        step_ends=ends,
    )
    advantages = compute_advantages(batch, settings("process", std="population"))
    # The steps of the first group: 1, 0 and 1, of mean 2/3 and deviation sqrt(2)/3.
    right, wrong = 0.5**0.5, -(2**0.5)
    expected = [
        [right + wrong, right + wrong, wrong, wrong, 0.0],
        [right, 0.0, 0.0, 0.0, 0.0],
    ]
    assert_close(advantages[0], expected, tolerance=5e-6)
    assert not advantages[1].any()  # all rewards of its steps are equal
    # The rest of a reward is added to every token, as in `grpo`: here a punishment.
    punished = replace(batch, rewards=batch.rewards - real([[1.0, 0.0], [0.0, 0.0]]))
    change = compute_advantages(punished, settings("process", std="population")) - advantages
    assert_close(change[0], [[-1.0] * 5, [1.0] * 5], tolerance=5e-6)
    assert not change[1].any()


@pytest.mark.parametrize(
    ("name", "message"),
    [("mo_grpo", "without parts"), ("gdpo", "without parts"), ("process", "a response's steps")],
)
def test_missing_parts_and_steps_are_reported(name: str, message: str) -> None:
    plain = graded([VECTOR_1], part_rewards=None, weights=None, step_rewards=None, step_ends=None)
    with pytest.raises(ValueError, match=message):
        compute_advantages(plain, settings(name))
