"""The merge: every domain has its own teacher, and weighs what the settings say."""

from __future__ import annotations

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
from stages.distill import Merge, weights_of
from stages.kinds.distill import DistillSettings
from tests.fake_engines import RefittedFleet, toy_domain, toy_job, toy_run

pytestmark = pytest.mark.usefixtures("one_rank")

LENGTHS = {"sums": [5, 3], "words": [1, 2, 3]}
MERGE: dict[str, Any] = {"stage": "merge", "kind": "distill", "block": "merge"}
SEEDS = {"sums": 0, "words": 1}  # of the teachers' weights; the student's are of 0


def start_by_name(policy: Policy, checkpoint: Path) -> None:
    """Stands for loading a teacher's checkpoint; the student begins elsewhere first."""
    policy.start_fresh(SEEDS.get(checkpoint.name, 0))


def merge(directory: Path, **given: Any) -> Merge:
    settings = toy_run(sums=toy_domain(), words=toy_domain(prompts={"dataset": "spell_backward"}))
    block = {
        "from": "cold_start",
        "teachers": "experts",
        "routing": {"replay": "none"},
        "optimizer": {"learning_rate": 1e-2},
        "loop": {"steps": 3, "micro_batch_tokens": 256},
        **given,
    }
    settings = settings.model_copy(
        update={"stages": {"merge": DistillSettings.model_validate(block)}}
    )
    teachers = {domain: directory / domain for domain in SEEDS}
    job = toy_job(directory, settings, domain=None, teachers=teachers, **MERGE)
    with (
        mock.patch("stages.sampling.engines.Fleet", RefittedFleet),
        mock.patch.object(load, "weights", start_by_name),
    ):
        stage = Merge(job)
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


def expected(student: Policy, teacher: Policy, samples: list[Sample]) -> float:
    """Mean KL(student || teacher) over the tokens of the responses, by whole rows of logits."""
    rows = []
    for policy in (student, teacher):
        parts = [collate([sample], RankPlace(), replay=False) for sample in samples]
        heads = policy.evaluate(parts, lambda responses: responses.logits)
        logits = torch.cat([head.hidden @ head.weight.t() for head in heads])
        rows.append(logits.detach().double().numpy())
    ours, theirs = (each - np.log(np.exp(each).sum(-1, keepdims=True)) for each in rows)
    return float((np.exp(ours) * (ours - theirs)).sum(-1).mean())


def gradients(stage: Merge, samples: list[Sample]) -> dict[str, float]:
    return stage.gradients(samples, stage.pack(samples))


def test_every_domain_has_its_own_teacher_and_the_divergence_its_direction(
    tmp_path: Path, samples: list[Sample]
) -> None:
    stage = merge(tmp_path)
    with torch.no_grad():  # else logits hardly differ, and either direction gives the same
        for policy in (stage.policy, *stage.teachers.values()):
            policy.chunks[0].output_layer.weight.mul_(30)
            policy.weights_changed()
    found = gradients(stage, samples)
    own = [sample for sample in samples if sample.domain == "words"]
    reverse = expected(stage.policy, stage.teachers["words"], own)
    forward = expected(stage.teachers["words"], stage.policy, own)
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
    assert weights_of(settings, {"a": 3, "b": 4, "c": 0}) == pytest.approx(
        {"a": 2 / 3, "b": 1 / 3, "c": 0}
    )
