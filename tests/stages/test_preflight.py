"""The first step of a merge says how far the student is from its teachers, and warns."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from parallel.sample import Sample
from stages.kinds.distill.work import DistillStage
from tests.stages.toy_merges import SEEDS, gradients, merge, written

pytestmark = pytest.mark.usefixtures("one_rank")


def reported(stage: DistillStage, samples: list[Sample]) -> tuple[dict[str, float], list[str]]:
    """Return the metrics of a first step on samples, and the warnings."""
    stage._version = 1
    with mock.patch("stages.kinds.distill.preflight.report_notice") as notice:
        found = gradients(stage, samples)
    return found, [call.args[0] for call in notice.call_args_list]


def test_the_kl_is_that_of_the_step_and_a_teacher_equal_to_the_student_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = merge(tmp_path)
    samples = [*written("sums", [5, 3]), *written("words", [4, 2])]
    found, warnings = reported(stage, samples)
    assert found["preflight_kl/sums"] == found["teacher_kl/sums"] == 0
    assert found["preflight_kl/words"] == pytest.approx(found["teacher_kl/words"]) != 0
    assert found["disjoint_tokens/sums"] == found["disjoint_tokens/words"] == 0
    path = stage.job.teachers["sums"]
    assert warnings == [
        f"stages.merge: the teacher of sums, {path}, equals the student, and teaches nothing;"
        " name another one, or see why its training changed nothing: no reward, or none that differ"
    ]
    assert "merge: KL of the student to its teachers, by domain: sums 0 nats, words " in (
        capsys.readouterr().out
    )


def test_only_the_first_step_is_looked_at(tmp_path: Path) -> None:
    stage = merge(tmp_path)
    with mock.patch("stages.kinds.distill.preflight.report_notice") as notice:
        first, second = stage.step(1), stage.step(2)
    assert notice.call_count == 1  # the teacher of sums
    looked = {name for name in first if name.startswith(("preflight", "disjoint"))}
    assert looked == {
        f"{name}/{domain}" for name in ("preflight_kl", "disjoint_tokens") for domain in SEEDS
    }
    assert not looked & second.keys()


def test_tokens_that_a_teacher_gives_next_to_nothing_are_named(tmp_path: Path) -> None:
    """The student likes two tokens that its teacher excludes; whole rows of logits say where."""
    stage = merge(tmp_path)
    teacher, student = stage.teachers.of("words")[0], stage.policy
    samples = written("words", [6, 1])
    for each in samples:
        each.response = np.array([7, 7, 1, 7, 1, 7][: len(each.response)], np.int32)
    part = next(each for each in stage.pack(samples) if each.domain == "words")
    rows = []
    with torch.no_grad():
        for policy, scale in ((student, 60.0), (teacher, -60.0)):
            [found] = policy.response_logits([part])
            common = found.hidden.mean(0)
            head = policy.chunks[0].output_layer.weight
            head[7] = head[1] = scale * common / common.square().sum()
            policy.weights_changed()
            rows.append((found.hidden @ head.T).double().log_softmax(-1))
    ids = part.own_targets
    log_p, log_q = (each.gather(1, ids[:, None])[:, 0] for each in rows)
    expected = Counter(ids[(log_p > np.log(0.1)) & (log_q < np.log(1e-6))].tolist())
    assert expected
    metrics, warnings = reported(stage, samples)
    assert metrics["disjoint_tokens/words"] == pytest.approx(expected.total() / 7)
    assert warnings[-1].startswith(
        f"stages.merge: the teacher of words, {stage.job.teachers['words']}, gives less than 1e-06"
        f" to {expected.total()} of 7 tokens that the student sampled with more than 0.1: "
    )
    shown = {1: "the end token '[END]'", 7: repr(stage.engines.tokenizer.decode([7]))}
    for token, count in expected.items():
        assert f"{shown[token]} {count} times" in warnings[-1]


def test_every_teacher_of_a_domain_is_looked_at(tmp_path: Path) -> None:
    """One of the two teachers of `words` has the student's weights."""
    stage = merge(tmp_path, teachers={"sums": "self", "words": {"sums": 0.25, "words": 0.75}})
    samples = [*written("sums", [5, 3]), *written("words", [4, 2])]
    found, warnings = reported(stage, samples)
    looked = {name for name in found if name.startswith("preflight_kl/")}
    assert looked == {f"preflight_kl/{name}" for name in ("sums", "words/sums", "words/words")}
    assert found["preflight_kl/words/sums"] == 0 < found["preflight_kl/words/words"]
    assert found["preflight_kl/sums"] == pytest.approx(found["teacher_kl/sums"]) != 0
    expected = 0.75 * found["preflight_kl/words/words"]
    assert found["teacher_kl/words"] == pytest.approx(expected)
    [warning] = warnings
    path = stage.job.teachers["words/1"]
    assert warning.startswith(f"stages.merge: the teacher of words, {path}, equals the student")
