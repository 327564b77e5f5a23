"""The merge: every domain has its own teacher, and weighs what the settings say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from parallel.batch import RankPlace, collate
from parallel.checkpoint import load
from parallel.model.policy import Policy
from parallel.sample import Sample
from stages.data.problem import Problem
from stages.kinds.distill.domain_shares import weights_of
from stages.kinds.distill.settings import DistillSettings, domain_of
from stages.kinds.distill.work import DistillStage
from stages.objectives.groups import Batch, Group
from tests.fake_engines import RefittedFleet, toy_domain, toy_job, toy_run

pytestmark = pytest.mark.usefixtures("one_rank")

LENGTHS = {"sums": [5, 3], "words": [1, 2, 3]}
MERGE: dict[str, Any] = {"stage": "merge", "kind": "distill", "block": "merge"}
SEEDS = {"sums": 0, "words": 1}  # of the teachers' weights; the student's are of 0


def start_by_name(policy: Policy, checkpoint: Path) -> None:
    """Stands for loading a teacher's checkpoint; the student begins elsewhere first."""
    policy.start_fresh(SEEDS.get(checkpoint.name, 0))


def merge(directory: Path, **given: Any) -> DistillStage:
    settings = toy_run(sums=toy_domain(), words=toy_domain(prompts={"dataset": "spell_backward"}))
    block = {
        "from": "cold_start",
        "teachers": "experts",
        "teacher_memory": {"resident": "all"},  # no checkpoint to read one from
        "routing": {"replay": "none"},
        "optimizer": {"learning_rate": 1e-2},
        "loop": {"steps": 3, "micro_batch_tokens": 256},
        **given,
    }
    settings = settings.model_copy(
        update={"stages": {"merge": DistillSettings.model_validate(block)}}
    )
    own = settings.stages["merge"]
    assert isinstance(own, DistillSettings)
    labels = [label for domain in SEEDS for label in own.teacher_weights(domain)]
    # A domain's second teacher is the other domain's.
    names = {"sums/2": "words", "words/2": "sums"}
    teachers = {label: directory / names.get(label, domain_of(label)) for label in labels}
    job = toy_job(directory, settings, domain=None, teachers=teachers, **MERGE)
    with (
        mock.patch("stages.sampling.engines.Fleet", RefittedFleet),
        mock.patch.object(load, "weights", start_by_name),
    ):
        stage = DistillStage(job)
    stage.policy.start_fresh(0)
    return stage


@pytest.fixture
def samples() -> list[Sample]:
    """Responses of both domains; those to `sums` have more tokens."""
    draw = np.random.default_rng(0)
    return [
        Sample(
            domain=domain,
            prompt=np.array([2, 3, 4], np.int32),
            response=draw.integers(2, 70, length).astype(np.int32),
            logprobs=np.zeros(length, np.float32),
            versions=np.zeros(length, np.int32),
        )
        for domain, lengths in LENGTHS.items()
        for length in lengths
    ]


def rows(policy: Policy, samples: list[Sample]) -> np.ndarray:
    """Return log-probabilities of the whole vocabulary at every response token."""
    parts = [collate([sample], RankPlace(), replay=False) for sample in samples]
    heads = policy.evaluate(parts, lambda responses: responses.logits)
    logits = torch.cat([head.hidden @ head.weight.t() for head in heads]).detach().double().numpy()
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def expected(student: Policy, teacher: Policy, samples: list[Sample]) -> float:
    """Mean KL(student || teacher) over the tokens of the responses, by whole rows of logits."""
    ours, theirs = rows(student, samples), rows(teacher, samples)
    return float((np.exp(ours) * (ours - theirs)).sum(-1).mean())


def gradients(stage: DistillStage, samples: list[Sample]) -> dict[str, float]:
    return stage.gradients(samples, stage.pack(samples))


def test_every_domain_has_its_own_teacher_and_the_divergence_its_direction(
    tmp_path: Path, samples: list[Sample]
) -> None:
    stage = merge(tmp_path)
    with torch.no_grad():  # else logits hardly differ, and either direction gives the same
        for policy in (stage.policy, *(each for name in SEEDS for each in stage.teachers.of(name))):
            policy.chunks[0].output_layer.weight.mul_(30)
            policy.weights_changed()
    found = gradients(stage, samples)
    own = [sample for sample in samples if sample.domain == "words"]
    reverse = expected(stage.policy, stage.teachers.of("words")[0], own)
    forward = expected(stage.teachers.of("words")[0], stage.policy, own)
    assert abs(reverse - forward) > 0.01 * reverse
    assert found["teacher_kl/sums"] == pytest.approx(0, abs=1e-6)  # its teacher is the student
    assert found["teacher_kl/words"] == pytest.approx(reverse, rel=1e-4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, 1 / 2),
        ({"domain_weights": {"words": 3}}, 3 / 4),
        ({"averaged_over": "tokens"}, 6 / 14),
        ({"averaged_over": "tokens", "domain_weights": {"words": 2}}, 12 / 20),
    ],
)
def test_domains_have_the_weights_of_the_settings(
    given: dict[str, Any], words: float, tmp_path: Path, samples: list[Sample]
) -> None:
    stage = merge(tmp_path, **given)
    found = gradients(stage, samples)
    assert found["loss"] == found["teacher_kl"]
    assert found["loss"] == pytest.approx(words * found["teacher_kl/words"], rel=1e-5)
    assert found["token_share/words"] == pytest.approx(6 / 14)
    # Of this loss are the gradients, too: those of `sums` are 0, whose teacher is the student.
    norm = stage.policy.step()
    alone = merge(tmp_path)
    gradients(alone, [sample for sample in samples if sample.domain == "words"])
    assert norm == pytest.approx(words * alone.policy.step(), rel=1e-4)


def test_a_domain_without_tokens_has_no_weight() -> None:
    settings = DistillSettings.model_construct(averaged_over="domains", domain_weights={"a": 2.0})
    assert weights_of(settings, {"a": 3, "b": 4, "c": 0}, {}) == pytest.approx(
        {"a": 2 / 3, "b": 1 / 3, "c": 0}
    )


def test_weights_follow_the_gaps_that_are_left() -> None:
    settings = DistillSettings.model_construct(averaged_over="gap", domain_weights={"a": 2.0})
    tokens = {"a": 300, "b": 4, "c": 0}
    alike = pytest.approx({"a": 2 / 3, "b": 1 / 3, "c": 0})
    assert weights_of(settings, tokens, {}) == alike
    assert weights_of(settings, tokens, {"a": 0.0, "b": 0.0}) == alike
    gaps = {"a": 0.1, "b": 0.6, "c": 0.5}
    assert weights_of(settings, tokens, gaps) == pytest.approx({"a": 0.25, "b": 0.75, "c": 0})


def test_gaps_are_averages_that_a_resumed_stage_continues(
    tmp_path: Path, samples: list[Sample]
) -> None:
    stage = merge(tmp_path, averaged_over="gap")
    first = gradients(stage, samples)
    assert first["loss"] == pytest.approx(first["teacher_kl/words"] / 2, rel=1e-5)
    stage.after_update(first)
    assert stage.gaps["words"] == pytest.approx(first["teacher_kl/words"])
    later = {**first, "teacher_kl/words": 0.5, "token_share/sums": 0.0, "teacher_kl/sums": 0.0}
    sums = stage.gaps["sums"]
    stage.after_update(later)
    expected = 0.9 * first["teacher_kl/words"] + 0.1 * 0.5
    assert stage.gaps == {"words": pytest.approx(expected), "sums": sums}  # it had no token
    resumed = merge(tmp_path, averaged_over="gap")
    resumed.restore(json.loads(json.dumps(stage.state())))
    assert resumed.gaps == stage.gaps
    assert gradients(resumed, samples) == gradients(stage, samples)
    assert "gaps" not in merge(tmp_path).state()


def test_the_gradient_share_is_of_what_enters_the_model(
    tmp_path: Path, samples: list[Sample]
) -> None:
    seeds = {"sums": 2, "words": 1}
    with mock.patch.dict(SEEDS, seeds):
        stage = merge(tmp_path, averaged_over="tokens")
    found = gradients(stage, samples)
    sums = {}
    for domain in SEEDS:
        own = [sample for sample in samples if sample.domain == domain]
        ours, theirs = rows(stage.policy, own), rows(stage.teachers.of(domain)[0], own)
        p, d = np.exp(ours), ours - theirs
        sums[domain] = np.abs(p * (d - (p * d).sum(-1, keepdims=True))).sum()
    share = sums["words"] / sum(sums.values())
    assert found["gradient_share/words"] == pytest.approx(share, rel=1e-3)
    assert found["gradient_share/words"] + found["gradient_share/sums"] == pytest.approx(1)


@pytest.mark.parametrize(
    "method",
    [
        "forward_kl",
        {"name": "jsd", "beta": 0.3},
        {"name": "top_k_reverse_kl", "k": 5, "tail": "lumped"},
        {"name": "exopd", "lambda": 1.5, "extrapolate": "everywhere"},
        {"name": "exopd", "lambda": 1.5, "extrapolate": "nucleus", "top_p": 0.5},
        {"name": "exopd", "over": "sampled"},
        "sampled_token",
        {"name": "opd_reward", "teacher_weight": 2},
        {"name": "iw_opd", "gamma": 0.7},
    ],
    ids=str,
)
def test_a_method_s_loss_is_the_one_trained_on_and_the_kl_is_logged(
    method: Any, tmp_path: Path, samples: list[Sample]
) -> None:
    with mock.patch.dict(SEEDS, {"sums": 2}):
        stage, plain = merge(tmp_path, method=method), merge(tmp_path)
    for sample in samples:
        sample.advantage = 0.5
    found, usual = gradients(stage, samples), gradients(plain, samples)
    for name in ("teacher_kl", "teacher_kl/sums", "teacher_kl/words", "token_share/words"):
        assert found[name] == usual[name]
    assert found["loss"] != usual["loss"]
    assert stage.policy.step() != plain.policy.step()


def test_a_method_without_keys_is_its_name_in_every_dump(tmp_path: Path) -> None:
    """So that a finished merge of before, whose manifest has the name, is not stale."""
    stage = merge(tmp_path, method="full_vocab_reverse_kl")
    assert stage.block_settings.model_dump(mode="json")["method"] == "full_vocab_reverse_kl"
    assert (
        stage.block_settings
        == merge(tmp_path, method={"name": "full_vocab_reverse_kl"}).block_settings
    )
    jsd = merge(tmp_path, method={"name": "jsd"}).block_settings
    assert jsd.model_dump(mode="json")["method"] == {"name": "jsd", "beta": 0.5}
    assert DistillSettings.model_validate(jsd.model_dump(mode="json")) == jsd


def test_rewards_give_advantages_to_a_method_that_reads_them(tmp_path: Path) -> None:
    """A domain's are by its own rewards; without a reward a sample learns from its teacher."""
    stage = merge(tmp_path, method="opd_reward", sampling={"group_size": 2})
    drawn = [
        Sample("sums", np.zeros(1, np.int32), np.zeros(2, np.int32), reward=reward)
        for reward in (1.0, 0.0, None)
    ]
    group = Group(Problem("sums", 0, "p", "1"), 0, list(drawn), ended=1)
    batch = Batch([group], [], 0, 0, 0)
    [update] = stage.split_updates(batch).updates
    assert update == drawn
    assert drawn[0].advantage > 0 > drawn[1].advantage and drawn[2].advantage == 0
    for each in drawn:
        each.advantage = 0.0
    merge(tmp_path).split_updates(batch)
    assert not any(each.advantage for each in drawn)


@pytest.mark.parametrize("method", ["full_vocab_reverse_kl", {"name": "jsd", "beta": 0.3}])
def test_the_loss_to_several_teachers_is_the_weighted_sum_of_the_losses(
    method: Any, tmp_path: Path, samples: list[Sample]
) -> None:
    both = {"sums": {"experts": 0.25, "../outside": 0.75}, "words": "experts"}
    alone = []
    for seed in (2, SEEDS["words"]):
        with mock.patch.dict(SEEDS, {"sums": seed}):
            alone.append(merge(tmp_path, method=method))
    with mock.patch.dict(SEEDS, {"sums": 2}):
        together = merge(tmp_path, method=method, teachers=both)
    first, second = (gradients(each, samples) for each in alone)
    found = gradients(together, samples)
    kls = [each["teacher_kl/sums"] for each in (first, second)]
    assert found["teacher_kl/sums/experts"] == kls[0] != kls[1]
    assert found["teacher_kl/sums/2"] == kls[1]  # a path, by its place
    assert found["teacher_kl/sums"] == pytest.approx(0.25 * kls[0] + 0.75 * kls[1])
    assert found["teacher_kl/words"] == first["teacher_kl/words"]
    assert found["loss"] == pytest.approx(0.25 * first["loss"] + 0.75 * second["loss"], rel=1e-6)
    parts = (
        [each.main_grad for each in stage.policy.chunks[0].parameters()]
        for stage in (*alone, together)
    )
    for one, other, both_of_them in zip(*parts, strict=True):
        torch.testing.assert_close(0.25 * one + 0.75 * other, both_of_them, rtol=1e-4, atol=1e-8)
