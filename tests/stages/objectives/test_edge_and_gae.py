"""EDGE (vector 13), generalised advantages and the value loss."""

from __future__ import annotations

import torch

from stages.objectives.advantages.gae import GaeSettings, clipped_value_loss, gae
from stages.objectives.groups import edge
from tests.stages.objectives.objective_cases import MASK, assert_close, draws, real, slope


def test_vector_13() -> None:
    entropies = real([1.0, 3.0])
    means = entropies.mean().expand(2)
    assert_close(entropies / means, [0.5, 1.5])
    assert_close(edge(real([[3.0], [3.0]]), entropies, means), [[6.0], [2.0]], tolerance=1e-12)


def test_an_entropy_of_0_is_not_divided_by() -> None:
    scaled = edge(real([[1.0, -1.0], [2.0, 2.0]]), real([0.0, 0.0]), real([1.0, 0.0]))
    assert_close(scaled, [[10.0, -10.0], [20.0, 20.0]])


def settings(discount: float, decay: float) -> GaeSettings:
    return GaeSettings.model_validate({"gamma": discount, "lambda": decay})


def test_gae_by_hand() -> None:
    """delta = [.5, -.1, 1 - .4] with gamma .5; A_2 = .6, A_1 = -.1 + .45 A_2, and so on."""
    nan = float("nan")
    rewards, values = real([[0.8, 0.0, 1.0, nan]]), real([[0.4, 0.2, 0.4, nan]])
    mask = torch.tensor([[True, True, True, False]])
    deltas = [0.8 + 0.5 * 0.2 - 0.4, 0.5 * 0.4 - 0.2, 1.0 - 0.4]
    last = deltas[2]
    middle = deltas[1] + 0.45 * last
    first = deltas[0] + 0.45 * middle
    advantages = gae(rewards, values, mask, settings(0.5, 0.9))
    assert_close(advantages, [[first, middle, last, 0.0]], tolerance=1e-12)


def test_gae_at_the_bounds_of_lambda() -> None:
    """A lambda of 1 leaves the return less the value; 0 the error of one step."""
    rewards, values = (draw + 0.5 for draw in draws(2))
    returns = rewards.masked_fill(~MASK, 0.0).flip(-1).cumsum(-1).flip(-1)
    whole = gae(rewards, values, MASK, settings(1.0, 1.0))
    assert_close(whole, (returns - values).masked_fill(~MASK, 0.0), tolerance=1e-12)
    alone = gae(rewards, values, MASK, settings(1.0, 0.0))
    following = torch.cat([values[:, 1:], torch.zeros(4, 1)], 1) * torch.cat(
        [MASK[:, 1:], torch.zeros(4, 1, dtype=torch.bool)], 1
    )
    expected = (rewards + following - values).masked_fill(~MASK, 0.0)
    assert_close(alone, expected, tolerance=1e-12)


def test_the_value_loss_is_clipped() -> None:
    values = real([0.0, 0.15, 0.5, -0.5]).requires_grad_()
    old, targets = torch.zeros_like(values), real([1.0, 1.0, 1.0, 1.0])
    loss = clipped_value_loss(values, old, targets, clip=0.2)
    loss.sum().backward()
    # 0.5 is clipped to 0.2, further from the target; -0.5 is worse than -0.2 and learns.
    assert_close(loss, [0.5, 0.85**2 / 2, 0.8**2 / 2, 1.5**2 / 2], tolerance=1e-12)
    assert values.grad is not None
    assert_close(values.grad, [-1.0, -0.85, 0.0, -1.5], tolerance=1e-12)
    start = values.detach() + 0.01
    numeric = slope(lambda v: clipped_value_loss(v, old, targets, 0.2).sum(), start)
    again = start.clone().requires_grad_()
    clipped_value_loss(again, old, targets, 0.2).sum().backward()
    assert again.grad is not None
    assert_close(again.grad, numeric, tolerance=1e-7)
