"""Kept-token sets: how many ids an engine is asked to return, and what is computed over them."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from parallel.batch import MicroBatch, RankPlace, Responses, collate
from parallel.engine.wire import effective_top_k, largest_kept_set
from parallel.model.vocabulary import HeadLogits
from parallel.sample import Sample
from stages.domains import SamplingSettings
from stages.metrics import saturated
from stages.objectives.kl import k3
from stages.sampling.logprob_check import measure_mismatch
from stages.sampling.recording import observe
from tests.stages.toys import expert

TEMPERATURE = 0.8
KEPT = [[1, 4], [], [0, 2, 5]]  # of six ids; an empty set keeps all


def sampled() -> tuple[MicroBatch, torch.Tensor, torch.Tensor]:
    """Return a response of three tokens, and two models' logits [3, 6] with the cut ids at -inf."""
    sets = [np.array(ids, np.int64) for ids in KEPT]
    problem = "0" * 64
    sample = Sample("sums", np.ones(2, np.int32), np.array([4, 3, 0], np.int32), kept=sets)
    sample.problem, sample.versions = problem, np.ones(3, np.int32)
    sample.logprobs = np.full(3, -1.0, np.float32)
    part = collate([sample], RankPlace(), replay=False)
    generator = torch.Generator().manual_seed(0)
    logits, other = (torch.randn(3, 6, generator=generator, dtype=torch.float64) for _ in "ab")
    return part, logits, other


def over_kept(logits: torch.Tensor) -> list[torch.Tensor]:
    """Return log p of each token's kept ids, renormalised, in plain torch."""
    rows = [row if not ids else row[ids] for row, ids in zip(logits, KEPT, strict=True)]
    return [(row / TEMPERATURE).log_softmax(-1) for row in rows]


@pytest.mark.usefixtures("one_rank")
def test_entropies_and_kl_are_of_the_distribution_that_sampled() -> None:
    """The KL `full` is what the estimators estimate: k3's mean over the kept ids equals it."""
    part, logits, other = sampled()
    ours, theirs = over_kept(logits), over_kept(other)
    entropies = torch.stack([-(row.exp() * row).sum() for row in ours])
    kls = torch.stack([(p.exp() * (p - q)).sum() for p, q in zip(ours, theirs, strict=True)])
    means = [(p.exp() * k3(p, q, p)).sum() for p, q in zip(ours, theirs, strict=True)]
    torch.testing.assert_close(torch.stack(means), kls)
    responses = Responses(logits.requires_grad_(), part)
    torch.testing.assert_close(responses.entropy(TEMPERATURE)[0], entropies)
    torch.testing.assert_close(responses.kept_kl(other, TEMPERATURE)[0], kls)
    # No gradient reaches an id that cannot be sampled: raising it explores nothing.
    for loss in (responses.entropy(TEMPERATURE), responses.kept_kl(other, TEMPERATURE)):
        [slopes] = torch.autograd.grad(loss.sum(), logits)
        assert slopes[0, KEPT[0]].all() and not slopes[0, [0, 2, 3, 5]].any()
    # A merge compares student and teacher over the whole vocabulary.
    p, q = ((each / TEMPERATURE).log_softmax(-1) for each in (logits.detach(), other))
    whole = (p.exp() * (p - q)).sum(-1)
    torch.testing.assert_close(responses.kl(other, TEMPERATURE)[0].detach(), whole)


@pytest.mark.usefixtures("one_rank")
def test_an_expert_reads_and_records_entropies_over_kept_sets(tmp_path: Path) -> None:
    objective = {"kl": {"coefficient": 0.1, "estimator": "full"}, "entropy_bonus": 0.1}
    stage = expert(tmp_path, objective)
    stage.sampling = stage.sampling.model_copy(update={"temperature": TEMPERATURE})
    part, logits, other = sampled()
    part.reference = HeadLogits(other, torch.eye(6, dtype=torch.float64))
    part.old_logprobs = torch.zeros_like(part.engine_logprobs)
    responses = Responses(logits, part)
    tokens = stage._tokens(responses, stage.objectives.of(part.domain or "sums"))
    for found, expected in (
        (tokens.entropy, responses.entropy(TEMPERATURE)),
        (tokens.reference_kl, responses.kept_kl(other, TEMPERATURE)),
    ):
        assert found is not None
        torch.testing.assert_close(found, expected)
    part.recorded = {}
    observe(responses, TEMPERATURE, share=1.0)
    expected = [-(row.exp() * row).sum().item() for row in over_kept(logits)]
    assert part.recorded["entropies"][0].tolist() == pytest.approx(expected, rel=1e-6)
    policy = mock.Mock()
    policy.evaluate = lambda parts, read: [read(Responses(logits, each)) for each in parts]
    with mock.patch("stages.sampling.logprob_check.compare"):
        measure_mismatch(policy, [part], TEMPERATURE, entropies=True)
    assert part.old_entropies is not None  # which EDGE divides by
    assert part.old_entropies[0].tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("top_k", "top_p", "vocabulary", "expected"),  # the top_k, and the largest set
    [
        (20, 1.0, 151_936, (20, 84)),  # bf16 logits have ties, all of which vLLM keeps
        (20, 0.9, 80, (20, 80)),
        (0, 0.9, 151_936, (4096, 4160)),
        (0, 0.9, 80, (0, 80)),
        (0, 1.0, 151_936, (0, 151_936)),
    ],
)
def test_log_probabilities_are_requested_for_every_token_that_may_be_kept(
    top_k: int, top_p: float, vocabulary: int, expected: tuple[int, int]
) -> None:
    limits = effective_top_k(top_k, top_p, vocabulary), largest_kept_set(top_k, top_p, vocabulary)
    assert limits == expected


def test_sets_of_the_requested_size_are_counted() -> None:
    """They may have been larger: 20 and 64 ties."""
    sizes = [20, 84, 83, 21]
    sample = Sample("a", np.arange(3), np.arange(4), kept=[np.arange(size) for size in sizes])
    settings = SamplingSettings(top_k=20)
    assert saturated([sample], settings, 151_936) == {"kept_saturated": 0.25}
    assert saturated([sample], settings, 84) == {"kept_saturated": 0.0}  # all there is
    assert saturated([sample], SamplingSettings(), 151_936) == {}
