"""A stage on several domains, each under its own objective; alike, they are one objective."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from parallel import batch
from parallel.batch import MicroBatch, RankPlace, Responses
from parallel.checkpoint import load
from parallel.checkpoint.save import Saver
from parallel.sample import Sample
from stages.kinds.grpo.settings import OWN_REFERENCES, GrpoSettings
from stages.kinds.grpo.work import GrpoStage
from stages.objectives.loss import Totals, policy_loss
from stages.objectives.surrogate import Tokens
from tests.fake_engines import toy_domain, toy_job, toy_run
from tests.stages.toys import drawn, only, opened

pytestmark = pytest.mark.usefixtures("one_rank")

Objective = dict[str, Any]
TEMPERATURE, LONGEST = 0.8, 8
PENALISED = {
    "ratio": {"name": "token"},
    "aggregation": "token_mean",
    "kl": {"coefficient": 0.5, "estimator": "k3"},
    "correction": {"name": "none"},
}
FREE = {
    "advantage": {"name": "rloo"},
    "ratio": {"name": "sequence", "clip_low": 0.1, "clip_high": 0.1},
    "aggregation": "sequence_mean",
    "entropy_bonus": 0.01,
    "correction": {"name": "tis", "cap": 1.1, "samples": "all"},
}


def mixed(
    directory: Path,
    updates: int = 1,
    tokens: int = 64,
    own: tuple[str, ...] = (),
    **objectives: Objective,
) -> GrpoStage:
    """Return a stage that trains on a toy domain for each objective.

    The domains in `own` have a reference of no other domain, where they name one.
    """
    domains = {
        name: toy_domain(prompts={"dataset": "chain_sum"}, objective=each)
        for name, each in objectives.items()
    }
    block = GrpoSettings.model_validate(
        {
            "from": "cold_start",
            "sampling": {
                "prompts_per_step": 4,
                "group_size": 4,
                "max_response_tokens": LONGEST,
                "temperature": TEMPERATURE,
            },
            "routing": {"replay": "none"},
            "optimizer": {"learning_rate": 1e-2},
            "updates_per_rollout": updates,
            "loop": {"steps": 3, "micro_batch_tokens": tokens},
        }
    )
    settings = toy_run(**domains).model_copy(update={"stages": {"mixed": block}})
    named = {"stage": "mixed", "block": "mixed", "domain": None, "domains": [*domains]}
    other = {
        name: directory / (name if name in own else each["kl"]["reference"])
        for name, each in objectives.items()
        if each.get("kl", {}).get("reference", "parent") not in OWN_REFERENCES
    }
    stage = opened(toy_job(directory, settings, **named, models=other))
    stage.policy.start_fresh(0)
    stage._version = 1
    return stage


def samples(*domains: str) -> list[Sample]:
    """Return two groups of each domain, whose first response is bad, with unlike lengths."""
    found = []
    for number, domain in enumerate(domains):
        own = drawn([3, 7, 5, 2], groups=[2 * number, 2 * number, 2 * number + 1, 2 * number + 1])
        for place, sample in enumerate(own):
            sample.domain, sample.versions = domain, np.ones(len(sample.response), np.int32)
            sample.advantage = (-1.0) ** (place + 1) * (0.5 + number)
        found += own
    return found


def gradients(stage: GrpoStage) -> dict[str, torch.Tensor]:
    return {
        name: parameter.main_grad.clone()
        for chunk in stage.policy.chunks
        for name, parameter in chunk.named_parameters()
    }


@pytest.mark.parametrize("more", [PENALISED, FREE, {"aggregation": "constant"}])
def test_equal_objectives_are_one_to_the_last_bit(more: Objective, tmp_path: Path) -> None:
    """The loss and gradients are those of one objective over samples of any domain."""
    objective = {**more, "sequence_mask": {"enabled": True, "delta": 0.01}}
    objective["kl"] = {"coefficient": 0.1, "target": 1e-9}
    learned = samples("sums", "words")
    stage = mixed(tmp_path, sums=objective, words=objective)
    found = stage.gradients(learned, stage.pack(learned))
    of_several = gradients(stage)
    stage = mixed(tmp_path, sums=objective, words=objective)
    settings, reference = only(stage).settings, only(stage).reference
    assert reference is not None
    parts = batch.split(learned, RankPlace.here(), 64, replay=False)
    assert len({each.domain for each in parts[0].samples}) == 2
    reference.compute_logprobs(parts, TEMPERATURE)
    totals = Totals(8, sum(len(each.response) for each in learned), LONGEST, 8)

    def loss(responses: Responses) -> tuple[torch.Tensor, float]:
        part, logprobs = responses.batch, responses.logprobs(TEMPERATURE)
        part.old_logprobs = logprobs.detach()
        tokens = Tokens(
            logprobs=logprobs,
            old_logprobs=part.old_logprobs,
            engine_logprobs=part.engine_logprobs,
            advantages=part.advantages,
            mask=part.mask,
            weights=stage._weights(part),
            reference_logprobs=part.reference_logprobs,
            entropy=responses.entropy(TEMPERATURE),
        )
        result = policy_loss(tokens, totals, settings, 0.1)
        return result.loss, result.loss.item()

    expected = stage.policy.accumulate(parts, loss, sum(each.length for each in learned))
    assert found["loss"] == sum(expected)
    of_one = gradients(stage)
    assert any(gradient.any() for gradient in of_one.values())
    assert all(torch.equal(of_several[name], of_one[name]) for name in of_one)
    halves = [found["kl/sums"], found["kl/words"]]  # equally many tokens
    assert sum(halves) / 2 == pytest.approx(found["kl"], rel=1e-6)
    after = stage.after_update(found)
    expected_names = ["kl_coefficient", "kl_coefficient/sums", "kl_coefficient/words"]
    assert after == dict.fromkeys(expected_names, 0.1)


class LogProbs:
    """Stands for the policy: log-probabilities in fp64 that are its parameters."""

    def __init__(self) -> None:
        self.parts: list[MicroBatch] = []
        self.values: list[torch.Tensor] = []
        self.entropies: list[torch.Tensor] = []

    def accumulate(self, parts: list[MicroBatch], loss: Any, read: float) -> list[Any]:
        self.parts, found = parts, []
        for part in parts:
            draw = np.random.default_rng(len(found))
            values, entropy = (
                torch.tensor(-draw.random(tuple(part.mask.shape)), requires_grad=True)
                for _ in range(2)
            )
            self.values.append(values)
            self.entropies.append(entropy)
            responses: Any = SimpleNamespace(
                batch=part, logprobs=lambda _, v=values: v, entropy=lambda _, e=entropy: e
            )
            value, shares = loss(responses)
            value.backward()
            found.append(shares)
        return found


def in_fp64(stage: GrpoStage, learned: list[Sample]) -> tuple[LogProbs, dict[str, float]]:
    """Run `gradients` on parameters in fp64; pi_old and the reference differ from the policy."""
    parts, policy = stage.pack(learned), LogProbs()
    stage.policy = policy  # type: ignore[assignment]
    for number, part in enumerate(parts):
        draw = np.random.default_rng(100 + number)
        old, theirs = (torch.tensor(-draw.random(tuple(part.mask.shape))) for _ in range(2))
        part.engine_logprobs = part.engine_logprobs.double()
        part.advantages = part.advantages.double()
        part.old_logprobs, part.reference_logprobs = old, theirs
        part.weights = stage._weights(part)
    for objective in stage.objectives:
        objective.reference = None  # its log-probabilities are given
    return policy, stage.gradients(learned, parts)


def by_hand(policy: LogProbs, tokens: int, responses: int) -> tuple[float, list[torch.Tensor]]:
    """Return the loss and its gradients: PENALISED of `sums` plus FREE of `words`."""
    leaves = [each.detach().clone().requires_grad_() for each in policy.values]
    total = torch.zeros((), dtype=torch.float64)
    for part, values, entropy in zip(policy.parts, leaves, policy.entropies, strict=True):
        assert part.old_logprobs is not None
        assert part.reference_logprobs is not None
        for row, sample in enumerate(part.samples):
            own = slice(0, len(sample.response))
            now, old = values[row, own], part.old_logprobs[row, own]
            advantage, mu = part.advantages[row, own], part.engine_logprobs[row, own]
            if sample.domain == "sums":
                ratio, away = (now - old).exp(), part.reference_logprobs[row, own] - now
                gain = (ratio * advantage).minimum(ratio.clamp(0.8, 1.28) * advantage)
                total = total + (-gain + 0.5 * (away.exp() - away - 1)).sum() / tokens
            else:
                # GSPO-token's form (2507.18071, eq. 14), so that a token has its own weight.
                ratio = (now - old).mean().exp().detach() * (now - now.detach()).exp()
                gain = (ratio * advantage).minimum(ratio.clamp(0.9, 1.1) * advantage)
                gain = gain * (old - mu).exp().clamp(max=1.1) + 0.01 * entropy[row, own].detach()
                total = total - gain.mean() / responses
    total.backward()
    return total.item(), [leaf.grad for leaf in leaves if leaf.grad is not None]


def test_unlike_objectives_add_up_by_the_formulas_of_each(tmp_path: Path) -> None:
    """Each is normalised by the counts of both domains, in fp64."""
    learned = samples("sums", "words")
    stage = mixed(tmp_path, tokens=16, sums=PENALISED, words=FREE)
    policy, found = in_fp64(stage, learned)
    for part in policy.parts:  # micro-batches of one domain each
        assert {each.domain for each in part.samples} == {part.domain}
    assert len(policy.parts) > 2
    loss, expected = by_hand(policy, sum(len(each.response) for each in learned), len(learned))
    assert found["loss"] == pytest.approx(loss, abs=1e-12)
    for values, gradient in zip(policy.values, expected, strict=True):
        assert values.grad is not None
        torch.testing.assert_close(values.grad, gradient, atol=1e-12, rtol=0)
    # A metric is a mean over the domains that have it: here half of the tokens each.
    assert found["kl"] == found["kl/sums"] > 0
    assert "kl/words" not in found
    assert 0 < found["correction"] < 1.1


def test_a_kl_coefficient_reaches_its_own_domain_alone(tmp_path: Path) -> None:
    learned, free = samples("sums", "words"), {**PENALISED, "kl": {"coefficient": 0.0}}
    _, without = in_fp64(mixed(tmp_path, sums=free, words=free), learned)
    assert "kl" not in without
    grads = {}
    for coefficient in (0.25, 0.5):
        penalised = {**PENALISED, "kl": {"coefficient": coefficient}}
        policy, found = in_fp64(mixed(tmp_path, sums=penalised, words=free), learned)
        own = {
            part.domain: each.grad for part, each in zip(policy.parts, policy.values, strict=True)
        }
        grads[coefficient] = own
        assert "kl/words" not in found
        assert found["kl/sums"] > 0
    assert torch.equal(grads[0.25]["words"], grads[0.5]["words"])
    assert not torch.allclose(grads[0.25]["sums"], grads[0.5]["sums"])


def test_a_truncated_response_is_masked_in_its_own_domain_alone(tmp_path: Path) -> None:
    stage = mixed(tmp_path, sums={**FREE, "mask_truncated": True}, words=FREE)
    seen: list[Sample] = []
    inner = stage.gradients

    def watched(learned: list[Sample], parts: list[MicroBatch]) -> dict[str, float]:
        seen.extend(learned)
        return inner(learned, parts)

    stage.gradients = watched  # type: ignore[method-assign]
    stage.step(1)
    masked = {each.domain for each in seen if not len(each.learned)}
    assert masked == {"sums"}
    assert {each.domain for each in seen if not each.finished} == {"sums", "words"}


def test_advantages_scaling_and_router_shift_are_of_each_domain(tmp_path: Path) -> None:
    """Entropies divide the advantages of the domain that asks for it; one pass serves both."""
    shifted = {"ratio": {"name": "rspo"}, "advantage": {"name": "dr_grpo"}}
    stage = mixed(tmp_path, updates=2, sums={**FREE, "scaling": "edge"}, words=shifted)
    assert not stage.one_pass
    movements: dict[str, set[bool]] = {"sums": set(), "words": set()}
    scaled: dict[str, set[bool]] = {"sums": set(), "words": set()}
    inner = stage.gradients

    def watched(learned: list[Sample], parts: list[MicroBatch]) -> dict[str, float]:
        found = inner(learned, parts)
        for part in parts:
            movements[part.domain].add(part.router_movement is not None)
            for row, sample in zip(part.advantages, part.samples, strict=True):
                scaled[part.domain].add(row[0].item() != np.float32(sample.advantage))
        return found

    stage.gradients = watched  # type: ignore[method-assign]
    metrics = stage.step(1)
    assert movements == {"sums": {False}, "words": {True}}
    assert True in scaled["sums"]
    assert scaled["words"] == {False}
    assert metrics["router_movement"] > 0
    assert np.isfinite(list(metrics.values())).all()


def test_references_are_loaded_once_each(tmp_path: Path) -> None:
    def kl(**given: Any) -> Objective:
        return {"kl": {"coefficient": 0.1, **given}}

    stage = mixed(
        tmp_path,
        parent=kl(),
        same=kl(estimator="full"),
        cold=kl(reference="cold_start"),
        slow=kl(reference="ema", ema_decay=0.99),
        also_slow=kl(reference="ema", ema_decay=0.99, estimator="k2"),
        fast=kl(reference="ema", ema_decay=0.5),
        free={"kl": {"coefficient": 0.0, "reference": "ema", "ema_decay": 0.1}},
    )
    of = {each.name: each.reference for each in stage.objectives}
    assert of["parent"] is of["same"] is not of["cold"]
    assert of["slow"] is of["also_slow"] is not of["fast"]
    assert of["free"] is None
    assert len(stage.objectives.references) == 4
    assert sorted(stage.policy.averages) == ["ema_0_5", "ema_0_99"]
    first = stage.step(1)
    assert {f"kl/{name}" for name in of if name != "free"} < first.keys()
    assert "kl/free" not in first


def test_a_domain_s_own_reference_is_of_no_other_domain(tmp_path: Path) -> None:
    """`reference: experts` is another model in every domain, though objectives are equal."""
    kl = {"kl": {"coefficient": 0.1, "reference": "experts"}}
    whole = mixed(tmp_path / "alike", sums=kl, words=kl)
    assert only(whole).reference is not None  # one model for both
    stage = mixed(tmp_path / "apart", own=("words",), sums=kl, words=kl)
    of = {each.name: each.reference for each in stage.objectives}
    assert list(of) == ["sums", "words"]
    assert None is not of["sums"] is not of["words"] is not None
    first = stage.step(1)
    assert {"kl/sums", "kl/words"} < first.keys()


def test_a_kl_coefficient_follows_the_kl_of_its_own_domain(tmp_path: Path) -> None:
    """1909.08593, section 2.2: up by 2 % above its target, and down by 2 % below."""
    kl = {"coefficient": 0.5, "target": 1.0}
    stage = mixed(tmp_path, sums={**PENALISED, "kl": kl}, words={"kl": kl})
    stage.objectives.after_update({"kl": 5.0, "kl/sums": 0.5, "kl/words": 9.5})
    found = {objective.name: objective.kl_coefficient for objective in stage.objectives}
    assert found == pytest.approx({"sums": 0.5 * 0.98, "words": 0.5 * 1.02})


def test_a_resumed_stage_repeats_an_undisturbed_one(tmp_path: Path) -> None:
    objectives = {
        "sums": {
            **PENALISED,
            "kl": {"coefficient": 0.5, "target": 1e-9, "reference": "ema", "ema_decay": 0.9},
        },
        "words": {
            "aggregation": "lambda",
            "lambda_learning_rate": 0.5,
            "kl": {"coefficient": 0.01, "target": 10.0, "reference": "ema", "ema_decay": 0.5},
        },
    }
    stage = mixed(tmp_path, updates=2, **objectives)
    first = stage.step(1)
    assert first["kl_coefficient/sums"] == pytest.approx(0.5 * (1 + 1.02) / 2)
    assert first["kl_coefficient/words"] == pytest.approx(0.01 * (1 + 0.98) / 2)
    assert "kl_coefficient" not in first
    assert "length_exponent/words" in first
    saver = Saver(tmp_path / "checkpoints")
    saver.begin(stage.policy, 1, stage.state())
    saver.finish()
    undisturbed = stage.step(2)
    assert undisturbed["length_exponent/words"] != 0
    other = mixed(tmp_path, updates=2, **objectives)
    state = load.training_state(other.policy, tmp_path / "checkpoints" / "step_1")
    assert set(state["objectives"]) == {"sums", "words"}
    other.restore(json.loads(json.dumps(state)))
    resumed = other.step(2)
    unlike = ("seconds", "replayed")  # the rollout log of the first is replayed
    same = [
        {name: value for name, value in each.items() if not name.startswith(unlike)}
        for each in (undisturbed, resumed)
    ]
    assert same[0] == same[1]
    assert other.state()["objectives"] == stage.state()["objectives"]
    for mine, theirs in (
        (stage.policy, other.policy),
        *zip(stage.policy.averages.values(), other.policy.averages.values(), strict=True),
    ):
        for name, weight in mine.named_weights().items():
            assert torch.equal(weight, theirs.named_weights()[name]), name


def test_the_state_of_equal_objectives_is_that_of_one_domain(tmp_path: Path) -> None:
    """So that a checkpoint of before restores."""
    stage = mixed(tmp_path, sums=PENALISED, words=PENALISED)
    state = stage.state()
    assert "objectives" not in state
    stage.restore({**state, "kl_coefficient": 0.25, "length_exponent": -0.5})
    assert (only(stage).kl_coefficient, only(stage).length_exponent) == (0.25, -0.5)
