"""An expert obeys its objective's settings: a real policy on samples of fake engines."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from parallel.batch import RankPlace, collate
from parallel.checkpoint import load
from parallel.checkpoint.save import Saver
from parallel.model.policy import Policy, TrainedPolicy
from parallel.sample import Sample
from parallel.settings import (
    EngineSettings,
    LayoutSettings,
    OptimizerSettings,
    RoutingLossSettings,
)
from stages.objectives.advantages.gae import GaeSettings
from stages.objectives.advantages.grpo import GrpoAdvantageSettings
from stages.objectives.advantages.mo_grpo import MoGrpoSettings
from stages.objectives.advantages.process import ProcessSettings
from stages.objectives.groups import (
    Batch,
    LengthWeights,
    assign_advantages,
    graded,
    has_zero_advantages,
    scale_by_entropy,
)
from stages.objectives.kl import KLSettings
from stages.objectives.models import Reference
from stages.objectives.surrogate import TisSettings
from stages.rewards.reward import RewardError
from stages.sampling.logprob_check import measure_mismatch
from stages.sampling.step import StepSamples
from stages.settings import RunSettings, StageJob
from tests.fake_engines import GROUP, MODEL, PROMPTS, toy_domain, toy_job, toy_run
from tests.stages.toys import drawn, expert, group, only

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("ratio", ["sequence_token", "geometric", "cispo"])
def test_a_step_runs_and_moves_the_policy(name: str, ratio: str, tmp_path: Path) -> None:
    objective = {"advantage": {"name": name}, "ratio": {"name": ratio}, "aggregation": "constant"}
    metrics = expert(tmp_path, objective).step(1)
    assert metrics["gradient_norm"] > 0
    assert np.isfinite(list(metrics.values())).all()


def test_the_reference_is_the_named_model(tmp_path: Path) -> None:
    policy, loaded = expert(tmp_path, {}).policy, []
    origins = {"parent": tmp_path / "parent", "models": {"sums": tmp_path / "cold"}}
    job = toy_job(tmp_path, toy_run(sums=toy_domain()), **origins)
    with mock.patch.object(load, "weights", lambda _, origin: loaded.append(origin)):
        for reference in ("parent", "cold_start"):
            Reference(job, policy, KLSettings(coefficient=0.1, reference=reference), "sums")
    assert loaded == [tmp_path / "parent", tmp_path / "cold"]


def test_one_forward_pass_equals_two(tmp_path: Path) -> None:
    """With a single update, pi_old is the policy itself."""
    objective = {
        "kl": {"coefficient": 0.1, "estimator": "unbiased_k3"},
        "correction": {"name": "tis", "samples": "all"},
        "sequence_mask": {"enabled": True, "delta": 0.01},
    }
    found = []
    for one_pass in (True, False):
        stage = expert(tmp_path / str(one_pass), objective, updates=1)
        assert stage.one_pass
        stage.one_pass = one_pass
        found.append(stage.step(1))
    together, apart = ({k: v for k, v in each.items() if "seconds" not in k} for each in found)
    assert together == pytest.approx(apart, rel=1e-5)
    assert together["ratio"] == 1
    assert together["correction"] < 1
    assert together["gradient_norm"] > 0


def test_full_kl_entropy_bonus_and_edge_together(tmp_path: Path) -> None:
    stage = expert(
        tmp_path,
        {
            "kl": {"coefficient": 0.1, "estimator": "full", "reference": "cold_start"},
            "entropy_bonus": 0.01,
            "scaling": "edge",
            "aggregation": "token_mean",
            "correction": {"name": "icepop", "level": "token", "samples": "all"},
            "sequence_mask": {"enabled": True},
        },
    )
    metrics = stage.step(1)
    assert metrics["kl"] > 0
    assert 0 < metrics["full_entropy"] <= np.log(MODEL.vocabulary_size) + 1e-6
    assert 0 <= metrics["masked_sequences"] < 1
    # Fake engines make their log-probabilities up, between -1 and 0: all tokens are off by far.
    assert metrics["correction"] < 1
    assert metrics["mismatch_sequence_k3"] > 0


def test_the_kl_coefficient_is_controlled_and_resumed(tmp_path: Path) -> None:
    objective = {"kl": {"coefficient": 0.1, "target": 1e-9}}
    stage = expert(tmp_path, objective)
    first, second = stage.step(1), stage.step(2)
    # Far above its target the KL raises the coefficient by a fiftieth at each of two updates.
    assert first["kl_coefficient"] == pytest.approx(0.1 * (1 + 1.02) / 2)
    assert second["kl_coefficient"] == pytest.approx(0.1 * (1.02**2 + 1.02**3) / 2)
    other = expert(tmp_path, objective)
    other.restore(json.loads(json.dumps(stage.state())))
    found = [only(each).kl_coefficient for each in (other, stage)]
    assert found[0] == found[1] == pytest.approx(0.1 * 1.02**4)


def test_the_exponent_learns_and_is_resumed(tmp_path: Path) -> None:
    objective = {"aggregation": "lambda", "lambda_learning_rate": 0.5}
    stage = expert(tmp_path, objective)
    measured = [stage.step(step) for step in (1, 2)]
    assert measured[1]["length_exponent"] != measured[0]["length_exponent"]
    other = expert(tmp_path, objective)
    other.restore(json.loads(json.dumps(stage.state())))
    assert only(other).length_exponent == only(stage).length_exponent != 0


def test_the_exponents_gradient_is_that_of_the_loss_over_all_micro_batches() -> None:
    samples = drawn([3, 7, 5, 2], groups=[0, 0, 1, 1])
    parts = [collate(samples[:1], RankPlace(), False), collate(samples[1:], RankPlace(), False)]
    losses = {id(sample): 1.0 + n * n for n, sample in enumerate(samples)}

    def total(weights: LengthWeights) -> torch.Tensor:
        values = [
            (weights.of(part) * torch.tensor([losses[id(s)] for s in part.samples])).sum()
            for part in parts
        ]
        for value in values:
            value.backward()
        return sum(values, start=torch.tensor(0.0)).detach()

    weights = LengthWeights(samples, 0.3)
    total(weights)
    step = 1e-2
    slope = (
        total(LengthWeights(samples, 0.3 + step)) - total(LengthWeights(samples, 0.3 - step))
    ) / (2 * step)
    assert weights.gradient() == pytest.approx(slope.item(), rel=1e-3)


def test_an_average_follows_the_policy_and_is_resumed(tmp_path: Path) -> None:
    objective = {"kl": {"coefficient": 0.1, "reference": "ema", "ema_decay": 0.75}}
    stage = expert(tmp_path, objective)
    average = stage.policy.averages["ema"]

    def copied(policy: Policy) -> dict[str, torch.Tensor]:
        return {name: weight.clone() for name, weight in policy.named_weights().items()}

    expected = copied(average)
    for update in range(2):
        before = copied(stage.policy)
        reference = only(stage).reference
        assert reference is not None
        reference.update_ema()
        for name, weight in expected.items():
            expected[name] = 0.75 * weight + 0.25 * before[name]
            torch.testing.assert_close(average.named_weights()[name], expected[name])
        stage.step(update + 1)
        expected = copied(average)
    saver = Saver(tmp_path / "checkpoints")
    saver.begin(stage.policy, 1, stage.state())
    saver.finish()
    other = expert(tmp_path, objective)
    load.training_state(other.policy, tmp_path / "checkpoints" / "step_1")
    for mine, theirs in ((stage.policy, other.policy), (average, other.policy.averages["ema"])):
        for name, weight in mine.named_weights().items():
            assert torch.equal(weight, theirs.named_weights()[name])
    # A child stage takes the policy, and no average, from it.
    plain = expert(tmp_path, {})
    load.weights(plain.policy, tmp_path / "checkpoints" / "step_1")
    for name, weight in plain.policy.named_weights().items():
        assert torch.equal(weight, stage.policy.named_weights()[name])


def test_the_average_of_a_bf16_policy_begins_at_the_parent_and_is_kept_in_fp32(
    tmp_path: Path,
) -> None:
    low = MODEL.model_copy(update={"precision": "bf16"})
    optimizer = OptimizerSettings(learning_rate=1e-2)
    policy = TrainedPolicy(low, LayoutSettings(), optimizer, 10, RoutingLossSettings())
    policy.start_fresh(3)
    saver = Saver(tmp_path)
    saver.begin(policy, 1, {})
    saver.finish()
    job = StageJob.model_construct(
        parent=tmp_path / "step_1",
        settings=RunSettings.model_construct(model=low, layout=LayoutSettings()),
    )
    reference = Reference(job, policy, KLSettings(reference="ema", ema_decay=0.999), "sums")
    average = policy.averages["ema"].named_weights()
    before = {name: weight.clone() for name, weight in policy.named_weights().items()}
    for name, weight in average.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, before[name].float())
    with torch.no_grad():
        for weight in policy.named_weights().values():
            weight.mul_(2)
    reference.update_ema()
    for name, weight in average.items():  # a thousandth is less than bf16 can tell
        torch.testing.assert_close(weight, before[name].float() * 1.001)


def test_samples_without_a_reward_are_not_trained_on(tmp_path: Path) -> None:
    stage = expert(tmp_path, {"aggregation": "lambda", "scaling": "edge"})
    seen: list[int] = []
    gradients = stage.gradients

    def watched(samples: list[Sample], batches: Any) -> dict[str, float]:
        seen.append(len(samples))
        assert all(sample.reward is not None for sample in samples)
        return gradients(samples, batches)

    def failing(batch: Batch, longest: int) -> StepSamples:
        """Rewards fail on responses of at most this many tokens."""
        for sample in (sample for each in batch.groups for sample in each.samples):
            if len(sample.response) <= longest:
                sample.reward = None
        return split_updates(batch)

    stage.gradients = watched  # type: ignore[method-assign]
    split_updates, stage.split_updates = stage.split_updates, partial(failing, longest=4)  # type: ignore[method-assign]
    stage.step(1)
    assert 0 < sum(seen) < PROMPTS * GROUP
    seen.clear()
    stage.split_updates = partial(failing, longest=99)  # type: ignore[method-assign]
    nothing = stage.step(2)
    assert sum(seen) == nothing["loss"] == nothing["gradient_norm"] == 0
    assert np.isfinite(list(nothing.values())).all()


def test_prompts_that_are_too_long_are_counted_by_the_steps_that_skip_them(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}{'+0' * (number % 2)}="} for number in range(10, 30)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = {"source": "jsonl", "path": file, "held_out_fraction": 1e-9}
    # Either the settings leave out the longer ones, or the engine has no room for them.
    for limits in ({"max_prompt_tokens": 3}, {}):
        make = partial(expert, objective={}, prompts={**prompts, **limits})
        engine = EngineSettings(max_model_tokens=8 + 3, max_logprob_difference=1e9)
        room = None if limits else engine
        stage = make(tmp_path, engine=room)
        counts = [stage.step(step)["too_long"] for step in (1, 2, 3)]
        resumed = make(tmp_path, engine=room)
        resumed.restore(json.loads(json.dumps(stage.state())))
        counts.append(resumed.step(4)["too_long"])
        assert sum(counts) == resumed.state()["cursors"]["sums"] - 4 * PROMPTS
        assert 10 <= sum(counts) <= 20  # an epoch has ten short ones and ten long ones


def test_advantages_are_given_to_the_samples_that_were_graded() -> None:
    first, second = drawn([3, 2, 4]), drawn([1, 2, 5])
    groups = [group(first, [1.0, 0.0, None]), group(second, [None, 0.25, 0.75])]
    assert graded(groups).lengths.tolist() == [[3, 2, 0], [0, 2, 5]]
    kept = assign_advantages(groups, GrpoAdvantageSettings())
    assert kept == [first[:2], second[1:]]
    assert [sample.group for samples in kept for sample in samples] == [0, 0, 1, 1]
    half = 0.5**0.5
    found = [sample.advantage for samples in kept for sample in samples]
    assert found == pytest.approx([half, -half, -half, half], abs=1e-5)
    assert all(sample.advantages is None for sample in first + second)


def test_parts_reach_the_advantages_by_name() -> None:
    samples = drawn([1, 1])
    samples[0].reward_parts = {"right": 1.0, "short": 0.1}
    samples[1].reward_parts = {"short": 0.3, "right": 0.0}
    groups, settings = [group(samples, [1.1, 0.3])], MoGrpoSettings(std="population")
    [alike] = assign_advantages(groups, settings)
    assert [sample.advantage for sample in alike] == pytest.approx([0.0, 0.0], abs=2e-5)
    [weighed] = assign_advantages(groups, settings, {"right": 2.0, "short": 0.5})
    assert [sample.advantage for sample in weighed] == pytest.approx([1.5, -1.5], abs=2e-5)


def test_parts_of_weight_0_do_not_reach_the_advantages() -> None:
    samples = drawn([1, 1])
    samples[0].reward_parts = {"right": 1.0, "watched": 0.1}
    samples[1].reward_parts = {"right": 0.0}  # what watches has failed here
    weights = {"right": 2.0, "watched": 0.0}
    [found] = assign_advantages([group(samples, [2.0, 0.0])], MoGrpoSettings(), weights)
    assert [sample.advantage for sample in found] == pytest.approx([2**0.5, -(2**0.5)], abs=1e-4)


def test_a_group_is_without_advantages_where_no_token_has_one() -> None:
    """Not where the sums of its rewards are equal: its parts may teach, and the other way round."""
    samples = drawn([1, 1, 1, 1])
    for sample, (right, short) in zip(samples, [(1, 0), (0, 1), (0, 1), (1, 0)], strict=True):
        sample.reward_parts = {"right": right, "short": short}
    alike, weights = group(samples, [1.0] * 4), {"right": 1.0, "short": 1.0}
    assert has_zero_advantages(alike, GrpoAdvantageSettings(), weights)
    assert has_zero_advantages(alike, MoGrpoSettings(), weights)  # the two cancel each other
    assert not has_zero_advantages(alike, MoGrpoSettings(), {"right": 2.0, "short": 1.0})
    assert not has_zero_advantages(group(samples, [1.0, 1.0, 0.0, 1.0]), GaeSettings(), weights)
    assert has_zero_advantages(
        group(samples, [1.0, None, None, None]), GrpoAdvantageSettings(), weights
    )


def test_dynamic_sampling_selects_by_advantages_or_by_solved_responses(tmp_path: Path) -> None:
    """A group that is all wrong, of responses of unlike length, teaches brevity and no answer."""
    rewards = {
        "right": {"kind": "python", "function": "tests.stages.small_rewards:parity"},
        "overlong": {"kind": "overlong", "max_tokens": 8, "buffer_tokens": 4},
    }
    samples = drawn([2, 8])
    for sample, late in zip(samples, (0.0, -0.5), strict=True):
        sample.reward_parts = {"right": 0.0, "overlong": late}
    wrong = group(samples, [0.0, -0.5])
    wrong.problem.domain = "sums"
    for by, expected in (("advantages", False), ("solved", True)):
        rollout = {"dynamic_sampling": 1, "dynamic_sampling_by": by}
        stage = expert(tmp_path / by, {}, rewards=rewards, rollout=rollout)
        assert stage.is_uninformative(wrong) is expected
    assert samples[0].reward_parts is not None
    samples[0].reward_parts["right"] = 1.0
    assert not stage.is_uninformative(wrong)


def test_a_batch_baseline_learns_from_zero_variance_groups(tmp_path: Path) -> None:
    """Rewards [1, 1], [0, 0], [1, 0]: deviations of a batch of mean .5, and none of them is 0."""
    rewards = {"right": {"kind": "python", "function": "tests.stages.small_rewards:parity"}}
    for name, shares in (("reinforce_pp", (0.0, 1.0)), ("grpo", (2 / 3, 1.0))):
        stage = expert(tmp_path / name, {"advantage": {"name": name}}, rewards=rewards, updates=1)
        batches = ([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]])
        for of_groups, share in zip(batches, shares, strict=True):  # the last teach nobody
            groups = [group(drawn([1, 2]), each) for each in of_groups]
            for each in groups:
                each.problem.domain = "sums"
                for sample in each.samples:
                    sample.reward_parts = {"right": sample.reward}
            useless = [stage.is_uninformative(each) for each in groups]
            alike = [name == "grpo" and each.zero_variance for each in groups]
            assert useless == alike
            found = stage.split_updates(Batch(groups, [], 0, 0, 0)).metrics
            assert found["zero_variance"] == pytest.approx(share)


def test_steps_give_every_token_its_own_advantage() -> None:
    samples = drawn([4, 2])
    samples[0].step_rewards, samples[1].step_rewards = [(1, 1.0), (3, 0.0)], [(1, 0.0)]
    [[long, short]] = assign_advantages([group(samples, [0.5, 0.0])], ProcessSettings())
    good, bad = 2 / 3 / 3**-0.5, -1 / 3 / 3**-0.5  # 1, 0, 0: mean 1/3, sample deviation 3^-.5
    assert long.advantages is not None
    assert long.advantages == pytest.approx([good + bad] * 2 + [bad] * 2, abs=1e-5)
    assert short.advantages == pytest.approx([bad] * 2, abs=1e-5)
    assert long.advantage == pytest.approx(long.advantages.mean())
    part = collate([short, long], RankPlace(), replay=False)
    expected = torch.tensor([[bad, bad, 0, 0], [good + bad] * 2 + [bad] * 2])
    torch.testing.assert_close(part.advantages, expected.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("finished", [True, False])
def test_a_response_without_steps_is_an_error_with_the_fix(finished: bool) -> None:
    samples = drawn([4, 2, 3])
    samples[0].step_rewards, samples[1].finished = [(1, 1.0)], finished
    message = (
        r"^domains\.sums\.rewards: objective\.advantage process compares steps, but 1 of 2"
        rf" responses have none, {int(not finished)} of which were truncated; .* unfinished: score"
    )
    with pytest.raises(RewardError, match=message):
        assign_advantages([group(samples, [1.0, 0.0, None])], ProcessSettings())
    assign_advantages([group(samples, [1.0, 0.0, None])], GrpoAdvantageSettings())


def test_edge_compares_entropies_within_groups_over_all_micro_batches() -> None:
    """Vector 13 in group 0, whose members are apart; group 1 is alike."""
    samples = drawn([2, 3, 1, 4], groups=[0, 1, 1, 0])
    for sample in samples:
        sample.advantage = 3.0
    parts = [collate(samples[:2], RankPlace(), False), collate(samples[2:], RankPlace(), False)]
    for part, entropies in zip(parts, ([1.0, 7.0], [7.0, 3.0]), strict=True):
        part.old_entropies = torch.tensor(entropies)[:, None].where(part.mask, torch.nan)
    scale_by_entropy(samples, parts)
    found = {
        id(s): part.advantages[row, 0].item()
        for part in parts
        for row, s in enumerate(part.samples)
    }
    assert [found[id(sample)] for sample in samples] == pytest.approx([6.0, 3.0, 3.0, 2.0])


@pytest.mark.parametrize(
    ("replay", "correction", "all_samples"),
    [
        ("r3", {}, False),
        ("none", {}, True),
        ("none", {"samples": "stale"}, False),
        ("r3", {"samples": "all"}, True),
        ("r3", {"name": "icepop"}, True),
    ],
)
def test_corrections_apply_to_stale_samples_or_to_all(
    replay: str, correction: dict[str, Any], all_samples: bool, tmp_path: Path
) -> None:
    part = collate(drawn([2, 2]), RankPlace(), replay=False)  # drawn by weights 0 and 1
    stage = expert(tmp_path, {"correction": correction}, routing={"replay": replay})
    stage._version = 1
    assert stage._weights(part) is None  # not on the last pipeline stage
    part.old_logprobs = part.engine_logprobs + torch.tensor([0.6, 1.0]).log()
    assert torch.equal(stage.stale(part), torch.tensor([[True], [False]]))
    fresh = [0.6, 1.0] if all_samples else [1.0, 1.0]
    torch.testing.assert_close(stage._weights(part), torch.tensor([[0.6, 1.0], fresh]))


def test_bf16_corrects_all_samples_and_none_corrects_nothing(tmp_path: Path) -> None:
    assert TisSettings().applies_to_all("r3", "bf16")
    assert not TisSettings().applies_to_all("r3", "fp32")
    part = collate(drawn([2]), RankPlace(), replay=False)
    part.old_logprobs = part.engine_logprobs + 0.5
    assert expert(tmp_path, {"correction": {"name": "none"}})._weights(part) is None


def test_the_kl_of_stale_samples_is_weighted_by_the_policy_that_sampled_them(
    tmp_path: Path,
) -> None:
    stage = expert(tmp_path, {"kl": {"coefficient": 0.1, "estimator": "unbiased_k3"}})
    stage._version = 1
    part = collate(drawn([2, 2]), RankPlace(), replay=False)  # drawn by weights 0 and 1
    part.old_logprobs = part.engine_logprobs - 1
    found = stage._sampling_logprobs(part)
    assert torch.equal(found[0], part.engine_logprobs[0])
    assert torch.equal(found[1], part.old_logprobs[1])


def test_mismatch_is_measured_by_token_and_by_sequence() -> None:
    part = collate(drawn([2, 1]), RankPlace(), replay=False)
    # pi / mu of the three tokens: 4 and 1/4, whose geometric mean is 1, and 3.
    moved = torch.tensor([[4.0, 0.25], [3.0, torch.nan]]).log()
    entropies = torch.ones(2, 2)
    policy = mock.Mock()
    policy.evaluate.return_value = [(part.engine_logprobs + moved, entropies)]
    policy.agreement.shares.return_value = {"router_agreement": 0.5}
    found = measure_mismatch(policy, [part], temperature=1.0, entropies=True).metrics
    log_3 = np.log(3.0)
    assert found == {
        "mismatch_max": pytest.approx(np.log(4.0)),
        "mismatch_mean": pytest.approx((2 * np.log(4.0) + log_3) / 3),
        "mismatch_sequence_k3": pytest.approx((0 + 3 - log_3 - 1) / 2, rel=1e-5),
        "high_ratio": 1.0,
        "router_agreement": 0.5,
    }
    assert part.old_entropies is entropies
