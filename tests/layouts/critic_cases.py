"""The cases that ranks run with a critic that is saved with its policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from parallel.settings import LayoutSettings
from tests.layouts.cases import MODEL, NO_LOSSES, batches, samples, train
from tests.layouts.checkpoint_cases import KINDS, STEPS, farthest_weight, same, save, snapshot
from tests.layouts.expert_cases import start_elsewhere


def build(layout: LayoutSettings, kind: str, seed: int = 0) -> tuple[Any, Any]:
    """Return a policy, and the critic that its checkpoints include."""
    from parallel.model.policy import ValueModel

    policy = KINDS[kind].build(layout, seed)
    layout = layout.model_copy(update={"distributed_optimizer": KINDS[kind].distributed})
    critic = ValueModel(MODEL, layout, KINDS[kind].settings, 10, NO_LOSSES)
    start_elsewhere(critic, Path(), head=False)
    policy.companions["critic"] = critic
    return policy, critic


def learn(policy: Any, critic: Any, steps: range) -> list[float]:
    """Train both, the critic twice as often, on given targets; return losses and norms."""
    from parallel.model.policy import values
    from stages.objectives.loss import Totals, token_mean

    measured = []
    for step in [step for step in steps for _ in range(2)]:
        drawn = samples(16, seed=step)
        totals = Totals(len(drawn), sum(len(sample.response) for sample in drawn))
        read = sum(sample.length for sample in drawn)

        def loss(responses: Any, totals: Totals = totals) -> tuple[torch.Tensor, float]:
            error = values(responses) - responses.batch.engine_logprobs
            result = token_mean(error.square(), responses.batch.mask, totals)
            return result, result.item()

        measured += [*critic.accumulate(batches(drawn), loss, read), critic.step()]
    return [*measured, *(number for each in train(policy, steps) for number in each)]


def never_stop(kind: str) -> dict[str, Any]:
    """Return both models' weights after one rank trains them without interruption."""
    policy, critic = build(LayoutSettings(), kind)
    learn(policy, critic, range(2 * STEPS))
    return {
        name: {n: tensor.detach().numpy() for n, tensor in model.chunks[0].named_parameters()}
        for name, model in (("policy", policy), ("critic", critic))
    }


def begin(layout: LayoutSettings, kind: str, directory: str) -> None:
    """Train both a little and save."""
    policy, critic = build(layout, kind)
    learn(policy, critic, range(STEPS))
    save(policy, Path(directory), STEPS, {})


def continue_training(
    layout: LayoutSettings, kind: str, directory: str, expected: dict[str, Any]
) -> dict[str, float]:
    """Continue from a checkpoint under this layout; return differences from `expected`."""
    from parallel.checkpoint import load

    policy, critic = build(layout, kind, seed=1)
    load.training_state(policy, Path(directory) / f"step_{STEPS}")
    assert (policy.schedule.num_steps, critic.schedule.num_steps) == (STEPS, 2 * STEPS)
    learn(policy, critic, range(STEPS, 2 * STEPS))
    return {
        "policy": farthest_weight(policy, expected["policy"]),
        "critic": farthest_weight(critic, expected["critic"]),
    }


def resumes_bit_for_bit(layout: LayoutSettings, kind: str, directory: str) -> bool:
    """Return true if both resume bit for bit."""
    from parallel.checkpoint import load

    torch.use_deterministic_algorithms(True)
    policy, critic = build(layout, kind)
    learn(policy, critic, range(STEPS))
    save(policy, Path(directory), STEPS, {})
    expected = learn(policy, critic, range(STEPS, 2 * STEPS))
    resumed, other = build(layout, kind, seed=1)
    load.training_state(resumed, Path(directory) / f"step_{STEPS}")
    found = learn(resumed, other, range(STEPS, 2 * STEPS))
    torch.use_deterministic_algorithms(False)
    whole = [*snapshot(policy), *snapshot(critic)]
    return found == expected and same(whole, [*snapshot(resumed), *snapshot(other)])
