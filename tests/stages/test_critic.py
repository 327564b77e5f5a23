"""An expert with a critic: what its tokens' advantages are, what it learns, and what is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from parallel.batch import MicroBatch, RankPlace, Responses, collate
from parallel.checkpoint import load
from parallel.checkpoint.save import Saver
from parallel.model.policy import Policy, ValueModel, values
from parallel.sample import Sample
from parallel.settings import LayoutSettings, OptimizerSettings, RoutingLossSettings
from stages.kinds.grpo.work import GrpoStage
from stages.objectives.groups import Batch
from stages.objectives.models import Critic, rewards
from stages.sampling.step import StepSamples
from tests.fake_engines import MODEL
from tests.stages.toys import drawn, expert, group, only

pytestmark = pytest.mark.usefixtures("one_rank")

ADAM = {"learning_rate": 1e-2}


def ppo(directory: Path, updates: int = 2, **critic: Any) -> GrpoStage:
    advantage = {
        "name": "gae",
        "gamma": 0.9,
        "lambda": 0.8,
        "critic": {"optimizer": ADAM, **critic},
    }
    objective = {"advantage": advantage, "ratio": {"name": "token"}, "aggregation": "token_mean"}
    return expert(directory, objective, updates=updates)


def critic_of(stage: GrpoStage) -> tuple[Critic, ValueModel]:
    baseline = only(stage).baseline
    assert isinstance(baseline, Critic)
    model = stage.policy.companions["critic"]
    assert isinstance(model, ValueModel)
    return baseline, model


def turn_head(model: ValueModel) -> None:
    """Give it something to say."""
    with torch.no_grad():
        head = model.chunks[-1].output_layer.weight
        head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(5)) / 4)
    model.weights_changed()


def rewarded(lengths: list[int], earned: list[float]) -> list[Sample]:
    samples = drawn(lengths)
    group(samples, list(earned))
    return samples


def two_parts(samples: list[Sample]) -> list[MicroBatch]:
    return [collate(samples[:2], RankPlace(), False), collate(samples[2:], RankPlace(), False)]


def copied(policy: Policy) -> dict[str, torch.Tensor]:
    found = [weight for chunk in policy.chunks for weight in chunk.named_parameters()]
    return {name: weight.detach().clone() for name, weight in found}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_critic_s_reward_does_not_depend_on_steps() -> None:
    """Steps of 1 and 0 whose mean of .5 is in the first reward, and .2 of something else."""
    samples = rewarded([4, 2], [0.7, -1.0])
    samples[0].step_rewards = [(1, 1.0), (3, 0.0)]
    found = rewards(collate(samples, RankPlace(), replay=False))
    torch.testing.assert_close(found, torch.tensor([[0, 0.5, 0, 0.2], [0, -1.0, 0, 0]]))


def test_values_are_of_the_text_before_each_token(tmp_path: Path) -> None:
    _, model = critic_of(ppo(tmp_path))
    samples = rewarded([3, 5, 1], [0.0, 0.0, 0.0])
    assert [v.abs().max().item() for v in model.values(two_parts(samples))] == [0.0, 0.0]
    turn_head(model)
    [together] = model.values([collate(samples, RankPlace(), False)])
    head = model.chunks[-1].output_layer.weight[0]
    for row, sample in enumerate(samples):
        for token in range(len(sample.response)):
            before = drawn([token + 1])[0]
            before.prompt, before.response = sample.prompt, sample.response[: token + 1]
            [alone] = model.response_logits([collate([before], RankPlace(), False)])
            expected = (alone.hidden[-1] @ head).item()
            assert together[row, token].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("domains", [("sums",) * 4, ("sums", "words", "sums", "words")])
def test_advantages_by_hand(domains: tuple[str, ...], tmp_path: Path) -> None:
    """The recursion of every response in plain Python, in deviations of its domain's tokens."""
    critic, model = critic_of(ppo(tmp_path))
    turn_head(model)
    samples = rewarded([3, 5, 1, 4], [1.0, 0.0, -0.5, 2.0])
    for sample, domain in zip(samples, domains, strict=True):
        sample.domain = domain
    parts = two_parts(samples)
    critic.compute_values(samples, parts)
    raw: list[list[float]] = []
    for part in parts:
        assert part.values is not None and part.returns is not None
        for row, sample in enumerate(part.samples):
            length = len(sample.response)
            values = [*part.values[row, :length].tolist(), 0.0]
            earned = [0.0] * (length - 1) + [sample.reward or 0.0]
            following, own = 0.0, []
            for token in reversed(range(length)):
                delta = earned[token] + 0.9 * values[token + 1] - values[token]
                following = delta + 0.9 * 0.8 * following
                own.insert(0, following)
            raw.append(own)
            returns = [a + v for a, v in zip(own, values, strict=False)]
            assert part.returns[row, :length].tolist() == pytest.approx(returns, abs=1e-5)
    rows = [(part, row) for part in parts for row in range(len(part.samples))]
    for own, (part, row), domain in zip(raw, rows, domains, strict=True):
        every = np.concatenate([a for a, of in zip(raw, domains, strict=True) if of == domain])
        expected = (np.array(own) - every.mean()) / (every.std(ddof=1) + 1e-6)
        assert part.advantages[row, : len(own)].tolist() == pytest.approx(expected, abs=1e-4)
        assert not part.advantages[row, len(own) :].any()
        assert part.samples[row].advantage == pytest.approx(expected.mean(), abs=1e-4)


def test_a_critic_learns_a_constant_return(tmp_path: Path) -> None:
    critic, model = critic_of(ppo(tmp_path, value_clip=10.0))
    samples = rewarded([3, 5, 1, 4], [0.5] * 4)
    losses = []
    for _ in range(40):
        parts = two_parts(samples)
        critic.compute_values(samples, parts)
        losses.append(critic.learn(samples, parts)["value_loss"])
    assert losses[0] > 20 * losses[-1]
    for part, found in zip(parts, model.values(parts), strict=True):
        last = found[torch.arange(len(part.samples)), part.mask.sum(1) - 1]
        torch.testing.assert_close(last, torch.full_like(last, 0.5), atol=0.15, rtol=0)


def test_the_value_clip_bounds_an_update(tmp_path: Path) -> None:
    """The second update from the same old values: a tight clip leaves its loss where it was."""

    def losses(clip: float) -> list[float]:
        critic, _ = critic_of(ppo(tmp_path, value_clip=clip))
        samples = rewarded([3, 5, 1, 4], [0.5] * 4)
        parts = two_parts(samples)
        critic.compute_values(samples, parts)
        return [critic.learn(samples, parts)["value_loss"] for _ in range(2)]

    wide, tight = losses(10.0), losses(1e-6)
    assert wide[0] == tight[0]
    assert wide[1] < 0.99 * wide[0]
    assert tight[1] == pytest.approx(tight[0], rel=1e-3)


def test_explained_variance_of_the_values(tmp_path: Path) -> None:
    critic, model = critic_of(ppo(tmp_path))
    samples = rewarded([1, 1, 1], [1.0, 2.0, 6.0])
    parts = two_parts(samples)
    critic.compute_values(samples, parts)
    assert critic.learn(samples, parts)["value_explained_variance"] == 0  # all values are 0
    turn_head(model)
    critic.compute_values(samples, parts)
    said = torch.cat([part.values[:, 0] for part in parts])  # type: ignore[index]
    earned = torch.cat([part.returns[:, 0] for part in parts])  # type: ignore[index]
    expected = 1 - ((earned - said).var() / earned.var()).item()
    found = critic.learn(samples, parts)["value_explained_variance"]
    assert found == pytest.approx(expected, abs=1e-5)
    for sample in samples:
        sample.reward = 1.0
    critic.compute_values(samples, parts)
    assert critic.learn(samples, parts)["value_explained_variance"] == 0  # nothing to explain


@pytest.mark.parametrize("updates", [1, 2])
def test_the_critic_warms_up_alone(updates: int, tmp_path: Path) -> None:
    stage = ppo(tmp_path, updates=updates, warmup_steps=1)
    _, model = critic_of(stage)
    policy, critic = copied(stage.policy), copied(model)
    accumulate = mock.Mock(wraps=stage.policy.accumulate)
    stage.policy.accumulate = accumulate  # type: ignore[method-assign]
    alone = stage.step(1)
    assert not accumulate.called  # nothing is computed that would be thrown away
    assert same(policy, copied(stage.policy))
    assert stage.policy.schedule.num_steps == 0
    assert not same(critic, copied(model))
    assert alone["value_loss"] > 0
    assert "gradient_norm" not in alone
    both = stage.step(2)
    assert accumulate.call_count == updates
    assert not same(policy, copied(stage.policy))
    assert both["gradient_norm"] > 0
    assert np.isfinite([*alone.values(), *both.values()]).all()
    assert "zero_variance" not in both


def test_an_update_without_a_graded_response_changes_nothing(tmp_path: Path) -> None:
    stage = ppo(tmp_path, updates=1)
    _, model = critic_of(stage)
    split_updates, critic = stage.split_updates, copied(model)

    def failing(batch: Batch) -> StepSamples:
        for sample in (sample for each in batch.groups for sample in each.samples):
            sample.reward = None
        return split_updates(batch)

    stage.split_updates = failing  # type: ignore[method-assign]
    nothing = stage.step(1)
    assert nothing["value_loss"] == nothing["loss"] == nothing["gradient_norm"] == 0
    assert np.isfinite(list(nothing.values())).all()
    assert same(critic, copied(model))


def test_a_critic_is_resumed_and_not_inherited(tmp_path: Path) -> None:
    stage = ppo(tmp_path)
    stage.step(1)
    checkpoint = tmp_path / "checkpoints" / "step_1"
    saver = Saver(checkpoint.parent)
    saver.begin(stage.policy, 1, stage.state())
    stage.step(2)
    saver.finish()
    other = ppo(tmp_path)
    state = load.training_state(other.policy, checkpoint)
    other.restore(json.loads(json.dumps(state)))
    other.step(2)
    _, mine = critic_of(stage)
    _, theirs = critic_of(other)
    assert mine.schedule.num_steps == theirs.schedule.num_steps == 4
    assert same(copied(mine), copied(theirs))
    assert same(copied(stage.policy), copied(other.policy))
    plain = expert(tmp_path, {})
    load.weights(plain.policy, checkpoint)
    load.training_state(other.policy, checkpoint)
    assert same(copied(plain.policy), copied(other.policy))
    # A critic that begins at a parent has all of it but the head.
    turn_head(theirs)
    head = theirs.chunks[-1].output_layer.weight.detach().clone()
    load.weights(theirs, checkpoint, head=False)
    begun, parent = copied(theirs), copied(plain.policy)
    assert torch.equal(begun.pop("output_layer.weight"), head)
    del parent["output_layer.weight"]
    assert same(begun, parent)


def test_values_of_a_bf16_critic_are_not_rounded(tmp_path: Path) -> None:
    """Values near 1 in bf16 are a hundredth apart."""
    low = MODEL.model_copy(update={"precision": "bf16"})
    optimizer = OptimizerSettings(learning_rate=1e-2)
    model = ValueModel(low, LayoutSettings(), optimizer, 10, RoutingLossSettings())
    model.start_fresh(0)
    turn_head(model)
    parts = two_parts(rewarded([3, 5, 1, 4], [1.0] * 4))
    evaluated = model.values(parts)
    trained: list[torch.Tensor] = []

    def loss(responses: Responses) -> tuple[torch.Tensor, None]:
        trained.append(values(responses))
        return trained[-1].square().sum(), None

    model.accumulate(parts, loss, 1.0)
    for one, other in zip(evaluated, trained, strict=True):
        assert one.dtype == torch.float32
        assert not torch.equal(one, one.bfloat16().float())
        torch.testing.assert_close(one, other.detach(), atol=1e-5, rtol=1e-5)
    before = copied(model)
    model.step()
    assert all(weight.dtype == torch.bfloat16 for weight in before.values())
    assert not same(before, copied(model))
